"""What a store makes of lost answers: a real member behind a wire that loses what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from controld.store.etcd_session import EtcdTimes
from controld.store.port import DeposedError, OutcomeUnknownError, SequenceError
from tests.support_etcd_wire import Loss, Lossy, lossy_stores
from tests.support_store import contents, put


@pytest.fixture
async def lossy() -> AsyncIterator[Lossy]:
    async with lossy_stores(EtcdTimes(attempt=0.2, commit=0.6, campaign=0.6)) as made:
        yield made


class TestCommit:
    @pytest.mark.parametrize("loss", list(Loss))
    async def test_a_lost_one_is_repeated_and_applied_once(self, lossy: Lossy, loss: Loss) -> None:
        leader = await lossy.store.campaign("a")
        start = (await lossy.store.load()).revision
        lossy.lose(loss, loss)
        revision = await lossy.store.commit(leader, 1, [put("x", b"1")])
        for late in lossy.wire.late:
            await late
        assert revision == start + 1
        assert (await lossy.store.load()).revision == revision
        assert await lossy.store.commit(leader, 2, [put("x", b"2")]) == revision + 1

    async def test_one_whose_answers_are_all_lost_is_unknown_and_may_be_given_again(self, lossy: Lossy) -> None:
        leader = await lossy.store.campaign("a")
        lossy.lose(*[Loss.ANSWER] * 50)
        with pytest.raises(OutcomeUnknownError):
            await lossy.store.commit(leader, 1, [put("x", b"1")])
        lossy.wire.losses.clear()
        revision = (await lossy.store.load()).revision
        assert await lossy.store.commit(leader, 1, [put("x", b"1")]) == revision
        with pytest.raises(SequenceError, match="another one"):
            await lossy.store.commit(leader, 1, [put("x", b"other")])
        assert await contents(lossy.store) == {"x": b"1"}

    async def test_deposed_after_a_doubt_says_nothing_of_the_doubt(self, lossy: Lossy) -> None:
        """The first attempt was applied, then another one took over: "deposed" would call it not written."""
        leader = await lossy.store.campaign("a")
        lossy.lose(Loss.ANSWER)
        lossy.wire.hook = lambda: lossy.other.campaign("b")
        with pytest.raises(OutcomeUnknownError, match="in doubt"):
            await lossy.store.commit(leader, 1, [put("x", b"1")])
        assert await contents(lossy.store) == {"x": b"1"}
        with pytest.raises(DeposedError):
            await lossy.store.commit(leader, 1, [put("x", b"1")])

    async def test_a_late_one_of_a_deposed_leader_changes_nothing(self, lossy: Lossy) -> None:
        leader = await lossy.store.campaign("a")
        lossy.lose(*[Loss.LATE] * 50)
        lossy.wire.late_s = 2.0
        with pytest.raises(OutcomeUnknownError):
            await lossy.store.commit(leader, 1, [put("x", b"late")])
        new = await lossy.other.campaign("b")
        await lossy.other.commit(new, 1, [put("x", b"new")])
        before = await lossy.other.load()
        assert len(lossy.wire.late) > 1
        assert not any([(await late).succeeded for late in lossy.wire.late])
        after = await lossy.other.load()
        # The revision is the whole etcd's: the evidence of a store of another test may end meanwhile.
        assert replace(after, revision=before.revision) == before


class TestTakeover:
    @pytest.mark.parametrize("loss", list(Loss))
    async def test_a_lost_answer_is_found_out(self, lossy: Lossy, loss: Loss) -> None:
        lossy.lose(loss, loss)
        leader = await lossy.store.take_over("a", "h:1", 0)
        incumbent = (await lossy.store.load()).incumbent
        assert incumbent is not None
        assert incumbent.leadership == leader
        await lossy.store.commit(leader, 1, [put("x")])

    async def test_one_that_is_never_answered_is_unknown_and_tells_itself_by_the_watch(self, lossy: Lossy) -> None:
        start = (await lossy.store.load()).revision
        lossy.lose(*[Loss.ANSWER] * 50)
        with pytest.raises(OutcomeUnknownError):
            await lossy.store.take_over("a", "h:1", 0)
        seen = await anext(lossy.store.follow(start))
        assert seen.revision == start + 1

    async def test_of_two_with_one_name_only_the_one_that_won_believes_it(self, lossy: Lossy) -> None:
        lossy.lose(Loss.LATE)
        wire = lossy.wire
        losing = asyncio.ensure_future(lossy.store.take_over("a", "h:1", 0))
        await asyncio.sleep(0)
        won = await asyncio.gather(lossy.other.take_over("a", "h:1", 0), losing, return_exceptions=True)
        winners = [one for one in won if not isinstance(one, BaseException)]
        assert len(winners) == 1
        for late in wire.late:
            await late
        incumbent = (await lossy.other.load()).incumbent
        assert incumbent is not None
        assert incumbent.leadership == winners[0]

    async def test_resigning_twice_after_a_lost_answer_is_no_error(self, lossy: Lossy) -> None:
        leader = await lossy.store.take_over("a", "h:1", 0)
        lossy.lose(Loss.ANSWER)
        await lossy.store.resign(leader)
        assert (await lossy.store.load()).incumbent is None
