"""The warm copy: equal to the leader's state, and dropped rather than trusted when something does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from controld.core.commands import CancelJob, SubmitJob
from controld.core.ids import JobId
from controld.core.state import State
from controld.replica.observe import LogName
from controld.replica.settings import LeaderSettings
from controld.replica.sightings import Sightings
from controld.replica.standby import Standby
from controld.store.memory import MemoryDisk, MemoryStore
from controld.store.port import Commit, CompactedError, LeaderSeen, StoredChange
from tests.support_core import incarnation, spec
from tests.support_replica import LogBook, LoopClock, Peer, Rig, hello, lead, quick, run


class Following(MemoryStore):
    """A handle whose stream may be tampered with, and breaks when told."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk)
        self.change: Callable[[Commit | LeaderSeen], Commit | LeaderSeen] = lambda item: item

    async def follow(self, after_revision: int) -> AsyncGenerator[Commit | LeaderSeen]:
        async with aclosing(super().follow(after_revision)) as items:
            async for item in items:
                yield self.change(item)


class Copy:
    def __init__(self, disk: MemoryDisk) -> None:
        self.store = Following(disk)
        self.log = LogBook()
        self.standby = Standby(
            store=self.store,
            clock=LoopClock(),
            settings=LeaderSettings(),
            sightings=Sightings(),
            log=self.log,
            on_leader=lambda _: None,
            on_sees=lambda: None,
            on_loaded=lambda: None,
        )
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.store.open()
        self.task = asyncio.create_task(self.standby.run())
        await asyncio.sleep(0.1)

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait((self.task,))

    @property
    def loads(self) -> int:
        return len(self.log.of(LogName.STANDBY_LOADED))


def following(scene: Callable[[Rig, Copy], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test of a copy beside a leader."""

    def test() -> None:
        async def main() -> None:
            disk = MemoryDisk()
            rig, copy = await lead(disk, settings=quick(prune_interval_seconds=5.0)), Copy(disk)
            await copy.start()
            await scene(rig, copy)
            await copy.stop()
            await rig.stop()

        run(main)

    return test


def assert_equal(copy: State | None, leader: State) -> None:
    assert copy is not None
    for name in ("history", "cluster", "nodes", "jobs", "generations", "checkpoints", "requests", "events"):
        assert getattr(copy, name) == getattr(leader, name), name
    assert (copy.created, copy.modified) == (leader.created, leader.modified)


@following
async def test_it_equals_the_leader_whatever_happens(rig: Rig, copy: Copy) -> None:
    peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
    for number in range(30):
        await rig.submit(SubmitJob(f"r{number}", spec(1)))
    await rig.submit(CancelJob("c1", JobId("train-3")))
    for seq in range(2, 20):
        await asyncio.sleep(1)
        peer.beat(seq)
    await asyncio.sleep(70)  # SUSPECT, EXPIRED, and events pruned
    assert_equal(copy.standby.state, rig.leader.state)
    assert copy.loads == 1
    assert copy.standby.hub is not None
    assert copy.standby.hub.cursor.revision == rig.leader.state.revision


@following
async def test_a_revision_that_does_not_increase_drops_it(rig: Rig, copy: Copy) -> None:
    assert copy.standby.hub is not None
    watching = copy.standby.hub.subscribe()
    copy.store.change = lambda item: Commit(1, item.changes) if isinstance(item, Commit) else item
    await rig.submit(SubmitJob("r1", spec()))
    await asyncio.sleep(0.02)
    assert copy.log.of(LogName.STANDBY_DROPPED)
    copy.store.change = lambda item: item
    await asyncio.sleep(1)
    assert_equal(copy.standby.state, rig.leader.state)
    with pytest.raises(CompactedError):
        async for _ in watching:
            pass


@following
async def test_history_that_is_gone_makes_it_load(rig: Rig, copy: Copy) -> None:
    await copy.stop()
    await rig.submit(SubmitJob("r1", spec()))
    await rig.submit(SubmitJob("r2", spec()))
    await rig.store.compact(rig.leader.state.revision)
    await copy.start()
    assert copy.loads == 2
    assert_equal(copy.standby.state, rig.leader.state)


@following
async def test_a_restore_makes_it_load(rig: Rig, copy: Copy) -> None:
    await rig.store.backup("b")
    await rig.submit(SubmitJob("r1", spec()))
    await asyncio.sleep(0.1)
    await rig.store.restore("b")
    await asyncio.sleep(0.1)
    state = copy.standby.state
    assert state is not None
    assert (state.history, dict(state.jobs)) == (2, {})


@following
async def test_a_record_that_it_cannot_read_is_not_guessed(rig: Rig, copy: Copy) -> None:
    """As written by a later version. It never gets to decide on what it does not know."""
    broken = tuple[StoredChange, ...]((StoredChange("jobs/train-1", b"\xff\xff"),))
    copy.store.change = lambda item: Commit(item.revision, broken) if isinstance(item, Commit) else item
    await rig.submit(SubmitJob("r1", spec()))
    await asyncio.sleep(0.01)
    assert copy.standby.state is None
    assert not copy.standby.sees
    rig.disk.records["jobs/train-9"] = rig.disk.records["jobs/train-1"].__class__("jobs/train-9", b"\xff\xff", 1, 1)
    await asyncio.sleep(5)
    assert not copy.standby.sees
    del rig.disk.records["jobs/train-9"]
    copy.store.change = lambda item: item
    await asyncio.sleep(1)
    assert_equal(copy.standby.state, rig.leader.state)


@following
async def test_a_broken_stream_is_taken_up_where_it_was(rig: Rig, copy: Copy) -> None:
    for number in range(5):
        await copy.stop()
        await rig.submit(SubmitJob(f"r{number}", spec()))
        await copy.start()
    assert copy.loads == 1
    assert_equal(copy.standby.state, rig.leader.state)


@following
async def test_who_waits_for_a_revision_is_told_when_it_is_there(rig: Rig, copy: Copy) -> None:
    await rig.submit(SubmitJob("r1", spec()))
    revision = rig.leader.state.revision
    assert (await copy.standby.reached(revision)).revision >= revision
    waiting = asyncio.ensure_future(copy.standby.reached(rig.leader.state.revision + 1))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await rig.submit(SubmitJob("r2", spec()))
    assert (await waiting).jobs[JobId("train-2")]
