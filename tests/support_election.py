"""Several replicas on one store and a network that can be cut, on a virtual loop. See tests/support_replica.py."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from controld.core.commands import Command
from controld.core.outcome import Reply
from controld.matching.engine import plan
from controld.replica.election import Timings, Verdict
from controld.replica.elector import Place
from controld.replica.observe import LogName
from controld.replica.peers import HandedOver, HandOver, PeerLostError, Ping
from controld.replica.planner import InlinePlanner
from controld.replica.replica import Replica
from controld.replica.settings import LeaderSettings
from controld.store.memory import MemoryDisk, MemoryStore
from controld.store.port import (
    Commit,
    LeaderSeen,
    Leadership,
    Loaded,
    MemberLostError,
    OutcomeUnknownError,
    StoredChange,
)
from tests.support_replica import LogBook, LoopClock

T = TypeVar("T")
WIRE_SECONDS = 0.001
STORE_SECONDS = 0.002
STORE_TIMEOUT_SECONDS = 0.25


class CutStore(MemoryStore):
    """A handle whose member can be cut off: nothing arrives, and its stream of commits stands still or breaks.

    `lose_answers`: requests arrive and take effect, and nobody hears of it. `hung`: they arrive only once that is over.
    `gone`: it does not run, and refuses at once. `no_reads`: it answers writes alone. `lag_s`: of the commits' stream.
    """

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk)
        self.cut = False
        self.lose_answers = False
        self.hung = False
        self.gone = False
        self.no_reads = False
        self.lag_s = STORE_SECONDS

    async def _arrive(self) -> None:
        await asyncio.sleep(STORE_SECONDS)
        if self.gone:
            raise MemberLostError("connection refused")
        while self.hung:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
        if self.cut:
            await asyncio.sleep(STORE_TIMEOUT_SECONDS)
            raise OutcomeUnknownError("no answer")

    async def _answer(self) -> None:
        if self.cut or self.lose_answers:
            await asyncio.sleep(STORE_TIMEOUT_SECONDS)
            raise OutcomeUnknownError("no answer")

    async def load(self) -> Loaded:
        await self._arrive()
        return await super().load()

    async def take_over(self, identity: str, address: str, token: int) -> Leadership:
        await self._arrive()
        leadership = await super().take_over(identity, address, token)
        await self._answer()
        return leadership

    async def resign(self, leadership: Leadership) -> None:
        await self._arrive()
        await super().resign(leadership)
        await self._answer()

    async def commit(self, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
        await self._arrive()
        revision = await super().commit(leadership, seq, changes)
        await self._answer()
        return revision

    async def barrier(self, leadership: Leadership) -> None:
        await self._arrive()
        if self.no_reads:
            await asyncio.sleep(STORE_TIMEOUT_SECONDS)
            raise OutcomeUnknownError("no answer")
        await super().barrier(leadership)
        await self._answer()

    async def follow(self, after_revision: int) -> AsyncGenerator[Commit | LeaderSeen]:
        if self.gone:
            raise MemberLostError("connection refused")
        if self.cut:
            await asyncio.sleep(STORE_TIMEOUT_SECONDS)
            raise OutcomeUnknownError("no answer")
        async with aclosing(super().follow(after_revision)) as items:
            async for item in items:
                await asyncio.sleep(self.lag_s)
                if self.cut:
                    raise OutcomeUnknownError("no leader")
                yield item


@dataclass
class Network:
    """Who can be reached: cut is (from, to), one way. What is on a cut way is lost, and nothing closes."""

    members: dict[str, Member] = field(default_factory=dict[str, "Member"])
    cut: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def part(self, a: str, b: str) -> None:
        self.cut |= {(a, b), (b, a)}

    def isolate(self, a: str) -> None:
        for b in self.members:
            if b != a:
                self.part(a, b)

    def heal(self) -> None:
        self.cut.clear()

    async def carry(self, a: str, b: str) -> None:
        """A message on its way. Lost ones never come."""
        await asyncio.sleep(WIRE_SECONDS)
        if (a, b) in self.cut:
            await asyncio.sleep(3600)

    def replica(self, address: str) -> Replica:
        member = self.members[address]
        if member.replica is None:
            raise PeerLostError(f"{address}: connection refused")
        return member.replica


class Wires:
    """One replica's way to the others."""

    def __init__(self, network: Network, own: str) -> None:
        self._network = network
        self._own = own

    async def pings(self, address: str) -> AsyncGenerator[Ping]:
        network = self._network
        await network.carry(self._own, address)
        try:
            async with aclosing(network.replica(address).pings(self._own)) as pings:
                async for ping in pings:
                    if (address, self._own) in network.cut:
                        continue
                    yield ping
                    if network.members[address].replica is None:
                        await asyncio.sleep(3600)  # killed: the machine is gone, nothing closes
        except Exception as error:
            raise PeerLostError(str(error)) from error

    async def ask(self, address: str, token: int) -> Verdict:
        await self._network.carry(self._own, address)
        verdict = self._network.replica(address).judge(token)
        await self._network.carry(address, self._own)
        return verdict

    async def hand_over(self, address: str, request: HandOver) -> HandedOver:
        await self._network.carry(self._own, address)
        answer = await self._network.replica(address).take(request)
        await self._network.carry(address, self._own)
        return answer

    async def close(self) -> None:
        return


