"""Watch fan-out: committed batches to any number of readers, resumable by cursor.

The window of recent commits is the only buffer: a reader is a position in it. A reader that falls out of
the window is cut with CompactedError; none ever holds up the writer or costs memory of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from controld.core.model import Event, EventPack
from controld.core.state import Change
from controld.store.port import CompactedError


class Cursor(NamedTuple):
    """A place in the history of commits. A restore raises `history`, since it moves revisions back."""

    history: int
    revision: int


@dataclass(frozen=True, slots=True)
class CommittedBatch:
    """One commit. `changes` holds every change once a key, those of `events` too."""

    revision: int
    changes: tuple[Change, ...]
    events: tuple[Event, ...]


def told(changes: Iterable[Change]) -> tuple[Event, ...]:
    """The events that are put by changes as they are stored."""
    events: list[Event] = []
    for change in changes:
        if isinstance(change.record, EventPack):
            events += change.record.events
        elif isinstance(change.record, Event):
            events.append(change.record)
    return tuple(events)


class WatchHub:
    def __init__(self, history: int, revision: int, *, commits_max: int, bytes_max: int) -> None:
        self._history = history
        # The newest revision a reader may resume after without having missed a commit.
        self._floor = revision
        self._revision = revision
        self._commits_max = commits_max
        self._bytes_max = bytes_max
        self._window: deque[tuple[CommittedBatch, int]] = deque()
        self._window_bytes = 0
        # How many commits were ever dropped from the window: position of a reader minus this is an index.
        self._dropped = 0
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._closed: Exception | None = None

    @property
    def cursor(self) -> Cursor:
        """Where a reader stands who has just read the committed state."""
        return Cursor(self._history, self._revision)

    def publish(self, batch: CommittedBatch, size_bytes: int) -> None:
        self._window.append((batch, size_bytes))
        self._window_bytes += size_bytes
        self._revision = batch.revision
        while self._window and (len(self._window) > self._commits_max or self._window_bytes > self._bytes_max):
            oldest, size = self._window.popleft()
            self._window_bytes -= size
            self._floor = oldest.revision
            self._dropped += 1
        self._wake()

    def close(self, error: Exception) -> None:
        """End every subscription, and each later one, with `error`."""
        if self._closed is None:
            self._closed = error
            self._wake()

    def subscribe(self, after: Cursor | None = None) -> Subscription:
        """Batches after the cursor; None: from now on.

        Raises CompactedError for a cursor older than the window, of another history, or ahead of this leader.
        """
        if self._closed is not None:
            raise self._closed
        if after is None:
            return Subscription(self, self._dropped + len(self._window))
        if after.history != self._history or not self._floor <= after.revision <= self._revision:
            raise CompactedError(self._floor)
        skipped = sum(1 for batch, _ in self._window if batch.revision <= after.revision)
        return Subscription(self, self._dropped + skipped)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def take(self, position: int) -> CommittedBatch:
        """The batch at `position`, once there is one. Raises CompactedError when it was dropped already."""
        while True:
            index = position - self._dropped
            if index < 0:
                raise CompactedError(self._floor)
            if index < len(self._window):
                return self._window[index][0]
            if self._closed is not None:
                raise self._closed
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[future] = None
            try:
                await future
            finally:
                self._waiting.pop(future, None)


class Subscription(AsyncIterator[CommittedBatch]):
    """An endless iterator of batches in order, without gaps."""

    def __init__(self, hub: WatchHub, position: int) -> None:
        self._hub = hub
        self._position = position

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> CommittedBatch:
        batch = await self._hub.take(self._position)
        self._position += 1
        return batch
