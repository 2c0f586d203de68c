"""What every store keeps, whatever it is made of: watches, compaction, backups, a full disk, its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from controld.store.port import (
    Commit,
    CompactedError,
    DeposedError,
    Leadership,
    StorageFullError,
    Store,
    StoreClosedError,
)
from tests.support_store import KIB, Kind, contents, delete, put, take


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

    async def test_a_cancelled_commit_that_happened_is_seen(self, store: Store) -> None:
        leader = await store.campaign("a")
        waiting = asyncio.ensure_future(anext(store.watch(leader.epoch.revision)))
        await asyncio.sleep(0.01)
        commit = asyncio.ensure_future(store.commit(leader, 1, [put(f"k/{i}", b"x" * 1000) for i in range(500)]))
        await asyncio.sleep(0.001)
        commit.cancel()
        await asyncio.gather(commit, return_exceptions=True)
        if not await contents(store):
            await store.commit(leader, 1, [put("x")])
        assert (await waiting).revision == (await store.load()).revision

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
            await store.commit(leader, seq, [put(f"k/{seq}")])
        before = await store.load()
        await store.compact(before.revision)
        assert await store.load() == before

    async def test_one_that_lags_behind_it_is_told(self, store: Store) -> None:
        leader = await store.campaign("a")
        revisions = [await store.commit(leader, seq, [put("x", b"%d" % seq)]) for seq in range(1, 200)]
        watch = store.watch(leader.epoch.revision)
        first = await anext(watch)
        assert first.revision == revisions[0]
        await store.compact(revisions[-1])
        seen = [first.revision]
        try:
            while len(seen) < len(revisions):  # all of it may have been sent before
                seen.append((await anext(watch)).revision)
        except CompactedError:
            pass
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

    @pytest.mark.row("H2")
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
    async def test_a_restore_brings_back_the_records_and_a_new_history(
        self, store: Store, kind: Kind, tmp_path: Path
    ) -> None:
        leader = await store.campaign("a")
        revision = await store.commit(leader, 1, [put("x", b"1"), put("y", b"1")])
        saved = await store.load()
        await store.backup(str(tmp_path / "backup"))
        await store.commit(leader, 2, [put("x", b"2"), delete("y"), put("z", b"2")])
        await store.restore(str(tmp_path / "backup"))
        loaded = await store.load()
        if kind.restores_revisions:
            assert loaded.records == saved.records
            assert loaded.revision == revision
        else:
            assert [(r.key, r.value) for r in loaded.records] == [(r.key, r.value) for r in saved.records]
            assert loaded.revision > revision
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

    async def test_a_leader_from_before_never_writes_again(self, store: Store, kind: Kind, tmp_path: Path) -> None:
        await store.backup(str(tmp_path / "backup"))
        old = await store.campaign("a")
        await store.restore(str(tmp_path / "backup"))
        with pytest.raises(DeposedError):
            await store.commit(old, 1, [put("x")])
        new = await store.campaign("b")
        if kind.restores_revisions:
            assert new.token == old.token  # revisions went back: the token alone would let the old one in
        with pytest.raises(DeposedError):
            await store.commit(old, 1, [put("x")])
        with pytest.raises(DeposedError):
            await store.barrier(old)
        await store.commit(new, 1, [put("x")])

    async def test_a_leader_in_the_backup_leads_no_more(self, store: Store, tmp_path: Path) -> None:
        old = await store.campaign("a")
        await store.commit(old, 1, [put("x")])
        await store.backup(str(tmp_path / "backup"))
        await store.restore(str(tmp_path / "backup"))
        for seq in (1, 2):
            with pytest.raises(DeposedError):
                await store.commit(old, seq, [put("x")])
        with pytest.raises(DeposedError):
            await store.barrier(old)

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


async def fill(store: Store, leader: Leadership) -> tuple[int, list[str]]:
    """Commit until no space is left; the last number that was taken, and the keys."""
    keys: list[str] = []
    for seq in range(1, 1000):
        try:
            await store.commit(leader, seq, [put(f"k/{seq}", b"x" * 4 * KIB), put("last", b"%d" % seq)])
        except StorageFullError:
            return seq - 1, keys
        keys.append(f"k/{seq}")
    pytest.fail("it never was full")


class TestSpace:
    async def test_a_full_store_refuses_whole_commits_and_takes_deletions(self, kind: Kind) -> None:
        store = kind.make_small()
        await store.open()
        leader = await store.campaign("a")
        seq, keys = await fill(store, leader)
        assert seq > 10
        stored = await contents(store)
        assert set(stored) == {*keys, "last"}
        assert stored["last"] == b"%d" % seq
        await store.barrier(leader)
        await store.compact((await store.load()).revision)
        await store.commit(leader, seq + 1, [delete(key) for key in keys[:-1]])
        await store.compact((await store.load()).revision)  # a store may keep what was deleted until then
        await store.commit(leader, seq + 2, [put("again", b"x" * 4 * KIB)])
        assert set(await contents(store)) == {keys[-1], "last", "again"}
        await store.close()


class TestStatusAndEnd:
    async def test_status_tells_what_is_there(self, store: Store, kind: Kind) -> None:
        leader = await store.campaign("a")
        compacted = (await store.status()).compacted_revision  # 0, but in one that is shared with other tests
        revision = await store.commit(leader, 1, [put("x", b"v" * 10 * KIB)])
        status = await store.status()
        assert (status.kind, status.history, status.revision) == (kind.name, 1, revision)
        assert status.compacted_revision == compacted < revision
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
