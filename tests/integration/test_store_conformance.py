"""What every store keeps, whatever it is made of: loading, commits, leadership (watch and backup: the next file)."""

from __future__ import annotations

import asyncio

import pytest

from controld.core.ids import Epoch
from controld.store.port import DeposedError, Leadership, SequenceError, Store
from tests.support_store import Kind, contents, created, delete, put


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
