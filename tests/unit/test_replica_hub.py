"""The watch window: order, resume, and what is cut."""

from __future__ import annotations

import asyncio

import pytest

from controld.replica.hub import CommittedBatch, Cursor, WatchHub
from controld.store.port import CompactedError, DeposedError


def hub(*, commits_max: int = 100, bytes_max: int = 10_000) -> WatchHub:
    return WatchHub(1, 10, commits_max=commits_max, bytes_max=bytes_max)


def publish(to: WatchHub, *revisions: int, size_bytes: int = 1) -> None:
    for revision in revisions:
        to.publish(CommittedBatch(revision, (), ()), size_bytes)


async def take(to: WatchHub, after: Cursor | None, count: int) -> list[int]:
    subscription = to.subscribe(after)
    return [(await anext(subscription)).revision for _ in range(count)]


async def test_resuming_gives_every_later_commit_once() -> None:
    h = hub()
    publish(h, 11, 12, 15, 20)
    for revision, expected in ((10, [11, 12, 15, 20]), (11, [12, 15, 20]), (13, [15, 20]), (15, [20])):
        assert await take(h, Cursor(1, revision), len(expected)) == expected
    assert h.cursor == Cursor(1, 20)


async def test_from_now_on_starts_behind_the_newest() -> None:
    h = hub()
    publish(h, 11)
    subscription = h.subscribe()
    publish(h, 12)
    assert (await anext(subscription)).revision == 12


@pytest.mark.parametrize("cursor", [Cursor(1, 9), Cursor(0, 12), Cursor(2, 12), Cursor(1, 13)])
def test_a_cursor_that_cannot_be_resumed_is_refused(cursor: Cursor) -> None:
    """Older than the window, of another history (a restore lies between), or ahead of this leader."""
    h = hub()
    publish(h, 11, 12)
    with pytest.raises(CompactedError):
        h.subscribe(cursor)


@pytest.mark.parametrize(("commits_max", "bytes_max"), [(3, 10_000), (100, 30)])
async def test_the_window_is_bounded_by_count_and_by_bytes(commits_max: int, bytes_max: int) -> None:
    h = hub(commits_max=commits_max, bytes_max=bytes_max)
    publish(h, *range(11, 21), size_bytes=10)
    with pytest.raises(CompactedError) as compacted:
        h.subscribe(Cursor(1, 16))
    assert compacted.value.revision == 17
    assert await take(h, Cursor(1, 17), 3) == [18, 19, 20]


async def test_a_slow_reader_is_cut_and_a_quick_one_is_not() -> None:
    h = hub(commits_max=3)
    slow = h.subscribe()
    quick = h.subscribe()
    seen: list[int] = []
    for revision in range(11, 31):
        publish(h, revision)
        seen.append((await anext(quick)).revision)
    assert seen == list(range(11, 31))
    with pytest.raises(CompactedError):
        await anext(slow)


async def test_a_commit_larger_than_the_window_reaches_nobody_in_silence() -> None:
    h = hub(bytes_max=30)
    subscription = h.subscribe()
    publish(h, 11, size_bytes=31)
    with pytest.raises(CompactedError):
        await anext(subscription)
    assert h.subscribe(Cursor(1, 11)) is not None


async def test_readers_that_wait_are_woken_by_a_commit_and_by_the_end() -> None:
    h = hub()
    subscriptions = [h.subscribe() for _ in range(3)]
    waiting = [asyncio.ensure_future(anext(s)) for s in subscriptions]
    await asyncio.sleep(0)
    publish(h, 11)
    assert [(await w).revision for w in waiting] == [11, 11, 11]
    waiting = [asyncio.ensure_future(anext(s)) for s in subscriptions]
    await asyncio.sleep(0)
    waiting.pop().cancel()
    h.close(DeposedError("over"))
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, DeposedError)
    with pytest.raises(DeposedError):
        h.subscribe()


async def test_what_was_committed_is_still_given_out_after_the_end() -> None:
    h = hub()
    subscription = h.subscribe()
    publish(h, 11)
    h.close(DeposedError("over"))
    assert (await anext(subscription)).revision == 11
    with pytest.raises(DeposedError):
        await anext(subscription)
