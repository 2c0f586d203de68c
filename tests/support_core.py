"""A controller without I/O for tests: one State, decided on and applied at once, and agents played by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from controld.core.agent import Beat, Go, Hello, Order, Prepare, Release, SlotState, SlotStatus, Stop
from controld.core.commands import AdmitNode, Command, Now, ReportInventory, SubmitJob
from controld.core.ids import Incarnation, JobId, NodeUid, SlotId
from controld.core.invariants import check
from controld.core.model import Cluster, Device, Event, Inventory, Job, TaskExit
from controld.core.outcome import Outcome, Reply, Transition
from controld.core.spec import (
    SECOND_NS,
    CheckpointSpec,
    Durability,
    GangSpec,
    JobSpec,
    Resources,
    RestartSpec,
    TaskSpec,
    Writes,
)
from controld.core.state import Change, State
from controld.core.transitions import decide
from controld.health.view import View
from controld.matching.engine import plan
from controld.reconcile.grants import command_for_grant
from controld.reconcile.limits import Limits
from controld.reconcile.snapshot import snapshot
from controld.reconcile.tick import tick
from virialpb.ids import Epoch
from virialpb.reasons import ExitReason, PrepareFailure

GIB = 1 << 30


def incarnation(name: str, nonce: str = "g1", boot: str = "boot") -> Incarnation:
    return Incarnation(NodeUid(f"uid-{name}"), boot, nonce)


def spec(
    ranks: int = 3,
    spares: int = 0,
    *,
    writes: Writes = Writes.TOKEN,
    cpu_millis: int = 500,
    fence_after_s: int = 60,
    durability: Durability = Durability.SHARED_DIRECTORY,
    restart: RestartSpec | None = None,
) -> JobSpec:
    return JobSpec(
        name="train",
        gang=GangSpec(ranks, spares),
        resources=Resources(cpu_millis, GIB),
        task=TaskSpec(command=("true",)),
        fence_after_ns=fence_after_s * SECOND_NS,
        writes=writes,
        checkpoint=CheckpointSpec(durability, "/ckpt" if durability is Durability.SHARED_DIRECTORY else ""),
        restart=restart or RestartSpec(),
    )


@dataclass
class Agent:
    """A node as the controller hears it: does at once what it is ordered, and nothing by itself."""

    name: str
    incarnation: Incarnation
    slots: dict[SlotId, SlotStatus] = field(default_factory=dict[SlotId, SlotStatus])
    orders: list[Order] = field(default_factory=list[Order])
    seq: int = 0
    cut: bool = False
    # It is heard and hears nothing.
    deaf: bool = False
    fail_prepare: PrepareFailure | None = None

    def obey(self, order: Order) -> None:
        self.orders.append(order)
        match order:
            case Prepare():
                state = SlotState.PREPARE_FAILED if self.fail_prepare else SlotState.READY
                status = SlotStatus(order.slot, order.token, state, port=4000, failure=self.fail_prepare)
                self.slots.setdefault(order.slot, status)
            case Go():
                self._become(order.slot, SlotState.RUNNING)
            case Stop():
                self.exit(order.slot, TaskExit(ExitReason.STOPPED))
            case Release():
                self.slots.pop(order.slot, None)
            case _:
                pass

    def _become(self, slot: SlotId, state: SlotState) -> None:
        if slot in self.slots:
            self.slots[slot] = replace(self.slots[slot], state=state)

    def exit(self, slot: SlotId, exit_: TaskExit) -> None:
        if slot in self.slots:
            self.slots[slot] = replace(self.slots[slot], state=SlotState.EXITED, exit=exit_)

    def progress(self, step: int) -> None:
        for slot, status in self.slots.items():
            if status.state is SlotState.RUNNING:
                self.slots[slot] = replace(status, progress_step=step)

    def beat(self) -> Beat:
        self.seq += 1
        return Beat(self.seq, tuple(self.slots.values()))


class World:
    """Time moves by `run`; each second every agent that is not cut off beats, and the leader ticks."""

    def __init__(self, nodes: int, *, cpu_millis: int = 1000, devices: int = 0, limits: Limits | None = None) -> None:
        self.state = State(history=1)
        self.view = View()
        self.limits = limits or Limits()
        self.now_ns = 1000 * SECOND_NS
        self.unix_offset_ns = 1_700_000_000 * SECOND_NS
        self.agents: dict[str, Agent] = {}
        self.events: list[Event] = []
        self.refused: list[tuple[Command, Outcome]] = []
        self.rng = random.Random(1)
        self.view.started_ns = self.now_ns
        self.state.apply((Change.put(Cluster("c1")),), 1)
        for i in range(nodes):
            self.join(f"n{i}", cpu_millis=cpu_millis, devices=devices)

    @property
    def now(self) -> Now:
        return Now(self.now_ns, self.now_ns + self.unix_offset_ns)

    def do(self, command: Command) -> Outcome:
        outcome = decide(self.state, command, self.now)
        if isinstance(outcome, Transition):
            if outcome.changes:
                self.state.apply(outcome.changes, self.state.revision + 1)
            self.events += outcome.events
            broken = check(self.state)
            assert not broken, (command, broken)
        else:
            self.refused.append((command, outcome))
        return outcome

    def reply(self, command: Command) -> Reply:
        outcome = self.do(command)
        assert isinstance(outcome, Transition), outcome
        return outcome.reply

    def join(self, name: str, *, nonce: str = "g1", cpu_millis: int = 1000, devices: int = 0) -> Agent:
        agent = Agent(name, incarnation(name, nonce))
        self.agents[name] = agent
        self.reply(AdmitNode(agent.incarnation, name, f"addr-{name}", "pidns", cpu_millis, 4 * GIB))
        self.hello(agent)
        inventory = Inventory(tuple(Device(f"gpu{i}", "accelerator") for i in range(devices)))
        self.reply(ReportInventory(agent.incarnation, inventory))
        self.view.mark_reported(agent.incarnation.node_uid)
        return agent

    def hello(self, agent: Agent) -> None:
        hello = Hello(agent.incarnation, agent.name, f"addr-{agent.name}", "pidns", 1000, 4 * GIB, agent.beat())
        self.view.hello(hello, self.now_ns)

    def submit(self, job_spec: JobSpec, request_id: str = "r1") -> JobId:
        return JobId(self.reply(SubmitJob(request_id, job_spec)).subject)

    def job(self, job_id: JobId) -> Job:
        return self.state.jobs[job_id]

    def tick(self) -> None:
        decisions = tick(self.state, self.view, self.now, Epoch(1, 1), self.limits)
        assert not decisions.newer_seen
        for command in decisions.commands:
            self.do(command)
        for order in decisions.orders:
            agent = next(a for a in self.agents.values() if a.incarnation.node_uid == order.node)
            if not agent.cut and not agent.deaf:
                agent.obey(order.order)
        planned = plan(snapshot(self.state, self.view, self.now), decisions.pending)
        for grant in planned.grants:
            self.do(command_for_grant(grant, "c"))
        for unplaced in planned.unplaced:
            self.view.explain[unplaced.job] = unplaced

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            self.now_ns += SECOND_NS // 4
            for agent in self.agents.values():
                if not agent.cut and self.now_ns % SECOND_NS == 0:
                    self.view.beat(agent.incarnation.node_uid, agent.beat(), self.now_ns)
            self.tick()

    def kinds(self) -> list[str]:
        return [e.kind for e in self.events]
