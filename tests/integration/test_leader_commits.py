"""Group commit: one transaction for all that waited, one outcome for all of it, refusals too."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import pytest

from controld.core.commands import CancelJob, SubmitJob
from controld.core.ids import JobId
from controld.core.invariants import check
from controld.replica.errors import NotLeaderError, OverloadedError, RefusedError
from controld.replica.observe import LogName
from controld.store.faults import Fault, FaultKind, Operation
from controld.store.memory import MemoryDisk, MemoryStore
from controld.store.port import DeposedError, Leadership, OutcomeUnknownError, StorageFullError, StoredChange
from tests.support_core import spec
from tests.support_replica import Gates, Rig, lead, quick, run
from virialpb.reasons import Reason


class Script:
    """Faults of commits, in turn; everything else works."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = deque(faults)

    def next(self, operation: Operation) -> Fault:
        return self.faults.popleft() if operation is Operation.COMMIT and self.faults else Fault()


class SlowStore(MemoryStore):
    """Holds commits and barriers back until they are let go, and writes down what was asked when."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk)
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[str] = []
        self.sizes: list[int] = []

    async def commit(self, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
        self.calls.append(f"commit {seq}")
        self.sizes.append(len(changes))
        await self.gate.wait()
        revision = await super().commit(leadership, seq, changes)
        self.calls.append(f"committed {seq}")
        return revision

    async def barrier(self, leadership: Leadership) -> None:
        self.calls.append("barrier")
        await self.gate.wait()
        await super().barrier(leadership)
        self.calls.append("proved")


def submit(n: int, *, job_id: str = "") -> SubmitJob:
    return SubmitJob(f"r{n}", spec(), job_id)


async def all_of(rig: Rig, *commands: SubmitJob | CancelJob) -> list[object]:
    return list(await asyncio.gather(*(rig.submit(c) for c in commands), return_exceptions=True))


def test_what_waits_shares_one_transaction() -> None:
    async def main() -> None:
        disk = MemoryDisk()
        store = SlowStore(disk)
        rig = await lead(disk, store=store)
        await asyncio.sleep(0.1)
        store.gate.clear()
        first = asyncio.ensure_future(rig.submit(submit(0)))
        await asyncio.sleep(0.001)
        before = len([c for c in store.calls if c.startswith("commit ")])
        rest = [asyncio.ensure_future(rig.submit(submit(n))) for n in range(1, 101)]
        await asyncio.sleep(0.001)
        assert not first.done()
        store.gate.set()
        replies = await asyncio.gather(first, *rest)
        assert len({r.subject for r in replies}) == 101
        assert len([c for c in store.calls if c.startswith("commit ")]) == before + 1
        assert rig.leader.state.jobs.keys() == {r.subject for r in replies}
        assert check(rig.leader.state) == ()
        await rig.stop()

    run(main)


def test_a_transaction_stays_below_its_bound() -> None:
    async def main() -> None:
        disk = MemoryDisk()
        store = SlowStore(disk)
        rig = await lead(disk, store=store, settings=quick(batch_operations_max=32))
        replies = await all_of(rig, *(submit(n) for n in range(100)))
        assert not [r for r in replies if isinstance(r, Exception)]
        assert max(store.sizes) <= 32
        await rig.stop()

    run(main)


def test_events_are_numbered_without_gaps_and_the_same_after_a_reload() -> None:
    async def main() -> None:
        rig = await lead()
        await all_of(rig, *(submit(n) for n in range(20)))
        state = rig.leader.state
        assert sorted(state.events) == list(range(1, len(state.events) + 1))
        assert state.cluster is not None
        assert state.cluster.event_sequence == len(state.events)
        await rig.stop()
        again = await lead(rig.disk)
        reloaded = again.leader.state
        for table in ("cluster", "jobs", "events", "requests", "created", "modified"):
            assert getattr(reloaded, table) == getattr(state, table), table
        await again.stop()

    run(main)


@pytest.mark.parametrize(
    ("fault", "error", "over"),
    [
        (FaultKind.STORAGE_FULL, StorageFullError, False),
        (FaultKind.DEPOSED, DeposedError, True),
        (FaultKind.LOST_BEFORE, OutcomeUnknownError, True),
    ],
)
def test_a_failing_commit_fails_everything_decided_with_it(
    fault: FaultKind, error: type[Exception], over: bool
) -> None:
    """The refusal of the second "a" saw the first one, which never came to be: it must not be told either."""

    async def main() -> None:
        script = Script()
        rig = await lead(faults=script)
        await asyncio.sleep(0.1)
        script.faults.extend([Fault(fault)] * 3)
        outcomes = await all_of(rig, submit(1, job_id="a"), submit(2, job_id="a"), submit(3, job_id="b"))
        assert [type(o) for o in outcomes] == [error] * 3
        assert rig.leader.state.jobs == {}
        assert rig.leader.lost.is_set() is over
        script.faults.clear()
        if over:
            with pytest.raises(DeposedError):
                await rig.submit(submit(4))
            await rig.stop()
            rig = await lead(rig.disk)
        assert (await rig.submit(submit(1, job_id="a"))).subject == "a"
        with pytest.raises(RefusedError) as refused:
            await rig.submit(submit(2, job_id="a"))
        assert refused.value.reason is Reason.ALREADY_EXISTS
        await rig.stop()

    run(main)


@pytest.mark.parametrize("kind", [FaultKind.LOST_BEFORE, FaultKind.LOST_AFTER, FaultKind.LATE])
def test_an_unknown_outcome_is_cleared_up_by_the_same_transaction(kind: FaultKind) -> None:
    async def main() -> None:
        script = Script()
        rig = await lead(faults=script)
        await asyncio.sleep(0.1)
        script.faults.extend([Fault(kind, late_s=0.02)] * 2)
        replies = await all_of(rig, submit(1), submit(2))
        assert not [r for r in replies if isinstance(r, Exception)]
        assert len(rig.leader.state.jobs) == 2
        assert len(rig.log.of(LogName.COMMIT_RETRIED)) == 2
        assert not rig.leader.lost.is_set()
        await asyncio.sleep(1)
        assert (await rig.submit(submit(3))).subject
        await rig.stop()

    run(main)


def test_deposed_while_repeating_a_commit_is_unknown_not_undone() -> None:
    """The first attempt arrived; another controller then took over. "Nothing was written" would be a lie."""

    async def main() -> None:
        script = Script()
        rig = await lead(faults=script)
        await asyncio.sleep(0.1)
        script.faults.extend([Fault(FaultKind.LOST_AFTER), Fault(FaultKind.DEPOSED)])
        with pytest.raises(OutcomeUnknownError):
            await rig.submit(submit(1, job_id="a"))
        assert rig.leader.lost.is_set()
        await rig.stop()
        again = await lead(rig.disk)
        assert JobId("a") in again.leader.state.jobs
        assert (await again.submit(submit(1, job_id="a"))).subject == "a"
        await again.stop()

    run(main)


def test_on_a_full_disk_what_frees_space_is_not_refused_with_what_needs_it() -> None:
    """Requests keep coming; pruning old ones still gets through, and then there is room."""

    async def main() -> None:
        settings = quick(request_keep_seconds=30, prune_interval_seconds=1.0, events_max=5)
        rig = await lead(settings=settings)
        await all_of(rig, *(submit(n) for n in range(20)))
        rig.disk.capacity_bytes = rig.disk.size_bytes
        refused = 0
        for n in range(100, 200):
            outcomes = await all_of(rig, *(submit(1000 * n + i) for i in range(20)))
            refused += sum(isinstance(o, StorageFullError) for o in outcomes)
            await asyncio.sleep(1)
        assert refused
        assert len(rig.leader.state.requests) < 20 + 20
        assert len(rig.leader.state.jobs) > 20
        assert not rig.leader.lost.is_set()
        await rig.stop()

    run(main)


def test_a_refusal_alone_waits_for_a_proof_of_leadership() -> None:
    async def main() -> None:
        disk = MemoryDisk()
        store = SlowStore(disk)
        rig = await lead(disk, store=store)
        await asyncio.sleep(0.1)
        store.gate.clear()
        refused = asyncio.ensure_future(rig.submit(CancelJob("r1", JobId("nope"))))
        await asyncio.sleep(10)
        assert not refused.done()
        store.gate.set()
        with pytest.raises(RefusedError):
            await refused
        await rig.stop()

    run(main)


def test_a_deposed_leader_refuses_nothing() -> None:
    """What it would refuse by ("no such job") is not true any more."""

    async def main() -> None:
        rig = await lead()
        await asyncio.sleep(0.1)
        rival = await lead(rig.disk)
        await rival.submit(submit(1, job_id="a"))
        with pytest.raises(DeposedError):
            await rig.submit(CancelJob("r1", JobId("a")))
        assert rig.leader.lost.is_set()
        await rig.stop()
        await rival.stop()

    run(main)


def test_a_store_that_went_back_ends_the_leadership() -> None:
    """Restored under a running leader, or replaced by an older copy: the committed state is not the store's."""

    class Backwards(MemoryStore):
        async def commit(self, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
            await super().commit(leadership, seq, changes)
            return 1

    async def main() -> None:
        disk = MemoryDisk()
        first = await lead(disk)
        await first.stop()
        rig = await lead(disk, store=Backwards(disk))
        with pytest.raises(OutcomeUnknownError):
            await rig.submit(submit(1))
        assert rig.leader.lost.is_set()
        assert rig.leader.state.jobs == {}
        await rig.stop()

    run(main)


def test_revisions_older_than_the_cursor_window_are_compacted_and_no_others() -> None:
    async def main() -> None:
        rig = await lead(settings=quick(cursor_window_seconds=600.0, compact_interval_seconds=60.0))
        disk = rig.disk
        seen: list[tuple[float, int]] = []
        for n in range(60):
            await rig.submit(submit(n))
            seen.append((asyncio.get_running_loop().time(), disk.revision))
            await asyncio.sleep(30)
            young = [revision for at, revision in seen if asyncio.get_running_loop().time() - at <= 600]
            assert disk.compacted_revision < min(young)
        assert disk.compacted_revision > 0
        old = max(revision for at, revision in seen if asyncio.get_running_loop().time() - at > 720)
        assert disk.compacted_revision >= old
        await rig.stop()

    run(main)


def test_an_exact_retry_gets_the_first_reply() -> None:
    async def main() -> None:
        rig = await lead()
        first, together = await asyncio.gather(rig.submit(submit(1)), rig.submit(submit(1)))
        later = await rig.submit(submit(1))
        assert first == together == later
        assert len(rig.leader.state.jobs) == 1
        with pytest.raises(RefusedError):
            await rig.submit(SubmitJob("r1", spec(ranks=2)))
        await rig.stop()

    run(main)


def test_the_queue_is_bounded() -> None:
    async def main() -> None:
        disk = MemoryDisk()
        store = SlowStore(disk)
        rig = await lead(disk, store=store, settings=quick(queue_commands_max=8))
        await asyncio.sleep(0.1)
        store.gate.clear()
        waiting = [asyncio.ensure_future(rig.submit(submit(n))) for n in range(30)]
        await asyncio.sleep(0.01)
        store.gate.set()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        refused = [o for o in outcomes if isinstance(o, OverloadedError)]
        assert 30 - 8 - 1 <= len(refused) <= 30 - 8
        assert len(rig.leader.state.jobs) == 30 - len(refused)
        await rig.stop()

    run(main)


def test_stopping_finishes_the_commit_under_way_and_refuses_the_rest() -> None:
    async def main() -> None:
        disk = MemoryDisk()
        store = SlowStore(disk)
        rig = await lead(disk, store=store)
        await asyncio.sleep(0.1)
        store.gate.clear()
        under_way = asyncio.ensure_future(rig.submit(submit(1, job_id="a")))
        await asyncio.sleep(0.001)
        queued = asyncio.ensure_future(rig.submit(submit(2, job_id="b")))
        await asyncio.sleep(0.001)
        stopping = asyncio.ensure_future(rig.stop())
        await asyncio.sleep(0.001)
        store.gate.set()
        await stopping
        assert (await under_way).subject == "a"
        with pytest.raises(DeposedError):
            await queued
        again = await lead(disk)
        assert set(again.leader.state.jobs) == {"a"}
        await again.stop()

    run(main)


def test_a_leader_that_holds_decides_nothing_and_forgets_nothing() -> None:
    """As before a hand-over: what was under way is finished, what comes waits, for the outcome of it."""

    async def main() -> None:
        disk = MemoryDisk()
        store = Gates(disk)
        rig = await lead(disk, store=store)
        store.commits.clear()
        first = asyncio.ensure_future(rig.submit(SubmitJob("r1", spec())))
        await asyncio.sleep(0.1)
        holding = asyncio.ensure_future(rig.leader.hold())
        second = asyncio.ensure_future(rig.submit(SubmitJob("r2", spec())))
        await asyncio.sleep(0.1)
        assert not holding.done(), "a commit is under way"
        store.commits.set()
        assert await holding == rig.leader.state.revision
        assert (await first).subject == "train-1"
        await asyncio.sleep(1)
        assert not second.done()
        rig.leader.release()
        assert (await second).subject == "train-2"
        await rig.leader.hold()
        third = asyncio.ensure_future(rig.submit(SubmitJob("r3", spec())))
        await asyncio.sleep(0.1)
        rig.leader.step_down(NotLeaderError("c1 leads", "h1:7"))
        with pytest.raises(NotLeaderError) as told:
            await third
        assert (told.value.leader, told.value.reason) == ("h1:7", Reason.NOT_LEADER)
        await rig.stop()

    run(main)