class Member:
    """One controller: it can be started, killed as by SIGKILL, and started again."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.address = f"{name}:1"
        self.replica: Replica | None = None
        self.store = CutStore(cluster.disk)
        self.log = LogBook()
        self.clock = LoopClock()
        # Of a store that is not the others', by mistake.
        self.own_disk: MemoryDisk | None = None

    async def start(self) -> None:
        self.store = CutStore(self.own_disk or self.cluster.disk)
        await self.store.open()
        self.replica = Replica(
            place=Place(self.name, self.address, tuple(a for a in self.cluster.addresses if a != self.address)),
            store=self.store,
            peers=Wires(self.cluster.network, self.address),
            clock=self.clock,
            rng=random.Random(7),
            planner=InlinePlanner(plan),
            settings=self.cluster.settings,
            timings=self.cluster.timings,
            log=self.log,
        )
        await self.replica.start()

    async def kill(self) -> None:
        """Nothing of it goes on: its requests to the store are not heard from, and its streams just stand still."""
        replica, self.replica = self.replica, None
        self.store.cut = True
        if replica is not None:
            await replica._work.end()

    async def stop(self) -> None:
        if self.replica is not None:
            await self.replica.stop()
            self.replica = None

    @property
    def leads(self) -> bool:
        return self.replica is not None and self.replica.leads


class Cluster:
    """Addresses are "c0:1", "c1:1", ..."""

    def __init__(
        self, size: int = 3, *, settings: LeaderSettings | None = None, timings: Timings | None = None
    ) -> None:
        self.disk = MemoryDisk()
        self.network = Network()
        self.settings = settings or LeaderSettings()
        self.timings = timings or Timings()
        self.addresses = tuple(f"c{i}:1" for i in range(size))
        self.members = [Member(self, f"c{i}") for i in range(size)]
        self.network.members = {member.address: member for member in self.members}

    async def start(self) -> Member:
        """The leader, once there is one."""
        for member in self.members:
            await member.start()
        return await self.leader()

    async def stop(self) -> None:
        for member in self.members:
            await member.stop()

    async def leader(self, *, but: Member | None = None, within_s: float = 30.0) -> Member:
        """Some member that leads, other than `but`."""
        return await self.until(lambda: next((m for m in self.members if m.leads and m is not but), None), within_s)

    @staticmethod
    async def until(condition: Callable[[], T | None], within_s: float = 30.0) -> T:
        async with asyncio.timeout(within_s):
            while not (found := condition()):  # noqa: ASYNC110 - virtual time: this is how a test looks on
                await asyncio.sleep(0.001)
            return found

    def followers(self) -> list[Member]:
        return [m for m in self.members if m.replica is not None and not m.leads]

    async def settled(self) -> None:
        """Until every running follower has a copy and hears the leader."""

        def hears() -> bool | None:
            leader = next((m for m in self.members if m.leads), None)
            listening = [] if leader is None or leader.replica is None else leader.replica._listeners
            return len(listening) == len(self.followers()) or None

        await self.until(hears)
        await asyncio.sleep(0.2)

    def takeovers(self) -> int:
        return sum(len(member.log.of(LogName.LEADER_STARTED)) for member in self.members)


async def submit(member: Member, command: Command) -> Reply:
    assert member.replica is not None
    return await member.replica.submit(command)
