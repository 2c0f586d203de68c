"""What goes wrong, and when: a seeded schedule for each seed. Every fault ends by itself, or at the heal."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING

from controld.core.model import CheckpointState, Tier
from controld.store.faults import FaultKind
from tests.sim.controller import SimController
from tests.sim.network import Way

if TYPE_CHECKING:
    from tests.sim.node import Host
    from tests.sim.world import World

HOUR_NS = 3_600_000_000_000
Menu = tuple[tuple[int, Callable[[], Awaitable[None]]], ...]
"""Weight, and what happens."""


def _name(fault: Callable[[], Awaitable[None]]) -> str:
    return getattr(fault, "__name__", "?")


class Faults:
    def __init__(self, world: World) -> None:
        self._world = world
        self._rng: Random = world.rng("faults")
        self.kinds: Counter[str] = Counter()
        self._healed = False
        # One at a time: a machine that runs on a copy of another's disk.
        self._clone: Host | None = None
        self._menu = (*self._of_controllers(), *self._of_nodes())

    def _of_controllers(self) -> Menu:
        return (
            (10, self.controller_crash),
            (10, self.controller_crash_in_commit),
            (4, self.controller_down),
            (6, self.rival_controller),
            (6, self.rival_store_cut),
            (10, self.controller_stall),
            (10, self.store_trouble),
            (4, self.store_slow),
        )

    def _of_nodes(self) -> Menu:
        return (
            (12, self.power_loss),
            (8, self.noded_killed),
            (4, self.noded_away),
            (8, self.guardian_killed),
            (16, self.partition),
            (8, self.one_way),
            (6, self.one_way_then_silence),
            (8, self.connections_break),
            (4, self.slow_network),
            (6, self.wall_clock_jump),
            (3, self.reimaged),
            (4, self.task_unkillable),
            (8, self.noded_paused),
            (6, self.guardian_paused),
            (6, self.host_suspended),
            (8, self.task_killed),
            (5, self.cloned),
            (4, self.cloned_of_a_silent_node),
            (4, self.disk_full),
            (4, self.shard_corrupted),
        )

    @property
    def count(self) -> int:
        return self.kinds.total()

    def schedule(self) -> None:
        wanted = self._world.shape.menu
        menu = [(weight, fault) for weight, fault in self._menu if not wanted or _name(fault) in wanted]
        weights = [weight for weight, _ in menu]
        for _ in range(self._world.shape.faults):
            fault = self._rng.choices([fault for _, fault in menu], weights)[0]
            at_s = self._rng.uniform(15.0, self._world.shape.trouble_s - 20.0)
            self._world.start(self._later(at_s, fault))

    async def _later(self, at_s: float, fault: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(at_s)
        if not self._healed:
            name = _name(fault)
            self.kinds[name] += 1
            self._world.trace.note("fault", name)
            await fault()

    async def heal(self) -> None:
        self._healed = True
        world = self._world
        world.network.heal_everything()
        world.shared.full = False
        self._heal_controllers()
        self._remove_clone()
        for host in world.hosts.values():
            host.thaw()
            host.disk.shards.full = False
            host.noded_wanted = True
            host.boot()
            host.start_noded()

    def _heal_controllers(self) -> None:
        rivals = self._world.rivals
        for controller in rivals:
            controller.faults.trouble.clear()
            controller.faults.slow_s = 0.0
            controller.faults.hang_s = 0.0
            controller.faults.crash = None
            if controller.process is not None:
                controller.process.thaw()
        if not any(controller.wanted for controller in rivals):
            rivals[0].wanted = True
        for controller in rivals:
            controller.start()

    def _host(self) -> Host:
        return self._rng.choice([h for h in self._world.hosts.values() if h is not self._clone])

    def _note(self, *facts: object) -> None:
        self._world.trace.note("fault.on", *facts)

    # -- controllers

    def _leading(self) -> SimController:
        found = [c for c in self._world.rivals if c.wanted]
        return found[0] if found else self._world.rivals[0]

    async def controller_crash(self) -> None:
        self._leading().kill()

    async def controller_crash_in_commit(self) -> None:
        """At its next commit: before it arrives, when it is applied and not answered, or while it is under way."""
        controller = self._leading()

        def crash(after_s: float) -> None:
            process = controller.process
            if process is not None:
                self._world.loop.after(after_s, process.kill)

        controller.faults.crash = crash

    async def controller_down(self) -> None:
        """Longer than most leases, sometimes."""
        seconds = self._rng.choice((10.0, 30.0, 70.0))
        self._leading().kill(restart_s=(seconds, seconds + 1))

    async def rival_controller(self) -> None:
        """A second one takes over while the first is stopped, and the first wakes up believing it still leads."""
        old = self._leading()
        new = next(c for c in self._world.rivals if c is not old)
        if old.process is not None:
            old.process.freeze()
        old.wanted = False
        await asyncio.sleep(self._rng.uniform(0.0, 10.0))
        new.wanted = True
        new.start()
        await asyncio.sleep(self._rng.uniform(0.5, 15.0))
        if old.process is not None:
            old.process.thaw()

    async def rival_store_cut(self) -> None:
        """The leader loses its store and keeps its agents, and a second one takes over."""
        old = self._leading()
        new = next(c for c in self._world.rivals if c is not old)
        old.faults.hang_s = self._rng.choice((1.0, 90.0))
        old.wanted = False
        await asyncio.sleep(self._rng.uniform(0.0, 3.0))
        new.wanted = True
        new.start()
        await asyncio.sleep(self._rng.choice((5.0, 30.0, 80.0)))
        old.faults.hang_s = 0.0

    async def controller_stall(self) -> None:
        process = self._leading().process
        if process is not None:
            process.freeze()
            await asyncio.sleep(self._rng.choice((0.5, 3.0, 9.0, 20.0)))
            process.thaw()

    async def store_trouble(self) -> None:
        faults = self._leading().faults
        kinds = (FaultKind.LOST_BEFORE, FaultKind.LOST_AFTER, FaultKind.LATE, FaultKind.STORAGE_FULL, FaultKind.DEPOSED)
        kind = self._rng.choice(kinds)
        faults.trouble[kind] = self._rng.choice((0.02, 0.2, 0.6)) if kind is not FaultKind.DEPOSED else 0.005
        await asyncio.sleep(self._rng.uniform(2.0, 25.0))
        faults.trouble.pop(kind, None)

    async def store_slow(self) -> None:
        faults = self._leading().faults
        faults.slow_s = self._rng.choice((0.05, 0.5, 3.0))
        await asyncio.sleep(self._rng.uniform(5.0, 30.0))
        faults.slow_s = 0.0

    # -- nodes

    async def power_loss(self) -> None:
        host = self._host()
        self._note(host.name)
        host.lose_power()
        await asyncio.sleep(self._rng.choice((3.0, 12.0, 40.0, 100.0)))
        host.boot()

    async def reimaged(self) -> None:
        """Its name comes back under another identity; what only its disk had is lost."""
        host = self._host()
        self._note(host.name)
        host.lose_power()
        await asyncio.sleep(self._rng.choice((5.0, 30.0)))
        if not host.powered:
            host.reimage()
            host.boot()

    async def task_unkillable(self) -> None:
        """It waits in the kernel, and SIGKILL with it."""
        if (found := self._running()) is not None:
            host, slot = found
            self._note(host.name, slot)
            host.stick_slot(slot, self._rng.uniform(5.0, 40.0))
            host.kill_slot(slot)

    def _running(self) -> tuple[Host, str] | None:
        running = [run for runs in self._world.truth.running.values() for run in runs]
        run = self._rng.choice(running) if running else None
        host = self._world.hosts.get(run.host) if run is not None else None
        return (host, run.slot) if run is not None and host is not None else None

    async def noded_killed(self) -> None:
        self._host().kill_noded()

    async def noded_away(self) -> None:
        seconds = self._rng.choice((8.0, 25.0, 75.0))
        self._host().kill_noded(restart_s=(seconds, seconds + 1))

    async def guardian_killed(self) -> None:
        self._host().kill_guardian()

    async def noded_paused(self) -> None:
        """SIGSTOP of the agent alone; its guardian goes on and enforces the deadlines."""
        host = self._host()
        host.freeze(noded=True, guardian=False, tasks=False)
        await asyncio.sleep(self._rng.choice((4.0, 12.0, 35.0, 80.0)))
        host.thaw()

    async def guardian_paused(self) -> None:
        host = self._host()
        host.freeze(noded=False, guardian=True, tasks=False)
        await asyncio.sleep(self._rng.choice((2.0, 12.0, 35.0)))
        host.thaw()

    async def host_suspended(self) -> None:
        """Everything on it stops, BOOTTIME goes on, and the network hears nothing of it."""
        host = self._host()
        self._note(host.name)
        host.freeze(noded=True, guardian=True, tasks=True)
        self._world.network.cut(host.name, Way.UP, Way.DOWN)
        await asyncio.sleep(self._rng.choice((5.0, 20.0, 70.0)))
        self._world.network.heal(host.name, Way.UP, Way.DOWN)
        host.thaw()

    async def task_killed(self) -> None:
        if (found := self._running()) is not None:
            host, slot = found
            host.kill_slot(slot)

    async def cloned(self, original: Host | None = None) -> None:
        """The data directory is copied to another machine, which is started: it claims to be the same node."""
        if self._clone is not None:
            return
        original = original or self._host()
        self._note(original.name)
        disk = original.disk.copy()
        name, devices = f"clone{self.kinds.total()}", len(original.inventory.devices)
        clone = self._clone = self._world.add_host(name, disk, cpu_millis=original.cpu_millis, devices=devices)
        clone.node_name = original.node_name
        clone.start_noded()
        await asyncio.sleep(self._rng.uniform(5.0, 40.0))
        if self._clone is clone:
            self._remove_clone()

    def _remove_clone(self) -> None:
        clone, self._clone = self._clone, None
        if clone is not None:
            clone.noded_wanted = False
            clone.lose_power()
            del self._world.hosts[clone.name]

    async def cloned_of_a_silent_node(self) -> None:
        """Thought dead and replaced by a copy of its disk, while it still runs, cut off."""
        original = self._host()
        self._world.start(self._cut(Way.UP, Way.DOWN, host=original))
        await asyncio.sleep(self._rng.uniform(3.0, 15.0))
        await self.cloned(original)

    # -- the network

    async def _cut(self, *ways: Way, host: Host | None = None) -> None:
        host = host or self._host()
        self._note(host.name, *ways)
        self._world.network.cut(host.name, *ways)
        await asyncio.sleep(self._rng.choice((2.0, 7.0, 20.0, 45.0, 100.0)))
        self._world.network.heal(host.name, *ways)

    async def partition(self) -> None:
        await self._cut(Way.UP, Way.DOWN)

    async def one_way(self) -> None:
        await self._cut(self._rng.choice((Way.UP, Way.DOWN)))

    async def one_way_then_silence(self) -> None:
        """Renewals arrive and their acknowledgements do not; these arrive late, all at once, and then nothing does."""
        host, network = self._host(), self._world.network
        first = self._rng.choice((Way.UP, Way.DOWN))
        self._note(host.name, first)
        network.cut(host.name, first)
        await asyncio.sleep(self._rng.uniform(2.0, 12.0))
        network.heal(host.name, first)
        await asyncio.sleep(self._rng.uniform(0.05, 2.5))
        await self._cut(Way.UP, Way.DOWN, host=host)

    async def connections_break(self) -> None:
        self._world.network.break_connections(self._host().name)

    async def slow_network(self) -> None:
        host = self._host()
        self._world.network.slow(host.name, self._rng.choice((0.1, 0.8, 3.0)))
        await asyncio.sleep(self._rng.uniform(5.0, 40.0))
        self._world.network.slow(host.name, 0.0)

    # -- clocks and disks

    async def wall_clock_jump(self) -> None:
        for controller in self._world.controllers:
            controller.clock.wall_offset_ns += self._rng.choice((-HOUR_NS, HOUR_NS))

    async def disk_full(self) -> None:
        tree = self._rng.choice((self._world.shared, self._host().disk.shards))
        tree.full = True
        await asyncio.sleep(self._rng.uniform(5.0, 40.0))
        tree.full = False

    async def shard_corrupted(self) -> None:
        """The newest whole checkpoint of some job loses a shard."""
        state = self._world.checkers.state
        whole = [
            checkpoint
            for job, table in sorted(state.checkpoints.items())
            if not state.jobs[job].state.ended
            for checkpoint in table.values()
            if checkpoint.state is CheckpointState.COMMITTED and checkpoint.tier is Tier.SHARED
        ]
        if whole:
            checkpoint = whole[-1]
            part = self._rng.choice(checkpoint.parts)
            self._note(checkpoint.job, checkpoint.id, part.rank)
            self._world.shared.corrupt(checkpoint.directory, part.file)
