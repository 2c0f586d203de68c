"""Prometheus metrics of the agent: closed label sets, base units, no ids."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from noded.core.agent import AgentCore
from noded.core.messages import SlotState

if TYPE_CHECKING:
    from prometheus_client import Metric

NS_PER_SECOND: Final = 1_000_000_000
# Every task of the host reaches the address: who connects and says nothing must not take the agent's threads and files.
CONNECTIONS_MAX: Final = 8
REQUEST_SECONDS: Final = 5.0


class NodeMetrics(Collector):
    """Reads the agent's state when scraped: from the server's own thread, so it copies before it looks."""

    def __init__(
        self,
        core: AgentCore,
        link: Counter[str],
        clock: Callable[[], int],
        events: Counter[str],
        hung: Callable[[], int],
    ) -> None:
        self._core = core
        self._link = link
        self._clock = clock
        self._events = events
        self._hung = hung

    def collect(self) -> Iterator[Metric]:
        core, now_ns = self._core, self._clock()
        renewed_ns = core.lease.renewed_ns
        age_seconds = float("inf") if renewed_ns is None else (now_ns - renewed_ns) / NS_PER_SECOND
        states = Counter(slot.status(now_ns).state for slot in core.slots.all())
        yield _gauge("guardian_up", "1 while the guardian answers.", float(core.guardian_ok))
        yield _gauge("session_up", "1 while a controller has welcomed this node.", float(core.welcomed))
        yield _gauge("renewal_age_seconds", "Since the last acknowledged renewal was sent.", age_seconds)
        yield _gauge("file_operations_running", "Under way or hanging.", float(self._hung()))
        slots = GaugeMetricFamily("virial_noded_slots", "Slots by state.", labels=["state"])
        for state in SlotState:
            slots.add_metric([state.value], states[state])
        yield slots
        yield _counters("orders_dropped", "Orders and reports that did not count, by why.", "reason", core.counters)
        yield _counters("link_events", "What happened on the control stream.", "event", self._link)
        yield _counters("events", "Events that the agent handled.", "event", self._events)


def serve_metrics(metrics: NodeMetrics, host: str, port: int) -> int:
    """Serve in a daemon thread; returns the port. Raises OSError."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    server = (_Server6 if family is socket.AF_INET6 else _Server)((host, port), _Handler)
    app: Any = cast("Any", prometheus_client).make_wsgi_app(registry)  # its type is only partly known
    server.set_app(app)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server.server_port


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the library's
        """Scrapes are not logged."""


class _Server(ThreadingMixIn, WSGIServer):
    """Hangs up at once on more than `CONNECTIONS_MAX` at a time, and after a while on who says nothing."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who hangs up, or is hung up on, is nothing to tell."""
        with contextlib.suppress(OSError):
            self.shutdown_request(request)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"virial_noded_{name}", text, value=value)


def _counters(name: str, text: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"virial_noded_{name}", text, labels=[label])
    for key, count in sorted(counts.copy().items()):
        family.add_metric([key], count)
    return family
