"""Real etcd members, three of them, that are killed, stopped, cut off from a majority and compacted under a watch."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from controld.store import etcd_txn
from controld.store.etcd import EtcdStore
from controld.store.etcd_client import GrpcWire
from controld.store.etcd_endpoint import parse_endpoint
from controld.store.etcd_keys import Keys
from controld.store.etcd_session import EtcdTimes
from controld.store.etcd_wire import COMPACT, LOCAL_TXN, MEMBER_LIST, MOVE_LEADER, WireError
from controld.store.port import (
    Commit,
    CompactedError,
    DeposedError,
    LeaderSeen,
    Leadership,
    OutcomeUnknownError,
)
from tests import support_etcd
from tests.support_etcd import Members
from tests.support_store import contents, delete, put
from virialpb.etcd.v1 import etcd_pb2 as pb

HANG_SECONDS = 60.0
QUICK = EtcdTimes(commit=0.6, barrier=0.5, follow=0.6, campaign=0.6, read=1.0)
PATIENT = EtcdTimes(commit=20.0, campaign=20.0, follow=20.0)


@pytest.fixture
def members() -> Iterator[Members]:
    with ExitStack() as stack:
        yield support_etcd.start(stack, 3)


async def opened(members: Members, index: int, times: EtcdTimes = QUICK) -> EtcdStore:
    store = members.store(index, times=times)
    await store.open()
    return store


def others(members: Members, index: int) -> list[int]:
    return [i for i in range(len(members.processes)) if i != index]


class TestQuorum:
    async def test_without_one_nothing_is_acknowledged_or_proved_and_afterwards_nothing_is_lost(
        self, members: Members
    ) -> None:
        await members.ready()
        store = await opened(members, 0)
        leader = await store.campaign("a")
        revision = await store.commit(leader, 1, [put("x", b"1")])
        watch = store.watch(revision)
        waiting = asyncio.ensure_future(anext(watch))
        for index in (1, 2):
            members.processes[index].kill()
        with pytest.raises(OutcomeUnknownError):
            await store.barrier(leader)
        with pytest.raises(OutcomeUnknownError):
            await store.commit(leader, 2, [put("x", b"2")])
        with pytest.raises(OutcomeUnknownError):
            await store.campaign("b")
        with pytest.raises(OutcomeUnknownError):
            await store.load()
        with pytest.raises(OutcomeUnknownError, match="the watch of etcd broke"):
            await anext(store.follow(revision))
        status = await store.status()
        assert any("a majority of the members cannot be reached" in problem for problem in status.problems)
        assert status.revision >= revision
        for index in (1, 2):
            members.processes[index].start()
        await members.ready()
        again = await opened(members, 0, PATIENT)
        second = await again.commit(leader, 2, [put("x", b"2")])  # what was in doubt, given again: applied once
        assert await again.commit(leader, 2, [put("x", b"2")]) == second
        async with asyncio.timeout(HANG_SECONDS):
            assert await waiting == Commit(second, (put("x", b"2"),))
        await again.barrier(leader)
        await watch.aclose()
        await store.close()
        await again.close()

    async def test_a_barrier_of_comparisons_alone_would_be_answered_by_the_member_itself(
        self, members: Members
    ) -> None:
        """The reason for the Range in it (rule 2): seeded here as the defect it guards against."""
        await members.ready()
        store = await opened(members, 0)
        leader = await store.campaign("a")
        for index in (1, 2):
            members.processes[index].kill()
        wire = GrpcWire([parse_endpoint(members.processes[0].config.endpoint)])
        real = etcd_txn.barrier(Keys("virial"), leader)
        blind = pb.TxnRequest(compare=real.compare)
        with pytest.raises(OutcomeUnknownError):
            await store.barrier(leader)
        assert (await wire.call(LOCAL_TXN, blind, 1.0)).succeeded
        with pytest.raises(WireError):
            await wire.call(LOCAL_TXN, real, 1.0)
        await wire.close()
        await store.close()


class TestLeadingMember:
    async def test_its_loss_costs_a_pause_and_no_acknowledged_commit(self, members: Members) -> None:
        await members.ready()
        lost = await members.leader()
        local, other = others(members, lost)
        store, follower = await opened(members, local, PATIENT), await opened(members, other, PATIENT)
        leader = await store.take_over("a", "h:1", 0)
        follow = follower.follow(leader.epoch.revision)
        revisions = [await store.commit(leader, seq, [put("x", b"%d" % seq)]) for seq in range(1, 20)]
        members.processes[lost].kill()
        revisions += [await store.commit(leader, seq, [put("x", b"%d" % seq)]) for seq in range(20, 60)]
        async with asyncio.timeout(HANG_SECONDS):
            seen = [await anext(follow) for _ in range(len(revisions))]
        assert [item.revision for item in seen] == revisions
        assert (await follower.load()).records[0].value == b"59"
        await follow.aclose()
        await store.close()
        await follower.close()

    async def test_a_planned_move_is_no_loss_at_all(self, members: Members) -> None:
        await members.ready()
        leading = await members.leader()
        store = await opened(members, leading, PATIENT)
        leader = await store.campaign("a")
        wire = GrpcWire([parse_endpoint(members.processes[leading].config.endpoint)])
        listed = (await wire.call(MEMBER_LIST, pb.MemberListRequest(), 5.0)).members
        target = next(m.ID for m in listed if m.name != members.processes[leading].config.name)
        committing = asyncio.ensure_future(self._commits(store, leader, 100))
        await wire.call(MOVE_LEADER, pb.MoveLeaderRequest(target_id=target), 10.0)
        revisions = await committing
        assert revisions == sorted(set(revisions))
        assert await members.leader() != leading
        assert [commit.revision for commit in await self._watched(store, leader, 100)] == revisions
        await wire.close()
        await store.close()

    @staticmethod
    async def _commits(store: EtcdStore, leader: Leadership, count: int) -> list[int]:
        return [await store.commit(leader, seq, [put(f"k/{seq}")]) for seq in range(1, count + 1)]

    @staticmethod
    async def _watched(store: EtcdStore, leader: Leadership, count: int) -> list[Commit]:
        watch = store.watch(leader.epoch.revision)
        async with asyncio.timeout(HANG_SECONDS):
            return [await anext(watch) for _ in range(count)]


class TestLocalMember:
    async def test_a_stopped_one_leaves_no_evidence_and_its_controller_never_commits_again(
        self, members: Members
    ) -> None:
        await members.ready()
        local = others(members, await members.leader())[0]
        other = others(members, local)[0]
        old, new = await opened(members, local), await opened(members, other, PATIENT)
        first = await old.take_over("a", "h:1", 0)
        revision = await old.commit(first, 1, [put("x", b"1")])
        follow = new.follow(revision)
        members.processes[local].signal(signal.SIGSTOP)
        with pytest.raises(OutcomeUnknownError):
            await old.barrier(first)
        with pytest.raises(OutcomeUnknownError):
            await old.commit(first, 2, [put("x", b"2")])
        async with asyncio.timeout(HANG_SECONDS):
            seen = await anext(follow)
        assert isinstance(seen, LeaderSeen)
        assert seen.incumbent is not None
        assert (seen.incumbent.leadership, seen.incumbent.alive) == (first, False)
        second = await new.take_over("b", "h:2", first.token)
        last = await new.commit(second, 1, [put("x", b"3")])
        members.processes[local].signal(signal.SIGCONT)
        again = await opened(members, local, PATIENT)
        for attempt in (1, 2):  # also with what had been under way when it was stopped, and arrives now
            with pytest.raises(DeposedError):
                await again.commit(first, 2, [put("x", b"2")])
            with pytest.raises(DeposedError):
                await again.barrier(first)
            assert await contents(again) == {"x": b"3"}, attempt
        assert (await again.load()).revision == last
        await follow.aclose()
        for store in (old, new, again):
            await store.close()

    async def test_a_killed_one_is_waited_for_by_what_watches(self, members: Members) -> None:
        await members.ready()
        writer, reader = await opened(members, 0, PATIENT), await opened(members, 1, PATIENT)
        leader = await writer.campaign("a")
        watch = reader.watch(leader.epoch.revision)
        revisions = [await writer.commit(leader, 1, [put("x", b"1")])]
        assert (await anext(watch)).revision == revisions[0]
        members.processes[1].kill()
        revisions += [await writer.commit(leader, seq, [put("x", b"%d" % seq)]) for seq in range(2, 50)]
        members.processes[1].start()
        async with asyncio.timeout(HANG_SECONDS):
            seen = [await anext(watch) for _ in revisions[1:]]
        assert [commit.revision for commit in seen] == revisions[1:]
        await watch.aclose()
        await writer.close()
        await reader.close()

    async def test_what_was_compacted_while_it_was_down_is_not_passed_over(self, members: Members) -> None:
        await members.ready()
        writer, reader = await opened(members, 0, PATIENT), await opened(members, 1, PATIENT)
        leader = await writer.campaign("a")
        watch = reader.watch(leader.epoch.revision)
        first = await writer.commit(leader, 1, [put("x", b"1")])
        assert (await anext(watch)).revision == first
        members.processes[1].kill()
        revisions = [await writer.commit(leader, seq, [put("x", b"%d" % seq)]) for seq in range(2, 10)]
        await writer.compact(revisions[-2])
        members.processes[1].start()
        with pytest.raises(CompactedError) as refused:
            async with asyncio.timeout(HANG_SECONDS):
                await anext(watch)
        assert refused.value.revision == revisions[-2]
        assert (await reader.load()).records[0].value == b"9"
        await writer.close()
        await reader.close()


async def test_a_watch_at_the_compacted_revision_itself_loses_no_deletion() -> None:
    """etcd lets it pass, and may have removed the deletion: so a watch begins one revision earlier, and is refused."""
    support_etcd.require_etcd()
    store = support_etcd.shared().store(prefix=support_etcd.fresh_prefix())
    await store.open()
    leader = await store.campaign("a")
    before = await store.commit(leader, 1, [put("x")])
    deleted = await store.commit(leader, 2, [delete("x")])
    wire = GrpcWire([parse_endpoint(support_etcd.shared().processes[0].config.endpoint)])
    await wire.call(COMPACT, pb.CompactionRequest(revision=deleted, physical=True), 10.0)
    with pytest.raises(CompactedError):
        await anext(store.watch(before))
    later = await store.commit(leader, 3, [put("x")])
    assert (await anext(store.watch(deleted))).revision == later
    await wire.close()
    await store.close()
