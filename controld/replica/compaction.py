"""Bounds the store's log of commits: revisions older than the cursor window are compacted away."""

from __future__ import annotations

import asyncio
from collections import deque

from controld.replica.clock import SECOND_NS
from controld.replica.observe import LogName
from controld.replica.office import Office
from controld.store.port import Store, StoreError


class Compaction:
    """A cursor stays good for at least `cursor_window_seconds`: what is compacted was old when the window began."""

    def __init__(self, office: Office, store: Store) -> None:
        self._office = office
        self._store = store
        self._marks: deque[tuple[int, int]] = deque()

    async def run(self) -> None:
        settings = self._office.settings
        while True:
            await asyncio.sleep(settings.compact_interval_seconds)
            revision = self._due(int(settings.cursor_window_seconds * SECOND_NS))
            if revision:
                await self._compact(revision)

    def _due(self, window_ns: int) -> int:
        """The newest revision that was there a whole window ago; 0 when none was."""
        now_ns = self._office.clock.boottime_ns()
        self._marks.append((now_ns, self._office.state.revision))
        revision = 0
        while now_ns - self._marks[0][0] >= window_ns:
            _, revision = self._marks.popleft()
            if not self._marks:
                break
        return revision

    async def _compact(self, revision: int) -> None:
        try:
            await self._store.compact(revision)
        except StoreError as error:
            self._office.log(LogName.COMPACTION_FAILED, revision=revision, reason=error.reason, error=str(error))
