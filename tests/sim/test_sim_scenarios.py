"""One fault at a time, by script: what must follow, in virtual time. Each fails under the defect named beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any

import pytest

from controld.core.commands import SubmitJob
from controld.core.ids import JobId
from controld.core.model import JobState
from controld.core.spec import (
    SECOND_NS,
    CheckpointSpec,
    Durability,
    GangSpec,
    JobSpec,
    Resources,
    TaskSpec,
    Writes,
)
from controld.health.view import View
from controld.replica.stall import StallWatch
from noded.core.slotbook import SlotBook
from tests.sim.client import GIB, User
from tests.sim.clock import HostClock
from tests.sim.faults import HOUR_NS
from tests.sim.mutation import Mutation, Patch
from tests.sim.mutations import BY_NAME
from tests.sim.network import Way
from tests.sim.node import Host
from tests.sim.patches import simulated_machine
from tests.sim.task import Program
from tests.sim.world import Shape, World

Script = Callable[["Scene"], Coroutine[Any, Any, None]]


class Scene:
    """A quiet world with one job, and what is wrong with what came of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.problems: list[str] = []
        self._user = User(world, "user", 0, 0)

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.problems.append(f"at {self.world.loop.time():.1f} s: {what}")

    async def running(
        self,
        *,
        ranks: int = 2,
        spares: int = 0,
        writes: Writes = Writes.TOKEN,
        fence_after_s: int = 60,
        steps: int = 100,
    ) -> JobId:
        """Submit a job and wait until all of it runs."""
        spec = JobSpec(
            name="job",
            gang=GangSpec(ranks, spares),
            resources=Resources(1000, GIB),
            task=TaskSpec(Program(steps, 1000, 5).command(), grace_ms=500),
            fence_after_ns=fence_after_s * SECOND_NS,
            writes=writes,
            checkpoint=CheckpointSpec(Durability.SHARED_DIRECTORY, "/shared"),
        )
        await asyncio.sleep(5)
        await self._user.ask(SubmitJob(self._user.next_id(), spec))
        await self.until(lambda: any(j.state is JobState.RUNNING for j in self.world.checkers.state.jobs.values()))
        return next(iter(self.world.checkers.state.jobs))

    async def until(self, holds: Callable[[], bool], within_s: float = 60) -> bool:
        """Whether it came to hold in time; a problem where it did not."""
        end_s = self.world.loop.time() + within_s
        while not holds():
            if self.world.loop.time() > end_s:
                self.expect(False, f"not within {within_s:g} s")
                return False
            await asyncio.sleep(0.05)
        return True

    def generation(self, job: JobId) -> int:
        return self.world.checkers.state.jobs[job].generation

    def state(self, job: JobId) -> JobState:
        return self.world.checkers.state.jobs[job].state

    def host_of(self, rank: int = 0) -> Host:
        run = next(r for r in reversed(self.world.truth.runs) if r.member.rank == rank)
        return self.world.hosts[run.host]

    def untouched(self, job: JobId) -> None:
        """The first generation still runs, every rank of it."""
        self.expect(self.generation(job) == 1, f"generation {self.generation(job)} was started")
        ended = [r.slot for r in self.world.truth.runs if r.end_ns is not None and not r.finished]
        self.expect(not ended, f"{', '.join(ended)} ended")


def problems(script: Script) -> list[str]:
    """Run a scene; what it found, and what any checker found."""
    scenes: list[Scene] = []

    async def play(world: World) -> None:
        world.begin()
        scenes.append(Scene(world))
        await script(scenes[0])

    with simulated_machine():
        result = World(1, Shape(faults=0, commands=0), script=play).run()
    return scenes[0].problems + [f"{checker}: {text}" for checker, text in result.violations]


@contextmanager
def patched(*patches: Patch) -> Generator[None]:
    with Mutation("", (), lambda: patches).applied():
        yield


# -- scenes --------------------------------------------------------------------------------------------------------


async def noded_is_killed_alone(scene: Scene) -> None:
    job = await scene.running()
    scene.host_of().kill_noded()
    await asyncio.sleep(30)
    scene.untouched(job)


async def the_controller_is_away_for_30_s(scene: Scene) -> None:
    job = await scene.running()
    scene.world.rivals[0].kill(restart_s=(30, 30))
    await asyncio.sleep(60)
    scene.untouched(job)
    scene.expect(scene.state(job) is JobState.RUNNING, f"it is {scene.state(job)}")


async def the_job_ends_while_the_controller_is_away(scene: Scene) -> None:
    job = await scene.running(steps=10)
    scene.world.rivals[0].kill(restart_s=(25, 25))
    await asyncio.sleep(50)
    scene.expect(scene.state(job) is JobState.SUCCEEDED, f"it is {scene.state(job)}")
    scene.expect(scene.generation(job) == 1, "it ran again")


