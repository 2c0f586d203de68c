"""Measurements of one controller, `virial_controld_<noun>_<unit>[_total]`. Closed label sets; no ids.

What can be counted from the state is counted when it is asked for, so no number can drift from what it counts.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from controld.core.model import JobState, Liveness
from controld.core.state import State
from controld.health.view import View

PREFIX = "virial_controld"
# A commit takes 0.2 ms (SQLite) to a few ms (etcd) where all is well; a plan of 10,000 nodes tens of ms.
_FAST_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_BATCH_COMMANDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
OTHER_METHOD = "other"


class Metrics:
    """Also the replica room's `Observer`. `methods`: every method served, so that the label set is closed."""

    def __init__(self, methods: Iterable[str]) -> None:
        disable_created_metrics()  # a second series for each, which says only when this process started
        self.registry = CollectorRegistry()
        self._methods = frozenset(methods)
        registry = self.registry
        self._commits = Counter(f"{PREFIX}_commits", "Committed batches.", registry=registry)
        self._operations = Counter(f"{PREFIX}_commit_operations", "Keys written.", registry=registry)
        self._commit_seconds = Histogram(
            f"{PREFIX}_commit_seconds", "Store time of a batch.", buckets=_FAST_SECONDS, registry=registry
        )
        self._commit_commands = Histogram(
            f"{PREFIX}_commit_commands", "Commands that shared a batch.", buckets=_BATCH_COMMANDS, registry=registry
        )
        self._queue = Gauge(f"{PREFIX}_queue_commands", "Commands waiting to be decided.", registry=registry)
        self._stall = Gauge(f"{PREFIX}_loop_stall_max_seconds", "Longest stall of the loop.", registry=registry)
        self._stall_max_seconds = 0.0
        self._refusals = Counter(
            f"{PREFIX}_refusals", "Commands decided against.", ["command", "reason"], registry=registry
        )
        self._plan_seconds = Histogram(
            f"{PREFIX}_plan_seconds", "Time of a plan.", buckets=_FAST_SECONDS, registry=registry
        )
        self._grants = Counter(f"{PREFIX}_plan_grants", "Gangs that a plan found room for.", registry=registry)
        self._unplaced = Gauge(f"{PREFIX}_plan_unplaced_jobs", "Gangs the last plan found none for.", registry=registry)
        self._tick_seconds = Histogram(
            f"{PREFIX}_tick_seconds", "Time of one pass of the control loop.", buckets=_FAST_SECONDS, registry=registry
        )
        self._calls = Counter(f"{PREFIX}_grpc_calls", "Ended calls.", ["method", "code"], registry=registry)
        self._call_seconds = Histogram(
            f"{PREFIX}_grpc_call_seconds", "Time of unary calls.", ["method"], buckets=_FAST_SECONDS, registry=registry
        )
        self._calls_open = Gauge(f"{PREFIX}_grpc_open_calls", "Calls under way.", ["method"], registry=registry)

    def committed(self, commands: int, operations: int, seconds: float) -> None:
        self._commits.inc()
        self._operations.inc(operations)
        self._commit_commands.observe(commands)
        self._commit_seconds.observe(seconds)

    def queued(self, commands: int) -> None:
        self._queue.set(commands)

    def stalled(self, seconds: float) -> None:
        if seconds > self._stall_max_seconds:
            self._stall_max_seconds = seconds
            self._stall.set(seconds)

    def refused(self, command: str, reason: str) -> None:
        self._refusals.labels(command, reason).inc()

    def planned(self, grants: int, unplaced: int, seconds: float) -> None:
        self._plan_seconds.observe(seconds)
        self._grants.inc(grants)
        self._unplaced.set(unplaced)

    def ticked(self, seconds: float) -> None:
        self._tick_seconds.observe(seconds)

    def call_began(self, method: str) -> None:
        self._calls_open.labels(self._label(method)).inc()

    def call_ended(self, method: str, code: str, seconds: float | None) -> None:
        """`seconds` None for a stream, whose length says nothing."""
        label = self._label(method)
        self._calls_open.labels(label).dec()
        self._calls.labels(label, code).inc()
        if seconds is not None:
            self._call_seconds.labels(label).observe(seconds)

    def tell_role(self, leads: Callable[[], bool]) -> None:
        """From now on, tell whether this controller leads."""
        gauge = Gauge(f"{PREFIX}_leading", "1 while this controller leads, else 0.", registry=self.registry)
        gauge.set_function(lambda: float(leads()))

    def tell_certificate(self, not_after: Callable[[], float]) -> None:
        """From now on, tell when the controller's own certificate ends."""
        what = "Unix time at which the controller's own certificate ends."
        gauge = Gauge(f"{PREFIX}_certificate_not_after_seconds", what, registry=self.registry)
        gauge.set_function(not_after)

    def count_state(self, state: Callable[[], State], view: Callable[[], View]) -> None:
        """From now on, tell of the jobs and sessions there are."""
        self.registry.register(_StateCollector(state, view))

    def _label(self, method: str) -> str:
        return method if method in self._methods else OTHER_METHOD


class _StateCollector(Collector):
    """Runs in the event loop's thread: the endpoint is served there, so nothing changes under it."""

    def __init__(self, state: Callable[[], State], view: Callable[[], View]) -> None:
        self._state = state
        self._view = view

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()  # counting needs a state, and there may be none yet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        state = self._state()
        jobs = Tally(job.state for job in state.jobs.values())
        yield _family("jobs", "Jobs known, by state.", "state", {s.value: jobs[s] for s in JobState})
        nodes = Tally(node.liveness for node in state.nodes.values())
        yield _family("sessions", "Node sessions, by liveness.", "liveness", {s.value: nodes[s] for s in Liveness})
        connected = sum(1 for session in self._view().sessions.values() if session.connected)
        yield GaugeMetricFamily(f"{PREFIX}_connected_nodes", "Nodes with an open stream.", value=connected)
        yield GaugeMetricFamily(f"{PREFIX}_store_revision", "Newest committed revision.", value=state.revision)


def _family(noun: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{PREFIX}_{noun}", text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
