"""One watch: the state first, a marker, then every change; resumed from a cursor it starts with the changes.

A message's state is the newest committed one and may run ahead of its cursor; resuming from the cursor then shows the
same state again, and never skips one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol, TypeVar

from controld.replica.hub import CommittedBatch, Cursor
from controld.service.backend import LeaderPort

K = TypeVar("K")
M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)

# A reader of one quiet job must not fall out of the window while others are busy: it gets a fresh cursor this often.
MARKER_EACH_COMMITS = 500


class Feed(Protocol[K, M_co]):
    def everything(self) -> Sequence[K]:
        """Everything that exists, in a stable order."""
        ...

    def touched(self, batch: CommittedBatch) -> Sequence[K]:
        """What a commit changed, each once."""
        ...

    def message(self, key: K, cursor: Cursor | None) -> M_co | None:
        """Its present state, or that it is gone; None when the reader need not know."""
        ...

    def marker(self, cursor: Cursor) -> M_co: ...


async def watch(leader: LeaderPort, after: Cursor | None, feed: Feed[K, M]) -> AsyncGenerator[M]:
    """Endless. Raises CompactedError when the cursor, or a slow reader, is behind what is kept."""
    await leader.barrier()
    start = leader.hub.cursor
    subscription = leader.hub.subscribe(start if after is None else after)
    cursor = start if after is None else after
    if after is None:
        for key in feed.everything():
            message = feed.message(key, None)
            if message is not None:
                yield message
    synced = after is None or after.revision >= start.revision
    if synced:
        yield feed.marker(cursor)
    quiet_commits = 0
    async for batch in subscription:
        here = Cursor(start.history, batch.revision)
        found = feed.touched(batch)
        quiet_commits += 1
        for index, key in enumerate(found):
            # Only the last message of a commit carries its cursor: resumed from an earlier one, the rest comes again.
            message = feed.message(key, here if index == len(found) - 1 else cursor)
            if message is not None:
                quiet_commits = 0
                yield message
        cursor = here
        if (not synced and batch.revision >= start.revision) or quiet_commits >= MARKER_EACH_COMMITS:
            synced = True
            quiet_commits = 0
            yield feed.marker(cursor)