async def the_leader_stands_still_for_20_s(scene: Scene) -> None:
    job = await scene.running()
    process = scene.world.rivals[0].process
    assert process is not None
    process.freeze()
    await asyncio.sleep(10)
    for name in scene.world.hosts:
        scene.world.network.break_connections(name)  # or what waits unread would speak for its sender
    await asyncio.sleep(10)
    process.thaw()
    await asyncio.sleep(20)
    scene.untouched(job)


async def wall_clocks_jump(scene: Scene) -> None:
    job = await scene.running()
    for jump_ns in (HOUR_NS, -2 * HOUR_NS):
        for controller in scene.world.controllers:
            controller.clock.wall_offset_ns += jump_ns
        for host in scene.world.hosts.values():
            host.clock.wall_offset_ns += jump_ns
        await asyncio.sleep(15)
        scene.untouched(job)


async def a_node_loses_power(scene: Scene) -> None:
    """Every output is under the token: the spare takes over as soon as the node is suspect."""
    job = await scene.running(ranks=2, spares=1)
    await asyncio.sleep(12)
    lost = scene.host_of()
    lost.lose_power()
    await scene.until(lambda: scene.generation(job) == 2 and scene.state(job) is JobState.RUNNING, within_s=10)
    second = [r for r in scene.world.truth.runs if r.token.generation == 2]
    scene.expect(all(r.host != lost.name for r in second), "it was started on the node that is gone")
    scene.expect(len(second) == 2, f"{len(second)} ranks were started")


async def a_node_is_cut_off_and_the_job_writes_elsewhere(scene: Scene) -> None:
    """No second generation before the cut rank is gone by its own clock; then one, within the lease and its grace."""
    job = await scene.running(writes=Writes.SHARED, fence_after_s=15)
    cut = scene.host_of()
    began_s = scene.world.loop.time()
    scene.world.network.cut(cut.name, Way.UP, Way.DOWN)
    await scene.until(lambda: any(r.token.generation == 2 for r in scene.world.truth.runs), within_s=25)
    first_end_ns = max((r.end_ns or 1 << 62) for r in scene.world.truth.runs if r.token.generation == 1)
    started = [r.start_ns for r in scene.world.truth.runs if r.token.generation == 2]
    scene.expect(bool(started) and min(started) > first_end_ns, "two generations were alive")
    scene.expect(scene.world.loop.time() - began_s > 15, "the lease was not waited for")
    scene.world.network.heal(cut.name, Way.UP, Way.DOWN)
    await asyncio.sleep(20)
    scene.expect(scene.generation(job) == 2, "the healed node disturbed the second generation")


# -- defects -------------------------------------------------------------------------------------------------------


def adopts_nothing() -> tuple[Patch, ...]:
    def adopt(self: SlotBook, seen: Any, records: Any) -> None:
        del self, seen, records

    return ((SlotBook, "_adopt", adopt),)


def hasty_new_leader() -> tuple[Patch, ...]:
    """A node that this leader has not heard yet counts as silent since ever."""
    real = View.silent_ns

    def silent_ns(self: View, uid: Any, now_ns: int) -> int:
        return real(self, uid, now_ns) if uid in self.sessions else now_ns

    return ((View, "silent_ns", silent_ns),)


def forgets_exits() -> tuple[Patch, ...]:
    real = SlotBook.exited

    def exited(self: SlotBook, slot: Any, token: Any, end: Any, *, empty: bool) -> list[Any]:
        found = real(self, slot, token, end, empty=empty)
        self._slots.pop(slot, None)
        return found

    return ((SlotBook, "exited", exited),)


def stall_is_silence() -> tuple[Patch, ...]:
    def check(self: StallWatch) -> None:
        del self

    return ((StallWatch, "check", check),)


def leases_by_wall_clock() -> tuple[Patch, ...]:
    return ((HostClock, "boottime_ns", HostClock.unix_ns),)


def of(name: str) -> Callable[[], tuple[Patch, ...]]:
    def patches() -> tuple[Patch, ...]:
        return BY_NAME[name].patches()

    patches.__name__ = name
    return patches


SCENES = (
    (noded_is_killed_alone, adopts_nothing, ("C13",)),
    (the_controller_is_away_for_30_s, hasty_new_leader, ("F10", "G16", "H1")),
    (the_job_ends_while_the_controller_is_away, forgets_exits, ("H8",)),
    (the_leader_stands_still_for_20_s, stall_is_silence, ()),
    (wall_clocks_jump, leases_by_wall_clock, ("F5",)),
    (a_node_loses_power, of("never_restart"), ("G1",)),
    (a_node_is_cut_off_and_the_job_writes_elsewhere, of("start_without_release"), ("G5",)),
)


def _parameters() -> list[Any]:
    found: list[Any] = []
    for scene, defect, rows in SCENES:
        marks = [pytest.mark.row(*rows)] if rows else []
        found.append(pytest.param(scene, defect, id=scene.__name__, marks=marks))
    return found


@pytest.mark.parametrize(("scene", "defect"), _parameters())
def test_what_must_follow_does_and_the_defect_is_seen(scene: Script, defect: Callable[[], tuple[Patch, ...]]) -> None:
    assert problems(scene) == []
    with patched(*defect()):
        assert problems(scene) != []
