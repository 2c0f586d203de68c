"""What every store keeps, whatever it is made of: one suite, run on each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from controld.core.ids import Epoch
from controld.store.memory import MemoryDisk, MemoryStore
from controld.store.port import (
    Commit,
    CompactedError,
    DeposedError,
    Leadership,
    SequenceError,
    StorageFullError,
    Store,
    StoreClosedError,
    StoredChange,
)
from controld.store.sqlite import SqliteStore

KIB = 1 << 10


@dataclass
class Kind:
    """How one kind of store is made. `make` gives another handle on the same contents each time it is called."""

    name: str
    make: Callable[[], Store]
    make_small: Callable[[], Store]
    """An empty store of about a megabyte."""


def memory_kind(_: Path) -> Kind:
    disk = MemoryDisk()
    return Kind("memory", lambda: MemoryStore(disk), lambda: MemoryStore(MemoryDisk(capacity_bytes=1024 * KIB)))


def sqlite_kind(directory: Path) -> Kind:
    return Kind(
        "sqlite",
        lambda: SqliteStore(directory / "data"),
        lambda: SqliteStore(directory / "small", size_bytes_max=1024 * KIB),
    )


@pytest.fixture(params=[memory_kind, sqlite_kind], ids=["memory", "sqlite"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    make: Callable[[Path], Kind] = request.param
    return make(tmp_path)


@pytest.fixture
async def store(kind: Kind) -> AsyncIterator[Store]:
    store = kind.make()
    await store.open()
    yield store
    await store.close()


def put(key: str, value: bytes = b"v") -> StoredChange:
    return StoredChange(key, value)


def delete(key: str) -> StoredChange:
    return StoredChange(key, None)


async def contents(store: Store) -> dict[str, bytes]:
    return {record.key: record.value for record in (await store.load()).records}


async def created(store: Store, key: str) -> tuple[int, int]:
    record = next(record for record in (await store.load()).records if record.key == key)
    return record.create_revision, record.modify_revision


async def take(watch: AsyncIterator[Commit], count: int) -> list[Commit]:
    return [await anext(watch) for _ in range(count)]


class TestLoad:
    async def test_a_new_store_is_empty_and_begins_a_history(self, store: Store) -> None:
        loaded = await store.load()
        assert loaded.records == ()
        assert loaded.history == 1

    async def test_records_come_in_key_order_with_what_was_committed(self, store: Store) -> None:
        leader = await store.campaign("a")
        await store.commit(leader, 1, [put("jobs/b", b"2"), put("jobs/a", b"1"), put("cluster", b"")])
        loaded = await store.load()
        assert [(record.key, record.value) for record in loaded.records] == [
            ("cluster", b""),
            ("jobs/a", b"1"),
            ("jobs/b", b"2"),
        ]

    async def test_more_than_one_page_and_long_values(self, store: Store) -> None:
        leader = await store.campaign("a")
        for seq in range(1, 13):
            await store.commit(leader, seq, [put(f"k/{seq:03d}/{i:03d}", bytes([seq])) for i in range(500)])
        await store.commit(leader, 13, [put("big", bytes(range(256)) * 2048)])
        stored = await contents(store)
        assert len(stored) == 6001
        assert stored["big"] == bytes(range(256)) * 2048
        assert stored["k/012/499"] == b"\x0c"

    async def test_everything_is_there_after_reopening(self, kind: Kind) -> None:
        first = kind.make()
        await first.open()
        leader = await first.campaign("a")
        revision = await first.commit(leader, 1, [put("x", b"1"), put("y", b"2")])
        before = await first.load()
        await first.close()
        second = kind.make()
        await second.open()
        assert await second.load() == before
        assert before.revision == revision
        await second.close()


class TestCommit:
    async def test_revisions_only_grow(self, store: Store) -> None:
        leader = await store.campaign("a")
        revisions = [await store.commit(leader, seq, [put("x")]) for seq in range(1, 6)]
        assert revisions == sorted(set(revisions))
        assert revisions[0] > leader.epoch.revision
        assert (await store.load()).revision == revisions[-1]

    async def test_all_of_a_refused_commit_is_refused(self, store: Store) -> None:
        leader = await store.campaign("a")
        await store.commit(leader, 1, [put("x", b"1")])
        before = await store.load()
        with pytest.raises(SequenceError):
            await store.commit(leader, 3, [put("x", b"2"), put("y", b"2")])
        assert await store.load() == before

    async def test_a_key_stands_once(self, store: Store) -> None:
        leader = await store.campaign("a")
        with pytest.raises(SequenceError, match="x: twice"):
            await store.commit(leader, 1, [put("x", b"1"), delete("x")])
        assert await contents(store) == {}
        await store.commit(leader, 1, [put("x", b"1")])

    async def test_put_and_delete_in_one_commit(self, store: Store) -> None:
        leader = await store.campaign("a")
        await store.commit(leader, 1, [put("x"), put("y")])
        await store.commit(leader, 2, [delete("x"), put("z"), delete("never-there")])
        assert set(await contents(store)) == {"y", "z"}

    @pytest.mark.parametrize("seq", [0, 1, 2, 4, 5])
    async def test_only_the_next_or_the_last_number_is_taken(self, store: Store, seq: int) -> None:
        leader = await store.campaign("a")
        for number in (1, 2, 3):
            await store.commit(leader, number, [put("x", b"%d" % number)])
        before = await store.load()
        if seq == 4:
            await store.commit(leader, 4, [put("x", b"4")])
            return
        with pytest.raises(SequenceError):
            await store.commit(leader, seq, [put("x", b"other")])
        assert await store.load() == before

    async def test_the_same_commit_again_is_applied_once(self, store: Store) -> None:
        leader = await store.campaign("a")
        changes = [put("x", b"1"), delete("gone")]
        await store.commit(leader, 1, [put("gone")])
        revision = await store.commit(leader, 2, changes)
        loaded = await store.load()
        assert await store.commit(leader, 2, changes) == revision
        assert await store.load() == loaded
        assert await store.commit(leader, 3, [put("y")]) > revision

    async def test_another_commit_under_the_last_number_is_a_mistake_of_the_caller(self, store: Store) -> None:
        leader = await store.campaign("a")
        await store.commit(leader, 1, [put("x", b"1")])
        with pytest.raises(SequenceError, match="another one"):
            await store.commit(leader, 1, [put("x", b"2")])
        assert await contents(store) == {"x": b"1"}

    async def test_a_retry_after_compaction_is_still_applied_once(self, store: Store) -> None:
        leader = await store.campaign("a")
        revision = await store.commit(leader, 1, [put("x", b"1")])
        await store.compact(revision)
        assert await store.commit(leader, 1, [put("x", b"1")]) == revision

    async def test_a_commit_without_effect_counts_in_turn(self, store: Store) -> None:
        leader = await store.campaign("a")
        revision = await store.commit(leader, 1, [delete("never-there")])
        assert await store.commit(leader, 1, [delete("never-there")]) == revision
        assert await store.commit(leader, 2, [put("x")]) > revision

    async def test_a_cancelled_commit_happens_wholly_or_not_at_all(self, store: Store) -> None:
        leader = await store.campaign("a")
        task = asyncio.ensure_future(store.commit(leader, 1, [put("x"), put("y")]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.commit(leader, 1, [put("x"), put("y")])
        assert set(await contents(store)) == {"x", "y"}


class TestCreateRevision:
    async def test_an_update_keeps_it(self, store: Store) -> None:
        leader = await store.campaign("a")
        first = await store.commit(leader, 1, [put("x", b"1")])
        second = await store.commit(leader, 2, [put("x", b"2")])
        assert await created(store, "x") == (first, second)

    async def test_a_deletion_ends_it(self, store: Store) -> None:
        leader = await store.campaign("a")
        await store.commit(leader, 1, [put("x")])
        await store.commit(leader, 2, [delete("x")])
        third = await store.commit(leader, 3, [put("x")])
        assert await created(store, "x") == (third, third)


class TestLeadership:
    async def test_epochs_only_grow_and_carry_the_history(self, store: Store) -> None:
        first = await store.campaign("a")
        await store.commit(first, 1, [put("x")])
        second = await store.campaign("b")
        third = await store.campaign("b")
        assert Epoch(1, 0) < first.epoch < second.epoch < third.epoch
        assert {first.epoch.history, second.epoch.history, third.epoch.history} == {1}
        assert len({first.token, second.token, third.token}) == 3

    async def test_an_epoch_is_no_revision_of_a_commit(self, store: Store) -> None:
        first = await store.campaign("a")
        revision = await store.commit(first, 1, [put("x")])
        second = await store.campaign("a")
        assert first.epoch.revision < revision < second.epoch.revision

    async def test_a_deposed_one_can_never_write(self, store: Store) -> None:
        old = await store.campaign("a")
        await store.commit(old, 1, [put("x", b"old")])
        new = await store.campaign("b")
        before = await store.load()
        for seq in (0, 1, 2, 3):  # the retry of its last commit too: it must not learn "applied" from another's store
            with pytest.raises(DeposedError):
                await store.commit(old, seq, [put("x", b"late")])
        assert await store.load() == before
        await store.commit(new, 1, [put("x", b"new")])
        with pytest.raises(DeposedError):
            await store.commit(old, 2, [put("x", b"late")])
        assert await contents(store) == {"x": b"new"}

    async def test_the_same_controller_again_is_another_leadership(self, store: Store) -> None:
        old = await store.campaign("a")
        await store.campaign("a")
        with pytest.raises(DeposedError):
            await store.commit(old, 1, [put("x")])

    async def test_a_barrier_tells_who_leads(self, store: Store) -> None:
        old = await store.campaign("a")
        await store.barrier(old)
        new = await store.campaign("b")
        await store.barrier(new)
        with pytest.raises(DeposedError):
            await store.barrier(old)

    async def test_one_made_up_or_of_another_history_is_refused(self, store: Store) -> None:
        leader = await store.campaign("a")
        for forged in (
            Leadership("a", leader.token, Epoch(2, leader.epoch.revision)),
            Leadership("a", leader.token + 1, leader.epoch),
            Leadership("a", 0, Epoch(0, 0)),
        ):
            with pytest.raises(DeposedError):
                await store.commit(forged, 1, [put("x")])
            with pytest.raises(DeposedError):
                await store.barrier(forged)

    async def test_it_outlives_the_handle(self, kind: Kind) -> None:
        first = kind.make()
        await first.open()
        leader = await first.campaign("a")
        await first.commit(leader, 1, [put("x", b"1")])
        await first.close()
        second = kind.make()
        await second.open()
        revision = await second.commit(leader, 1, [put("x", b"1")])
        assert await second.commit(leader, 2, [put("x", b"2")]) > revision
        await second.close()


class TestWatch:
    async def test_commits_come_in_order_and_whole(self, store: Store) -> None:
        leader = await store.campaign("a")
        watch = store.watch(leader.epoch.revision)
        expected: list[Commit] = []
        for seq in range(1, 201):
            changes = (put(f"k/{seq % 7}", b"%d" % seq), put("both", b"%d" % seq))
            expected.append(Commit(await store.commit(leader, seq, changes), changes))
        assert await take(watch, 200) == expected

    async def test_one_that_waits_is_woken(self, store: Store) -> None:
        leader = await store.campaign("a")
        watch = store.watch((await store.load()).revision)
        for seq in range(1, 6):
            waiting = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
            revision = await store.commit(leader, seq, [put("x", b"%d" % seq)])
            assert await waiting == Commit(revision, (put("x", b"%d" % seq),))

    async def test_it_resumes_where_another_ended(self, store: Store) -> None:
        leader = await store.campaign("a")
        revisions = [await store.commit(leader, seq, [put("x", b"%d" % seq)]) for seq in range(1, 10)]
        for index, revision in enumerate(revisions[:-1]):
            rest = await take(store.watch(revision), len(revisions) - index - 1)
            assert [commit.revision for commit in rest] == revisions[index + 1 :]

    async def test_it_resumes_in_another_handle(self, kind: Kind) -> None:
        first = kind.make()
        await first.open()
        leader = await first.campaign("a")
        revisions = [await first.commit(leader, seq, [put("x", b"%d" % seq)]) for seq in range(1, 6)]
        await first.close()
        second = kind.make()
        await second.open()
        rest = await take(second.watch(revisions[1]), 3)
        assert [commit.revision for commit in rest] == revisions[2:]
        await second.close()

    async def test_several_see_the_same_under_concurrent_commits(self, store: Store) -> None:
        leader = await store.campaign("a")
        start = leader.epoch.revision
        readers = [asyncio.ensure_future(take(store.watch(start), 60)) for _ in range(4)]
        for seq in range(1, 61):
            await store.commit(leader, seq, [put(f"k/{seq}")])
        seen = await asyncio.gather(*readers)
        assert all(commits == seen[0] for commits in seen)
        assert [commit.changes[0].key for commit in seen[0]] == [f"k/{seq}" for seq in range(1, 61)]

    async def test_what_changes_nothing_is_not_seen(self, store: Store) -> None:
        leader = await store.campaign("a")
        watch = store.watch(leader.epoch.revision)
        await store.commit(leader, 1, [delete("never-there")])
        await store.campaign("b")
        leader = await store.campaign("a")
        revision = await store.commit(leader, 1, [put("x"), delete("never-there")])
        assert await anext(watch) == Commit(revision, (put("x"),))

    async def test_a_deletion_is_seen(self, store: Store) -> None:
        leader = await store.campaign("a")
        revision = await store.commit(leader, 1, [put("x")])
        watch = store.watch(revision)
        await store.commit(leader, 2, [delete("x")])
        assert (await anext(watch)).changes == (delete("x"),)

    async def test_a_position_from_the_future_is_refused(self, store: Store) -> None:
        revision = (await store.load()).revision
        with pytest.raises(CompactedError):
            await anext(store.watch(revision + 1000))

    async def test_closing_the_store_ends_it(self, kind: Kind) -> None:
        store = kind.make()
        await store.open()
        waiting = asyncio.ensure_future(anext(store.watch((await store.load()).revision)))
        await asyncio.sleep(0.01)
        await store.close()
        with pytest.raises(StoreClosedError):
            await waiting


class TestCompaction:
    async def test_what_remains_is_gapless_and_what_is_gone_is_refused(self, store: Store) -> None:
        leader = await store.campaign("a")
        revisions = [await store.commit(leader, seq, [put("x", b"%d" % seq)]) for seq in range(1, 11)]
        await store.compact(revisions[4])
        rest = await take(store.watch(revisions[4]), 5)
        assert [commit.revision for commit in rest] == revisions[5:]
        with pytest.raises(CompactedError) as refused:
            await anext(store.watch(revisions[2]))
        assert revisions[2] < refused.value.revision <= revisions[4]
        assert (await store.status()).compacted_revision == revisions[4]

    async def test_the_records_stay(self, store: Store) -> None:
        leader = await store.campaign("a")
        for seq in range(1, 6):
            revision = await store.commit(leader, seq, [put(f"k/{seq}")])
        before = await store.load()
        await store.compact(revision)
        assert await store.load() == before

    async def test_one_that_lags_behind_it_is_told(self, store: Store) -> None:
        leader = await store.campaign("a")
        revisions = [await store.commit(leader, seq, [put("x", b"%d" % seq)]) for seq in range(1, 200)]
        watch = store.watch(leader.epoch.revision)
        first = await anext(watch)
        assert first.revision == revisions[0]
        await store.compact(revisions[-1])
        seen = [first.revision]
        with pytest.raises(CompactedError):
            async for commit in watch:
                seen.append(commit.revision)
        assert seen == revisions[: len(seen)]  # what it did get was without gaps

    async def test_it_never_goes_back_nor_ahead(self, store: Store) -> None:
        leader = await store.campaign("a")
        revisions = [await store.commit(leader, seq, [put("x", b"%d" % seq)]) for seq in range(1, 6)]
        await store.compact(revisions[2])
        await store.compact(revisions[0])
        assert (await store.status()).compacted_revision == revisions[2]
        await store.compact(revisions[-1] + 1000)
        assert (await store.status()).compacted_revision == revisions[-1]
        later = await store.commit(leader, 6, [put("x", b"6")])
        assert (await anext(store.watch(revisions[-1]))).revision == later

    async def test_it_outlives_the_handle(self, kind: Kind) -> None:
        first = kind.make()
        await first.open()
        leader = await first.campaign("a")
        revisions = [await first.commit(leader, seq, [put("x", b"%d" % seq)]) for seq in range(1, 6)]
        await first.compact(revisions[2])
        await first.close()
        second = kind.make()
        await second.open()
        with pytest.raises(CompactedError):
            await anext(second.watch(revisions[0]))
        assert [commit.revision for commit in await take(second.watch(revisions[2]), 2)] == revisions[3:]
        await second.close()


class TestBackupAndRestore:
    async def test_a_restore_brings_back_the_records_and_a_new_history(self, store: Store, tmp_path: Path) -> None:
        leader = await store.campaign("a")
        revision = await store.commit(leader, 1, [put("x", b"1"), put("y", b"1")])
        saved = await store.load()
        await store.backup(str(tmp_path / "backup"))
        await store.commit(leader, 2, [put("x", b"2"), delete("y"), put("z", b"2")])
        await store.restore(str(tmp_path / "backup"))
        loaded = await store.load()
        assert loaded.records == saved.records
        assert loaded.revision == revision
        assert loaded.history > saved.history
        assert (await store.status()).history == loaded.history

    async def test_no_epoch_comes_twice(self, store: Store, tmp_path: Path) -> None:
        leader = await store.campaign("a")
        await store.backup(str(tmp_path / "backup"))
        epochs = [leader.epoch]
        for _ in range(3):
            for _ in range(3):
                epochs.append((await store.campaign("a")).epoch)
            await store.restore(str(tmp_path / "backup"))
        epochs.append((await store.campaign("a")).epoch)
        assert epochs == sorted(set(epochs))

    async def test_a_leader_from_before_never_writes_again(self, store: Store, tmp_path: Path) -> None:
        await store.backup(str(tmp_path / "backup"))
        old = await store.campaign("a")
        await store.restore(str(tmp_path / "backup"))
        with pytest.raises(DeposedError):
            await store.commit(old, 1, [put("x")])
        new = await store.campaign("b")
        assert new.token == old.token  # revisions went back: the token alone would let the old one in
        with pytest.raises(DeposedError):
            await store.commit(old, 1, [put("x")])
        with pytest.raises(DeposedError):
            await store.barrier(old)
        await store.commit(new, 1, [put("x")])

    async def test_a_watch_from_before_is_ended(self, store: Store, tmp_path: Path) -> None:
        leader = await store.campaign("a")
        revision = await store.commit(leader, 1, [put("x")])
        await store.backup(str(tmp_path / "backup"))
        waiting = asyncio.ensure_future(anext(store.watch(revision)))
        await asyncio.sleep(0.01)
        await store.restore(str(tmp_path / "backup"))
        with pytest.raises(CompactedError):
            await waiting
        with pytest.raises(CompactedError):
            await anext(store.watch(leader.epoch.revision))

    async def test_an_absent_backup_changes_nothing(self, store: Store, tmp_path: Path) -> None:
        leader = await store.campaign("a")
        await store.commit(leader, 1, [put("x")])
        before = await store.load()
        with pytest.raises(FileNotFoundError):
            await store.restore(str(tmp_path / "absent"))
        assert await store.load() == before
        await store.commit(leader, 2, [put("y")])


class TestSpace:
    async def test_a_full_store_refuses_whole_commits_and_takes_deletions(self, kind: Kind) -> None:
        store = kind.make_small()
        await store.open()
        leader = await store.campaign("a")
        seq, keys = 0, list[str]()
        with pytest.raises(StorageFullError):
            for number in range(1000):
                await store.commit(leader, seq + 1, [put(f"k/{number}", b"x" * 4 * KIB), put("last", b"%d" % number)])
                seq, keys = seq + 1, [*keys, f"k/{number}"]
        assert seq > 10
        stored = await contents(store)
        assert set(stored) == {*keys, "last"}
        assert stored["last"] == b"%d" % (seq - 1)
        await store.barrier(leader)
        await store.compact((await store.load()).revision)
        await store.commit(leader, seq + 1, [delete(key) for key in keys[:-1]])
        await store.commit(leader, seq + 2, [put("again", b"x" * 4 * KIB)])
        assert set(await contents(store)) == {keys[-1], "last", "again"}
        await store.close()


class TestStatusAndEnd:
    async def test_status_tells_what_is_there(self, store: Store, kind: Kind) -> None:
        leader = await store.campaign("a")
        revision = await store.commit(leader, 1, [put("x", b"v" * 10 * KIB)])
        status = await store.status()
        assert (status.kind, status.history, status.revision, status.compacted_revision) == (kind.name, 1, revision, 0)
        assert status.size_bytes >= 10 * KIB

    async def test_a_closed_handle_does_nothing(self, kind: Kind, tmp_path: Path) -> None:
        store = kind.make()
        await store.open()
        leader = await store.campaign("a")
        await store.close()
        await store.close()
        calls: list[Callable[[], Awaitable[object]]] = [
            store.load,
            lambda: store.campaign("a"),
            lambda: store.commit(leader, 1, [put("x")]),
            lambda: store.barrier(leader),
            lambda: anext(store.watch(0)),
            lambda: store.compact(1),
            store.status,
            lambda: store.backup(str(tmp_path / "backup")),
        ]
        for call in calls:
            with pytest.raises(StoreClosedError):
                await call()
        assert not (tmp_path / "backup").exists()
