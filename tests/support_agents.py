"""Agents in virtual time that find whoever leads, renew there, and count their own deadline, as noded does."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from controld.core.agent import Beat, BeatAck, Go, Order, Prepare, Release, SlotState, SlotStatus, Stop, Welcome
from controld.core.ids import NO_EPOCH, Epoch, JobId, NodeUid, SlotId
from controld.core.model import Inventory, JobState, Liveness, TaskExit
from controld.core.spec import SECOND_NS
from controld.replica.errors import OverloadedError, SessionClosedError, SessionRefusedError
from controld.replica.session import NodeSession
from controld.store.port import StoreError
from tests.support_core import incarnation
from tests.support_election import Cluster, Member
from tests.support_replica import hello, quick
from virialpb.reasons import ExitReason

DRIFT: Final = 0.99
KILL_BUDGET_S: Final = 1.0
FENCE_S: Final = 20.0
SUSPECT_S: Final = 6.0
"""The latest that a silence becomes suspicion."""


@dataclass
class Agent:
    """One node. `silent`: nothing of what it says arrives, nor of what it is told, and no stream breaks; `avoids`: it
    cannot reach that one. What comes from a former leader is refused by its epoch."""

    cluster: Cluster
    name: str
    fence_after_s: float = 60.0
    nonce: str = "g1"
    slots: dict[SlotId, SlotStatus] = field(default_factory=dict[SlotId, SlotStatus])
    orders: list[Order] = field(default_factory=list[Order])
    silent: bool = False
    avoids: Member | None = None
    reconnect_s: float = 0.3
    seq: int = 0
    epoch_seen: Epoch = NO_EPOCH
    sent_s: dict[int, float] = field(default_factory=dict[int, float])
    renewed_s: float | None = None
    _task: asyncio.Task[None] | None = None

    @property
    def uid(self) -> NodeUid:
        return NodeUid(f"uid-{self.name}")

    @property
    def deadline_s(self) -> float:
        """Until when its tasks run, by its own clock."""
        assert self.renewed_s is not None
        return self.renewed_s + self.fence_after_s * DRIFT - KILL_BUDGET_S

    def start(self) -> Agent:
        self._task = asyncio.ensure_future(self._run())
        return self

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        while True:
            leading = [m for m in self.cluster.members if m.leads and m is not self.avoids]
            member = max(leading, key=lambda m: m.replica.epoch if m.replica else NO_EPOCH, default=None)
            if member is not None and not self.silent:
                with suppress(SessionRefusedError, SessionClosedError, StoreError, OverloadedError):
                    await self._serve(member)
            await asyncio.sleep(self.reconnect_s)

    async def _serve(self, member: Member) -> None:
        assert member.replica is not None
        epoch = member.replica.epoch
        greeting = replace(
            hello(incarnation(self.name, self.nonce), self.name, slots=tuple(self.slots.values()), seq=self._next()),
            leader_epoch_seen=self.epoch_seen,
        )
        session = await member.replica.open_session(greeting)
        reading = asyncio.ensure_future(self._read(session, epoch))
        try:
            await session.report_inventory(Inventory())
            while not reading.done():
                await asyncio.sleep(1)
                if member is self.avoids:
                    return
                if not self.silent:
                    session.receive(Beat(self._next(), tuple(self.slots.values())))
        finally:
            reading.cancel()
            await asyncio.wait((reading,))
            session.close()

    def _next(self) -> int:
        self.seq += 1
        self.sent_s[self.seq] = asyncio.get_running_loop().time()
        return self.seq

    async def _read(self, session: NodeSession, epoch: Epoch) -> None:
        try:
            while True:
                order = await session.next_order()
                if not self.silent and epoch >= self.epoch_seen:
                    self.epoch_seen = epoch
                    self._obey(order)
        except SessionClosedError:
            return

    def _obey(self, order: Order) -> None:
        match order:
            case BeatAck():
                sent_s = self.sent_s[order.seq]
                self.renewed_s = sent_s if self.renewed_s is None else max(self.renewed_s, sent_s)
            case Prepare():
                self.orders.append(order)
                self.slots.setdefault(order.slot, SlotStatus(order.slot, order.token, SlotState.READY, port=4000))
            case Go():
                self.orders.append(order)
                self._become(order.slot, SlotState.RUNNING)
            case Stop():
                self.orders.append(order)
                if order.slot in self.slots:
                    exited = replace(self.slots[order.slot], state=SlotState.EXITED, exit=TaskExit(ExitReason.STOPPED))
                    self.slots[order.slot] = exited
            case Release():
                self.orders.append(order)
                self.slots.pop(order.slot, None)
            case Welcome():
                pass
            case _:
                self.orders.append(order)

    def _become(self, slot: SlotId, state: SlotState) -> None:
        if slot in self.slots:
            self.slots[slot] = replace(self.slots[slot], state=state)


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def cluster_with(*names: str, fence_s: float = FENCE_S) -> tuple[Cluster, list[Agent]]:
    """Three controllers, and agents that have each been acknowledged."""
    base = quick()
    limits = replace(base.limits, session_fence_after_ns=int(fence_s * SECOND_NS))
    cluster = Cluster(settings=replace(base, limits=limits))
    try:
        await cluster.start()
        agents = [Agent(cluster, name, fence_s).start() for name in names]
        await cluster.until(lambda: all(a.renewed_s is not None for a in agents) or None)
        await cluster.settled()
    except TimeoutError as error:
        raise RuntimeError("no defect: the cluster did not come up") from error
    return cluster, agents


async def end(cluster: Cluster, agents: list[Agent]) -> None:
    for agent in agents:
        await agent.stop()
    await cluster.stop()


def events(member: Member) -> list[str]:
    assert member.replica is not None
    return [event.kind for event in member.replica.state.events.values()]


def liveness(member: Member, agent: Agent) -> Liveness:
    assert member.replica is not None
    return member.replica.state.nodes[agent.uid].liveness


def job_state(member: Member) -> JobState:
    assert member.replica is not None
    return member.replica.state.jobs[JobId("train-1")].state


def job_generation(member: Member) -> int:
    assert member.replica is not None
    return member.replica.state.jobs[JobId("train-1")].generation
