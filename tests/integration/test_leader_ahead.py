"""What is decided while another commit is under way: it stands on that commit, and falls with it.

Each scenario raises AssertionError when its promise is broken; it is run on the real writer, and on the writer with
one rule replaced, where it must fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from controld.core.commands import CancelJob, Command, SubmitJob
from controld.core.ids import JobId
from controld.core.invariants import check
from controld.core.state import State
from controld.replica.errors import RefusedError
from controld.replica.states import restore
from controld.replica.writer import Writer
from controld.store.memory import MemoryDisk, MemoryStore
from controld.store.port import (
    DeposedError,
    Leadership,
    OutcomeUnknownError,
    StorageFullError,
    StoredChange,
    StoreError,
)
from tests.support_core import spec
from tests.support_replica import Rig, lead, quick, run
from virialpb.reasons import Reason

Scenario = Callable[[], Coroutine[Any, Any, None]]
HANG_S = 100.0  # of the virtual clock


class Stepped(MemoryStore):
    """Each commit and barrier waits for its turn once `gated`, and fails where it is told to."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk)
        self.asked: list[str] = []
        self.gated = False
        self.failure: StoreError | None = None
        self._turns: asyncio.Queue[None] = asyncio.Queue()

    def let_one_through(self) -> None:
        self._turns.put_nowait(None)

    async def commit(self, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
        self.asked.append(f"commit {seq}")
        await self._turn()
        return await super().commit(leadership, seq, changes)

    async def barrier(self, leadership: Leadership) -> None:
        if self.gated:
            self.asked.append("barrier")
        await self._turn()
        await super().barrier(leadership)

    async def _turn(self) -> None:
        if self.gated:
            await self._turns.get()
        if self.failure is not None:
            raise self.failure


def submit(n: int, job_id: str = "") -> SubmitJob:
    return SubmitJob(f"r{n}", spec(), job_id)


async def ready(**settings: Any) -> tuple[Rig, Stepped]:
    """A leader that decides ahead whatever waits, and whose own loops keep still."""
    disk = MemoryDisk()
    store = Stepped(disk)
    still = {"barrier_interval_seconds": 1e6, "tick_interval_seconds": 1e6, "tick_gap_seconds": 1e6}
    rig = await lead(disk, store=store, settings=quick(**({"ahead_commands_min": 1} | still | settings)))
    await asyncio.sleep(0.1)
    store.gated = True
    store.asked.clear()
    return rig, store


def let_all_through(store: Stepped) -> None:
    store.gated = False
    store.let_one_through()


async def given(rig: Rig, *commands: Command) -> list[asyncio.Task[object]]:
    """Commands that are decided by now, if they may be."""
    tasks = [asyncio.create_task(_outcome(rig, command)) for command in commands]
    await asyncio.sleep(0.001)
    return tasks


async def _outcome(rig: Rig, command: Command) -> object:
    try:
        return (await rig.submit(command)).subject
    except Exception as error:
        return error


async def outcomes(tasks: list[asyncio.Task[object]]) -> list[object]:
    done, waiting = await asyncio.wait(tasks, timeout=HANG_S)
    assert not waiting, f"{len(waiting)} of {len(tasks)} were never answered"
    assert len(done) == len(tasks)
    return [task.result() for task in tasks]


async def stored(disk: MemoryDisk) -> State:
    reader = MemoryStore(disk)
    await reader.open()
    return restore(await reader.load())


async def is_as_stored(rig: Rig) -> None:
    """The head, what is told, and what is stored are one."""
    writer = rig.leader._led().writer  # pyright: ignore[reportPrivateUsage]
    there = await stored(rig.disk)
    for state in (writer.committed, writer._head):  # pyright: ignore[reportPrivateUsage]
        for table in ("cluster", "nodes", "jobs", "generations", "requests", "events", "created", "modified"):
            assert getattr(state, table) == getattr(there, table), table
    assert check(there) == ()


# -- what is promised ----------------------------------------------------------------------------------------------


async def one_at_a_time_and_answered_in_order() -> None:
    """Rule 8: a reply waits for its own commit, and a commit for the one that it was decided on."""
    rig, store = await ready()
    (first,) = await given(rig, submit(1))
    others = await given(rig, *(submit(n) for n in range(2, 40)))
    assert store.asked == ["commit 2"]
    store.let_one_through()
    await asyncio.sleep(0.001)
    assert first.done()
    assert not any(task.done() for task in others)
    assert store.asked == ["commit 2", "commit 3"], "what was decided ahead goes at once, as one"
    store.let_one_through()
    assert len({*await outcomes(others)}) == 38
    assert store.asked == ["commit 2", "commit 3"]
    await is_as_stored(rig)
    let_all_through(store)
    await rig.stop()


async def full_storage_undoes_what_was_decided_on_it() -> None:
    """The refusal saw a job that never came to be; and what was not refused was never written."""
    rig, store = await ready()
    under_way = await given(rig, submit(1, "a"))
    ahead = await given(rig, submit(2, "a"), submit(3, "b"))
    store.failure = StorageFullError("no space")
    store.let_one_through()
    (full,) = await outcomes(under_way)
    assert isinstance(full, StorageFullError)
    assert not any(task.done() for task in ahead)
    store.failure = None
    let_all_through(store)
    assert await outcomes(ahead) == ["a", "b"]
    assert (await rig.submit(submit(4, "c"))).subject == "c"
    await is_as_stored(rig)
    await rig.stop()


def _lost(error: StoreError) -> Scenario:
    async def scenario() -> None:
        """Whatever became of the first, nothing of the second was written, and nobody is told that it was refused."""
        rig, store = await ready(commit_attempts_max=1)
        under_way = await given(rig, submit(1, "a"))
        ahead = await given(rig, submit(2, "a"), submit(3, "b"))
        store.failure = error
        store.let_one_through()
        told = await outcomes(under_way + ahead)
        assert [type(o) for o in told] == [type(error), DeposedError, DeposedError]
        assert store.asked == ["commit 2"]
        assert rig.leader.lost.is_set()
        assert (await stored(rig.disk)).jobs == {}
        let_all_through(store)
        await rig.stop()

    return scenario


async def stopping_finishes_what_is_in_the_store_and_nothing_else() -> None:
    rig, store = await ready()
    under_way = await given(rig, submit(1, "a"))
    ahead = await given(rig, submit(2, "a"), submit(3, "b"))
    stopping = asyncio.create_task(rig.stop())
    await asyncio.sleep(0.001)
    store.let_one_through()
    told = await outcomes(under_way + ahead)
    assert told[0] == "a"
    assert [type(o) for o in told[1:]] == [DeposedError, DeposedError]
    await asyncio.wait_for(stopping, HANG_S)
    assert store.asked == ["commit 2"]
    assert set((await stored(rig.disk)).jobs) == {"a"}


async def a_stop_that_cannot_wait_tells_everyone() -> None:
    """The store does not answer for longer than a stop may take."""
    rig, _ = await ready(stop_timeout_seconds=1.0)
    under_way = await given(rig, submit(1, "a"))
    ahead = await given(rig, submit(2, "a"))
    await asyncio.wait_for(rig.stop(), HANG_S)
    told = await outcomes(under_way + ahead)
    assert [type(o) for o in told] == [OutcomeUnknownError, DeposedError]


async def refusals_alone_wait_for_the_commit_and_for_a_proof_of_their_own() -> None:
    rig, store = await ready()
    under_way = await given(rig, submit(1, "a"))
    refused = await given(rig, submit(2, "a"), CancelJob("r3", JobId("nope")))
    assert store.asked == ["commit 2"]
    store.let_one_through()
    await asyncio.sleep(0.001)
    assert under_way[0].done()
    assert not any(task.done() for task in refused), "another may lead by now"
    assert store.asked == ["commit 2", "barrier"]
    store.let_one_through()
    told = await outcomes(refused)
    assert [o.reason for o in told if isinstance(o, RefusedError)] == [Reason.ALREADY_EXISTS, Reason.NOT_FOUND]
    let_all_through(store)
    await rig.stop()


async def a_commit_stands_on_refusals_that_could_not_be_proved() -> None:
    """A failed barrier changes nothing: what was decided on top of refusals is as true as before."""
    rig, store = await ready()
    refused = await given(rig, CancelJob("r1", JobId("nope")))
    ahead = await given(rig, submit(2, "a"))
    assert store.asked == ["barrier"]

    store.failure = OutcomeUnknownError("no majority")
    store.let_one_through()
    (told,) = await outcomes(refused)
    assert isinstance(told, OutcomeUnknownError)
    store.failure = None
    let_all_through(store)
    assert await outcomes(ahead) == ["a"]
    await is_as_stored(rig)
    await rig.stop()


async def a_hold_waits_for_what_was_decided() -> None:
    rig, store = await ready()
    under_way = await given(rig, submit(1, "a"))
    ahead = await given(rig, submit(2, "b"))
    holding = asyncio.create_task(rig.leader.hold())
    later = await given(rig, submit(3, "c"))
    store.let_one_through()
    await asyncio.sleep(0.001)
    assert not holding.done(), "the second commit is under way"
    store.let_one_through()
    revision = await asyncio.wait_for(holding, HANG_S)
    assert await outcomes(under_way + ahead) == ["a", "b"]
    assert revision == rig.disk.revision
    await asyncio.sleep(1)
    assert not later[0].done()
    rig.leader.release()
    let_all_through(store)
    assert await outcomes(later) == ["c"]
    await rig.stop()


async def what_cannot_be_stored_fails_alone() -> None:
    """It is found out only when it is encoded, after others were decided on top of it."""
    rig, store = await ready()
    under_way = await given(rig, submit(1, "a"))
    broken = SubmitJob("r2", spec(), "b", owner="\ud800")
    mixed = await given(rig, submit(3, "c"), broken, submit(4, "b"), submit(5, "c"))
    store.let_one_through()
    await asyncio.sleep(0.001)
    store.let_one_through()
    assert await outcomes(under_way) == ["a"]
    told = await outcomes(mixed)
    assert told[0] == "c"
    assert [o.reason for o in told if isinstance(o, RefusedError)] == [Reason.INVARIANT_BROKEN, Reason.ALREADY_EXISTS]
    assert told[2] == "b", "the broken one left nothing behind"
    await is_as_stored(rig)
    let_all_through(store)
    await rig.stop()


async def too_many_bytes_go_in_several_commits() -> None:
    rig, store = await ready(batch_bytes_max=3_000)
    sizes: list[int] = []
    real = store.commit

    async def measuring(leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
        sizes.append(sum(len(c.key) + len(c.value or b"") for c in changes))
        return await real(leadership, seq, changes)

    store.commit = measuring  # type: ignore[method-assign]
    let_all_through(store)
    under_way = await given(rig, submit(0))
    many = await given(rig, *(submit(n) for n in range(1, 60)))
    told = await outcomes(under_way + many)
    assert len({*told}) == 60
    assert not [o for o in told if isinstance(o, Exception)]
    assert max(sizes) <= 3_000
    assert len(sizes) < 60, "one by one is no group commit"
    await is_as_stored(rig)
    await rig.stop()


# -- each fails where a rule is broken ------------------------------------------------------------------------------


def _answered_when_decided(patch: pytest.MonkeyPatch) -> None:
    real = Writer._decide_ahead  # pyright: ignore[reportPrivateUsage]

    def decide(self: Any) -> None:
        real(self)
        if self._ahead is not None:
            self._answer(self._ahead)

    patch.setattr(Writer, "_decide_ahead", decide)


def _kept_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    def keep(self: Any) -> None:
        del self

    patch.setattr(Writer, "_take_back_ahead", keep)


def _dropped_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    def drop(self: Any) -> None:
        self._ahead = None

    patch.setattr(Writer, "_take_back_ahead", drop)


def _proved_by_the_commit_before(patch: pytest.MonkeyPatch) -> None:
    real = Writer._answer  # pyright: ignore[reportPrivateUsage]

    def answer(self: Any, batch: Any) -> None:
        real(self, batch)
        if self._ahead is not None and not self._ahead.stored:
            real(self, self._ahead)

    patch.setattr(Writer, "_answer", answer)


def _closed_and_committed_yet(patch: pytest.MonkeyPatch) -> None:
    """The loop goes on to what was decided before the end."""

    async def run_on(self: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (batch := self._next()).answers:
                self._under_way = batch
                self._look_ahead()
                await self._finish(batch)
            if self._closed is not None:
                return

    patch.setattr(Writer, "run", run_on)
    _kept_after_a_failure(patch)


def _held_at_once(patch: pytest.MonkeyPatch) -> None:
    async def hold(self: Any) -> None:
        self._held = True

    patch.setattr(Writer, "hold", hold)


def _no_way_back(patch: pytest.MonkeyPatch) -> None:
    def stay(self: Any, batch: Any, before: Any) -> None:
        del self, batch, before

    patch.setattr(Writer, "_rewind", stay)


def _all_at_once(patch: pytest.MonkeyPatch) -> None:
    def settled(self: Any, batch: Any) -> bool:
        batch.settle(self._head)
        return True

    patch.setattr(Writer, "_settled", settled)


def _refused_by_the_unproved(patch: pytest.MonkeyPatch) -> None:
    real = Writer._fail_batch  # pyright: ignore[reportPrivateUsage]

    def fail(self: Any, batch: Any, error: StoreError) -> None:
        real(self, batch, error)
        if self._ahead is not None:
            real(self, self._ahead, error)

    patch.setattr(Writer, "_fail_batch", fail)


UNKNOWN = _lost(OutcomeUnknownError("no answer"))
DEPOSED = _lost(DeposedError("another leads"))
SCENARIOS: dict[str, tuple[Scenario, tuple[Callable[[pytest.MonkeyPatch], None], ...]]] = {
    "in_order": (one_at_a_time_and_answered_in_order, (_answered_when_decided,)),
    "full": (full_storage_undoes_what_was_decided_on_it, (_kept_after_a_failure, _dropped_after_a_failure)),
    "unknown": (UNKNOWN, (_kept_after_a_failure, _dropped_after_a_failure, _closed_and_committed_yet)),
    "deposed": (DEPOSED, (_kept_after_a_failure, _dropped_after_a_failure, _closed_and_committed_yet)),
    "stopped": (
        stopping_finishes_what_is_in_the_store_and_nothing_else,
        (_kept_after_a_failure, _dropped_after_a_failure, _closed_and_committed_yet),
    ),
    "cancelled": (a_stop_that_cannot_wait_tells_everyone, (_kept_after_a_failure, _dropped_after_a_failure)),
    "refusals": (
        refusals_alone_wait_for_the_commit_and_for_a_proof_of_their_own,
        (_answered_when_decided, _proved_by_the_commit_before),
    ),
    "unproved": (a_commit_stands_on_refusals_that_could_not_be_proved, (_refused_by_the_unproved,)),
    "held": (a_hold_waits_for_what_was_decided, (_held_at_once,)),
    "broken": (what_cannot_be_stored_fails_alone, (_no_way_back,)),
    "bytes": (too_many_bytes_go_in_several_commits, (_all_at_once, _no_way_back)),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_decided_ahead(name: str) -> None:
    run(SCENARIOS[name][0])


@pytest.mark.parametrize(
    ("name", "defect"),
    [pytest.param(name, d, id=f"{name}{d.__name__}") for name, (_, defects) in SCENARIOS.items() for d in defects],
)
def test_a_seeded_defect_shows(
    name: str, defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    with pytest.raises((AssertionError, asyncio.TimeoutError)):
        run(SCENARIOS[name][0])
