"""The controller without its input and output: one state, decided on and applied at once, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from controld.core.agent import Hello
from controld.core.commands import AdmitNode, Command, ForgetCheckpoint, Now, ReportInventory
from controld.core.ids import CheckpointId, JobId
from controld.core.model import CheckpointState, Cluster, Event, Inventory
from controld.core.outcome import Outcome, Refused, Reply, Transition
from controld.core.spec import SECOND_NS
from controld.core.state import Change, State
from controld.core.transitions import decide
from controld.health.view import View
from controld.matching.engine import plan
from controld.reconcile.grants import command_for_grant
from controld.reconcile.limits import Limits
from controld.reconcile.snapshot import snapshot
from controld.reconcile.tick import tick
from controld.service.failures import refused
from virial.errors import error_for
from virial.testing.agent import FakeAgent
from virialpb.ids import Epoch

LEADER_EPOCH = Epoch(1, 1)
# Often enough that orders follow each other within a second, as in a cluster.
TICK_NS = SECOND_NS // 4
BEAT_NS = SECOND_NS
STARTED_NS = 1_000 * SECOND_NS
# Wall clock, for display only: a time in 2026 that no test depends on.
UNIX_OFFSET_NS = 1_780_000_000 * SECOND_NS
# Longer than the controller's own time-outs: what has not happened by then will not happen by itself.
IDLE_NS = 900 * SECOND_NS


class StalledError(AssertionError):
    """A test waits for something that no amount of virtual time will bring."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One change of the state: what a watch is told."""

    revision: int
    changes: tuple[Change, ...]
    events: tuple[Event, ...]


class World:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.state = State(history=1)
        self.view = View(started_ns=STARTED_NS)
        self.now_ns = STARTED_NS
        self.agents: dict[str, FakeAgent] = {}
        self.commits: list[Commit] = []
        self.changed_ns = self.now_ns
        self._requests = 0
        self.state.apply((Change.put(Cluster("fake")),), 1)

    @property
    def now(self) -> Now:
        return Now(self.now_ns, self.now_ns + UNIX_OFFSET_NS)

    def ask(self, command: Command) -> Reply:
        """Carry out a command from outside. Raises the VirialError a client would raise."""
        outcome = self.do(command)
        if isinstance(outcome, Refused):
            raise error_for(refused(outcome))
        return outcome.reply

    def do(self, command: Command) -> Outcome:
        outcome = decide(self.state, command, self.now)
        if isinstance(outcome, Refused):
            return outcome
        changes, events = _numbered(outcome, self.state, self.now)
        if changes:
            revision = self.state.revision + 1
            self.state.apply(changes, revision)
            self.commits.append(Commit(revision, changes, events))
            self.changed_ns = self.now_ns
        return outcome

    def new_request_id(self) -> str:
        self._requests += 1
        return f"fake-{self._requests}"

    def wait(self, what: str) -> None:
        """One step on behalf of somebody who waits. Raises StalledError when nothing changes any more."""
        if self.now_ns - self.changed_ns > IDLE_NS:
            raise StalledError(f"{what}: fifteen virtual minutes passed and nothing changed; make something happen")
        self.step()

    def join(self, agent: FakeAgent) -> None:
        """A node's agent connects and reports what the node has."""
        self.agents[agent.name] = agent
        address = f"{agent.name}.test"
        self.ask(
            AdmitNode(
                agent.incarnation, agent.name, address, "pidns", agent.cpu_millis, agent.memory_bytes, agent.labels
            )
        )
        hello = Hello(
            agent.incarnation, agent.name, address, "pidns", agent.cpu_millis, agent.memory_bytes, agent.beat()
        )
        self.view.hello(hello, self.now_ns)
        self.ask(ReportInventory(agent.incarnation, Inventory(agent.devices)))
        self.view.mark_reported(agent.incarnation.node_uid)

    def step(self) -> None:
        """A quarter of a second: beats on whole seconds, one tick, one plan."""
        self.now_ns += TICK_NS
        if self.now_ns % BEAT_NS == 0:
            for agent in self.agents.values():
                if not agent.cut:
                    self.view.beat(agent.incarnation.node_uid, agent.beat(), self.now_ns)
        self._tick()

    def _tick(self) -> None:
        decisions = tick(self.state, self.view, self.now, LEADER_EPOCH, self.limits)
        for command in decisions.commands:
            self.do(command)
        by_uid = {agent.incarnation.node_uid: agent for agent in self.agents.values()}
        for order in decisions.orders:
            agent = by_uid.get(order.node)
            if agent is not None and not agent.cut:
                agent.obey(order.order)
        self._forget_dropped()
        planned = plan(snapshot(self.state, self.view, self.now), decisions.pending)
        for grant in planned.grants:
            self.do(command_for_grant(grant, "fake"))
        for unplaced in planned.unplaced:
            self.view.explain[unplaced.job] = unplaced

    def _forget_dropped(self) -> None:
        for agent in self.agents.values():
            for job, checkpoint in agent.dropped:
                if self._dropping(job, checkpoint):
                    self.do(ForgetCheckpoint(job, checkpoint))
            agent.dropped.clear()

    def _dropping(self, job: JobId, id_: CheckpointId) -> bool:
        checkpoint = self.state.checkpoints.get(job, {}).get(id_)
        return checkpoint is not None and checkpoint.state is CheckpointState.DROPPING

    def run(self, duration_ns: int) -> None:
        end_ns = self.now_ns + duration_ns
        while self.now_ns < end_ns:
            self.step()


def _numbered(transition: Transition, state: State, now: Now) -> tuple[tuple[Change, ...], tuple[Event, ...]]:
    """The changes of one commit: what was decided, its events numbered and stamped, and the cluster's count of them."""
    given = (c.record for c in transition.changes if isinstance(c.record, Cluster))
    cluster = next(given, state.cluster)
    if not transition.events or cluster is None:
        return transition.changes, ()
    last = cluster.event_sequence
    events = tuple(
        replace(event, sequence=number, create_time_unix_ns=now.unix_ns)
        for number, event in enumerate(transition.events, start=last + 1)
    )
    counted = Change.put(replace(cluster, event_sequence=last + len(events)))
    kept = tuple(c for c in transition.changes if c.key != counted.key)
    return (*kept, counted, *(Change.put(event) for event in events)), events
