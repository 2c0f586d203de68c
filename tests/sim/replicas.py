"""A controller of several: the real replica, election and etcd store, beside a simulated member of etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar, cast

from controld.core.commands import Command
from controld.core.outcome import Reply
from controld.core.validate import SpecLimits
from controld.matching.engine import plan
from controld.replica.care import Care
from controld.replica.elector import Place
from controld.replica.leader import COMMITS_SUFFICE_NS, Leader
from controld.replica.observe import LogName, LogValue
from controld.replica.peers import Ping
from controld.replica.planner import InlinePlanner
from controld.replica.replica import Replica
from controld.replica.settings import LeaderSettings
from controld.replica.survey import Role, Survey, Told
from controld.service.backend import Backend
from controld.service.log_reads import LogRoutes
from controld.service.node import NodeServicer
from controld.store.etcd import EtcdStore
from controld.store.port import Leadership, StoredChange, StoreError
from tests.sim.calls import RPC_S, Calls
from tests.sim.clock import HostClock
from tests.sim.etcd.wire import SimWire, Socket
from tests.sim.loop import Process
from tests.sim.peers import SimPeers
from tests.sim.streams import ServerEnd

if TYPE_CHECKING:
    from tests.sim.several import SeveralWorld

T = TypeVar("T")
BROKEN = (LogName.TICK_BROKEN, LogName.COMMAND_BROKEN, LogName.TASK_BROKEN)


class SimStore(EtcdStore):
    """The real store; what it promises its caller is shown to the checkers."""

    def __init__(self, owner: SimReplica, process: Process, rng: Random) -> None:
        self._owner = owner
        origin = process.name
        super().__init__(lambda: SimWire(owner.socket, process, origin), rng=rng)

    async def take_over(self, identity: str, address: str, token: int) -> Leadership:
        began_s = self._owner.world.loop.time()
        leadership = await super().take_over(identity, address, token)
        self._owner.prove(began_s)
        self._owner.world.judge.took_over(leadership, token)
        return leadership

    async def barrier(self, leadership: Leadership) -> None:
        began_s = self._owner.world.loop.time()
        try:
            await super().barrier(leadership)
        except StoreError:
            self._owner.stale_s = self._owner.world.loop.time()
            raise
        self._owner.prove(began_s)
        self._owner.world.judge.proved(leadership, began_s)

    async def commit(self, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
        began_s = self._owner.world.loop.time()
        self._owner.commit_begins()
        revision = await super().commit(leadership, seq, changes)
        self._owner.committed_s = began_s
        self._owner.world.judge.told_committed(leadership, seq, revision, tuple(changes))
        return revision


@dataclass(frozen=True, slots=True)
class Parts:
    """Of one life of a controller, as `controld.app` puts them together."""

    store: SimStore
    replica: Replica
    survey: Survey
    care: Care


class SimReplica:
    """One host of a controller. Whenever a process on it dies it is started again."""

    def __init__(self, world: SeveralWorld, address: str, settings: LeaderSettings) -> None:
        self.world = world
        self.name = address
        self.network = world.network
        self.rng = world.rng(f"controller/{address}")
        self.clock = HostClock(world.loop, self.rng)
        self.member = world.raft.member(address)
        self.socket = Socket(world.raft, self.member, world.rng(f"socket/{address}"))
        self.process: Process | None = None
        self.parts: Parts | None = None
        self.leader: Leader | None = None
        self.restart_s = (0.3, 1.5)
        # When it could prove last that it led, when it could not, and when it died.
        self.proved_s = 0.0
        self.committed_s = 0.0
        self.stale_s = 0.0
        self.died_s = 0.0
        # So many callbacks after its next commit begins it dies.
        self.crash_steps = 0
        self._settings = settings
        self._lives = 0
        self._calls = Calls(world.loop, self.rng)

    @property
    def replica(self) -> Replica | None:
        return None if self.parts is None else self.parts.replica

    @property
    def leading(self) -> bool:
        """As far as it knows itself."""
        running = self.process is not None and self.process.alive
        return running and self.replica is not None and self.replica.leads and self.leader is not None

    def start(self) -> None:
        if self.process is not None and self.process.alive:
            return
        self._lives += 1
        process = self.process = Process(self.world.loop, f"{self.name}.{self._lives}", self)
        self.parts = self.leader = None
        self.world.processes.append(process)
        process.on_death.append(lambda: self._died(process))
        process.spawn(self._main(process), "main")

    def kill(self, restart_s: tuple[float, float] = (0.3, 1.5)) -> None:
        self.restart_s = restart_s
        if self.process is not None:
            self.process.kill()

    def _died(self, process: Process) -> None:
        self.world.trace.note("controller.died", process.name)
        self.died_s = self.world.loop.time()
        low, high = self.restart_s
        self.restart_s = (0.3, 1.5)
        self.world.loop.after(self.rng.uniform(low, high), self.start)
        self._calls.lose(process)

    def crash_member(self, restart_s: tuple[float, float] = (0.3, 3.0)) -> None:
        if self.member.alive:
            self.world.trace.note("member.died", self.name)
            self.world.raft.crash(self.member)
            self.world.loop.after(self.rng.uniform(*restart_s), self.world.raft.start, self.member)

    async def _main(self, process: Process) -> None:
        world = self.world
        store = SimStore(self, process, world.rng(f"nonce/{process.name}"))
        try:
            await store.open()
        except StoreError:
            process.kill()
            return
        parts = self._parts(store, process)
        replica = parts.replica
        backend = Backend(
            leader=replica,
            clock=self.clock,
            limits=SpecLimits(fence_after_min_ns=1),
            fence_after_default_ns=1,
            store_kind="etcd",
            identity=self.name,
            version="sim",
            replica=replica,
        )
        servicer = NodeServicer(backend, cast("Any", LogRoutes()))
        self.network.listen(self.name, process, ServerEnd(process, servicer).accept)
        self.parts = parts
        await replica.start()
        process.spawn(parts.care.run(), "care")
        await replica.broken.wait()
        process.kill()

    def _parts(self, store: SimStore, process: Process) -> Parts:
        world = self.world
        others = {other.name: other for other in world.replicas if other is not self}
        peers = SimPeers(self, process, others, world.fabric)
        place = Place(self.name, self.name, tuple(others))
        replica = Replica(
            place=place,
            store=store,
            peers=peers,
            clock=self.clock,
            rng=world.rng(f"leader/{process.name}"),
            planner=InlinePlanner(plan),
            settings=self._settings,
            timings=world.timings,
            log=self._log,
            on_lead=self._leads,
        )

        def me() -> Told:
            role = Role.FOLLOWS if replica.loaded else Role.LOADING
            return Told(self.name, Role.LEADS if replica.leads else role, "sim")

        survey = Survey(place=place, me=me, colleagues=peers, members=store.members)
        care = Care(
            address=self.name,
            office=replica,
            members=store.members,
            colleagues=peers,
            survey=survey,
            short=store.short,
            log=self._log,
        )
        return Parts(store, replica, survey, care)

    def _leads(self, leader: Leader) -> None:
        self.leader = leader
        self.world.trace.note("leader", self.name, leader.epoch)
        self.world.judge.leads(self, leader)

    def _log(self, name: LogName, /, **fields: LogValue) -> None:
        if name in BROKEN:
            self.world.checkers.accuse("unexpected", f"{self.name}: {name} {fields}")
        elif name is LogName.TAKEOVER_BEGAN:
            self.world.judge.takes_over(self, int(fields["token"]), str(fields["why"]))
        self.world.trace.log(self.name, name, **fields)

    @property
    def shown_s(self) -> float:
        """When it could last, as its peers go by it: a commit that began then will do for a while."""
        return max(self.proved_s, min(self.committed_s, self.proved_s + COMMITS_SUFFICE_NS / 1e9))

    def commit_begins(self) -> None:
        steps, self.crash_steps = self.crash_steps, 0
        if steps and self.process is not None:
            self.process.steps_left = steps

    def prove(self, began_s: float) -> None:
        """A proof that began then has been completed."""
        now_s = self.world.loop.time()
        if now_s - self.proved_s > self.world.timings.proof_max_ns / 1e9 * 0.9:
            self.stale_s = now_s
        self.proved_s = max(self.proved_s, began_s)

    def pinged(self, ping: Ping) -> None:
        self.world.judge.pinged(self, ping)

    # -- calls of users

    async def submit(self, command: Command) -> Reply:
        """As an RPC. Raises what the replica raises, or Unreachable."""

        async def call(replica: Replica) -> Reply:
            return await replica.submit(command)

        return await self.call(call)

    async def hand_over(self) -> str:
        async def call(replica: Replica) -> str:
            return await replica.hand_over()

        return await self.call(call)

    async def call(self, work: Callable[[Replica], Coroutine[Any, Any, T]]) -> T:
        """As an RPC. Raises what `work` raises, or Unreachable."""
        await asyncio.sleep(self.rng.uniform(*RPC_S))
        replica = self.replica
        return await self._calls.make(self.process, None if replica is None else lambda: work(replica))
