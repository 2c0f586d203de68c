"""A controller process: the real leader and the real NodeService, on a store that outlives it and may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import TYPE_CHECKING, Any, cast

from controld.core.commands import Command
from controld.core.outcome import Reply
from controld.core.validate import SpecLimits
from controld.matching.engine import plan
from controld.replica.leader import Leader
from controld.replica.observe import LogName, LogValue
from controld.replica.planner import InlinePlanner
from controld.replica.settings import LeaderSettings
from controld.service.backend import Backend
from controld.service.log_reads import LogRoutes
from controld.service.node import NodeServicer
from controld.store.faults import Fault, FaultKind, Operation
from controld.store.memory import MemoryDisk, MemoryStore
from controld.store.port import Leadership, StoredChange, StoreError
from tests.sim.calls import RPC_S, Calls
from tests.sim.clock import HostClock
from tests.sim.loop import Process
from tests.sim.streams import ServerEnd
from virialpb.ids import NO_EPOCH, Epoch

if TYPE_CHECKING:
    from tests.sim.network import Network
    from tests.sim.world import World

STORE_S = (0.0002, 0.002)


class ObservedDisk(MemoryDisk):
    """Shows every commit that took effect to `on_commit`, at the moment it did."""

    on_commit: Callable[[int, tuple[StoredChange, ...]], None]
    on_written: Callable[[Epoch, Epoch], None]
    leading: Epoch = NO_EPOCH

    def campaign(self, identity: str) -> Leadership:
        leadership = super().campaign(identity)
        self.leading = leadership.epoch
        return leadership

    def commit(self, leadership: Leadership, seq: int, changes: Any) -> int:
        before = self.revision
        revision = super().commit(leadership, seq, changes)
        if revision != before:
            self.on_written(leadership.epoch, self.leading)
            self.on_commit(revision, tuple(changes))
        return revision


class StoreFaults:
    """Every operation takes a little time. `trouble`: chances of each kind. `hang_s`: none arrives, after so long."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.trouble: dict[FaultKind, float] = {}
        self.slow_s = 0.0
        self.hang_s = 0.0
        self.crash: Callable[[float], None] | None = None
        self.injected = 0

    def next(self, operation: Operation) -> Fault:
        rng = self._rng
        before_s, after_s = rng.uniform(*STORE_S), rng.uniform(*STORE_S)
        if self.hang_s:
            return Fault(FaultKind.LOST_BEFORE, self.hang_s)
        if self.slow_s:
            before_s += rng.random() * self.slow_s
            after_s += rng.random() * self.slow_s
        if self.crash is not None and operation is Operation.COMMIT:
            crash, self.crash = self.crash, None
            if rng.random() < 0.3:
                crash(rng.uniform(0, 0.05))
                return Fault(FaultKind.LATE, before_s, late_s=rng.uniform(0.01, 5.0))
            crash(rng.uniform(0, before_s + after_s + 0.002))
        for kind, chance in self.trouble.items():
            if rng.random() < chance and not (kind is FaultKind.DEPOSED and operation is Operation.CAMPAIGN):
                self.injected += 1
                return Fault(kind, before_s, after_s, late_s=rng.uniform(0.01, 3.0))
        return Fault(FaultKind.NONE, before_s, after_s)


class SimController:
    """One address. Whenever it dies it is started again, unless `wanted` is off."""

    def __init__(self, world: World, address: str, disk: MemoryDisk, settings: LeaderSettings) -> None:
        self.world = world
        self.name = address
        self.network: Network = world.network
        self.rng = world.rng(f"controller/{address}")
        self.clock = HostClock(world.loop, self.rng)
        self.faults = StoreFaults(world.rng(f"store/{address}"))
        self.process: Process | None = None
        self.leader: Leader | None = None
        self.wanted = False
        self.restart_s = (0.3, 1.5)
        self._disk = disk
        self._settings = settings
        self._lives = 0
        self._calls = Calls(world.loop, self.rng)

    @property
    def leading(self) -> bool:
        """Serving, as far as anyone can tell from outside."""
        running = self.process is not None and self.process.alive
        return running and self.leader is not None and not self.leader.lost.is_set()

    def start(self) -> None:
        if not self.wanted or (self.process is not None and self.process.alive):
            return
        self._lives += 1
        process = self.process = Process(self.world.loop, f"{self.name}.{self._lives}", self)
        self.leader = None
        self.world.processes.append(process)
        process.on_death.append(lambda: self._died(process))
        process.spawn(self._main(process), "main")

    def kill(self, restart_s: tuple[float, float] = (0.3, 1.5)) -> None:
        self.restart_s = restart_s
        if self.process is not None:
            self.process.kill()

    def _died(self, process: Process) -> None:
        self.world.trace.note("controller.died", process.name)
        low, high = self.restart_s
        self.restart_s = (0.3, 1.5)
        self.world.loop.after(self.rng.uniform(low, high), self.start)
        self._calls.lose(process)

    async def _main(self, process: Process) -> None:
        store = MemoryStore(self._disk, self.faults)
        await store.open()
        leader = Leader(
            store=store,
            clock=self.clock,
            rng=self.world.rng(f"leader/{process.name}"),
            planner=InlinePlanner(plan),
            settings=self._settings,
            identity=process.name,
            log=self._log,
        )
        try:
            await leader.start()
        except StoreError:
            process.kill()
            return
        self.leader = leader
        self.world.trace.note("leader", process.name, leader.epoch)
        backend = Backend(
            leader=leader,
            clock=self.clock,
            limits=SpecLimits(fence_after_min_ns=1),
            fence_after_default_ns=1,
            store_kind="memory",
            identity=process.name,
            version="sim",
        )
        servicer = NodeServicer(backend, cast("Any", LogRoutes()))
        self.network.listen(self.name, process, ServerEnd(process, servicer).accept)
        await leader.lost.wait()
        self.world.trace.note("leader.lost", process.name)
        await leader.stop()
        process.kill()

    def _log(self, name: LogName, /, **fields: LogValue) -> None:
        if name in (LogName.TICK_BROKEN, LogName.COMMAND_BROKEN, LogName.TASK_BROKEN):
            self.world.checkers.accuse("unexpected", f"{self.name}: {name} {fields}")
        self.world.trace.log(self.name, name, **fields)

    # -- calls of users

    async def submit(self, command: Command) -> Reply:
        """As an RPC. Raises what the leader raises, or Unreachable."""

        async def call(leader: Leader) -> Reply:
            return await leader.submit(command)

        return await self._call(call)

    async def _call(self, work: Callable[[Leader], Coroutine[Any, Any, Reply]]) -> Reply:
        await asyncio.sleep(self.rng.uniform(*RPC_S))
        leader = self.leader
        return await self._calls.make(self.process, None if leader is None else lambda: work(leader))
