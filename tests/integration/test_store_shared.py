"""What every store that several controllers share keeps: one takeover at a time, one order, evidence of life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controld.store.port import Commit, DeposedError, LeaderSeen, SharedStore
from tests.support_store import SHARED, SharedKind, put


@pytest.fixture(params=list(SHARED))
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[SharedStore, SharedStore]]:
    """Two controllers' open handles on one empty store of each kind."""
    kind: SharedKind = SHARED[request.param](tmp_path)
    pair = kind.make(), kind.make()
    for store in pair:
        await store.open()
    yield pair
    for store in pair:
        await store.close()


async def followed(store: SharedStore, after: int, count: int) -> list[Commit | LeaderSeen]:
    follow = store.follow(after)
    async with asyncio.timeout(20):
        return [await anext(follow) for _ in range(count)]


async def test_nobody_leads_a_new_store(stores: tuple[SharedStore, SharedStore]) -> None:
    assert (await stores[0].load()).incumbent is None


async def test_of_two_that_take_over_at_once_one_wins(stores: tuple[SharedStore, SharedStore]) -> None:
    a, b = stores
    came = await asyncio.gather(a.take_over("a", "h:1", 0), b.take_over("b", "h:2", 0), return_exceptions=True)
    (winner,) = [one for one in came if not isinstance(one, BaseException)]
    (loser,) = [one for one in came if isinstance(one, BaseException)]
    assert isinstance(loser, DeposedError)
    incumbent = (await a.load()).incumbent
    assert incumbent is not None
    assert (incumbent.leadership, incumbent.alive) == (winner, True)
    assert incumbent.address == {"a": "h:1", "b": "h:2"}[winner.identity]


async def test_who_took_over_deposes_the_one_before(stores: tuple[SharedStore, SharedStore]) -> None:
    a, b = stores
    first = await a.take_over("a", "h:1", 0)
    await a.commit(first, 1, [put("x", b"1")])
    second = await b.take_over("b", "h:2", first.token)
    assert second.epoch > first.epoch
    with pytest.raises(DeposedError):
        await a.commit(first, 2, [put("x", b"2")])
    with pytest.raises(DeposedError):
        await a.barrier(first)
    with pytest.raises(DeposedError):
        await a.take_over("a", "h:1", first.token)
    await b.commit(second, 1, [put("x", b"3")])


async def test_commits_and_takeovers_come_in_one_order(stores: tuple[SharedStore, SharedStore]) -> None:
    a, b = stores
    start = (await b.load()).revision
    first = await a.take_over("a", "h:1", 0)
    one = await a.commit(first, 1, [put("x", b"1")])
    two = await a.commit(first, 2, [put("x", b"2")])
    second = await b.take_over("b", "h:2", first.token)
    three = await b.commit(second, 1, [put("y", b"3")])
    seen = await followed(b, start, 5)
    assert [type(item).__name__ for item in seen] == ["LeaderSeen", "Commit", "Commit", "LeaderSeen", "Commit"]
    assert [item.revision for item in seen] == [seen[0].revision, one, two, seen[3].revision, three]
    assert [item.revision for item in seen] == sorted({item.revision for item in seen})
    assert isinstance(seen[3], LeaderSeen)
    assert seen[3].incumbent is not None
    assert (seen[3].incumbent.leadership, seen[3].incumbent.address) == (second, "h:2")
    assert seen[3].revision >= second.epoch.revision
    assert await followed(a, two, 2) == seen[3:], "resumed without a gap or a repetition"


async def test_a_watch_shows_commits_alone(stores: tuple[SharedStore, SharedStore]) -> None:
    a, b = stores
    start = (await b.load()).revision
    first = await a.take_over("a", "h:1", 0)
    await a.commit(first, 1, [put("x", b"1")])
    second = await b.take_over("b", "h:2", first.token)
    last = await b.commit(second, 1, [put("x", b"2")])
    watch = a.watch(start)
    assert [(await anext(watch)).changes[0].value for _ in range(2)] == [b"1", b"2"]
    assert (await a.load()).revision == last


async def test_a_leader_that_resigns_leads_no_more(stores: tuple[SharedStore, SharedStore]) -> None:
    a, b = stores
    first = await a.take_over("a", "h:1", 0)
    revision = await a.commit(first, 1, [put("x", b"1")])
    await a.resign(first)
    (seen,) = await followed(b, revision, 1)
    assert isinstance(seen, LeaderSeen)
    assert seen.incumbent is None
    with pytest.raises(DeposedError):
        await a.commit(first, 2, [put("x", b"2")])
    with pytest.raises(DeposedError):
        await b.take_over("b", "h:2", first.token)
    second = await b.take_over("b", "h:2", 0)
    assert second.epoch > first.epoch
    with pytest.raises(DeposedError):
        await a.resign(first)


async def test_a_leader_without_barriers_is_shown_as_not_alive_until_its_next(
    stores: tuple[SharedStore, SharedStore],
) -> None:
    a, b = stores
    first = await a.take_over("a", "h:1", 0)
    revision = await a.commit(first, 1, [put("x", b"1")])
    gone, *_ = await followed(b, revision, 1)
    assert isinstance(gone, LeaderSeen)
    assert gone.incumbent is not None
    assert (gone.incumbent.leadership, gone.incumbent.alive) == (first, False)
    assert (await b.load()).incumbent == gone.incumbent
    await a.barrier(first)
    back, *_ = await followed(b, gone.revision, 1)
    assert isinstance(back, LeaderSeen)
    assert back.incumbent is not None
    assert (back.incumbent.leadership, back.incumbent.alive) == (first, True)
