"""The warm copy of a replica that does not lead: loaded once, then kept up by the store's own order of commits.

It does not decide anything, and it never guesses: whatever does not fit (a revision that does not increase, history
that is gone, a record that cannot be read) drops the whole copy, and it is loaded anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from controld.core.state import State
from controld.replica.clock import Clock
from controld.replica.hub import CommittedBatch, WatchHub, told
from controld.replica.observe import Log, LogName
from controld.replica.settings import LeaderSettings
from controld.replica.sightings import Sightings
from controld.replica.states import restore_in_slices
from controld.store import codec
from controld.store.port import (
    Commit,
    CompactedError,
    Incumbent,
    LeaderSeen,
    RecordError,
    SharedStore,
    StoreError,
)


class _Unfit(Exception):
    """The copy is not what the store holds any more."""


class Standby:
    """`state` and `hub` are None until the copy is loaded. `sees`: it is loaded and goes along with the store.

    `on_leader` is called with each change of leadership, in its place among the commits; `on_sees` when `sees` changes;
    `on_loaded` after each load.
    """

    def __init__(
        self,
        *,
        store: SharedStore,
        clock: Clock,
        settings: LeaderSettings,
        sightings: Sightings,
        log: Log,
        on_leader: Callable[[Incumbent | None], None],
        on_sees: Callable[[], None],
        on_loaded: Callable[[], None],
    ) -> None:
        self.state: State | None = None
        self.hub: WatchHub | None = None
        self.sees = False
        self.incumbent: Incumbent | None = None
        self._sightings = sightings
        self._store = store
        self._clock = clock
        self._settings = settings
        self._log = log
        self._on_leader = on_leader
        self._on_sees = on_sees
        self._on_loaded = on_loaded
        self._moved = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                state = self.state or await self._load()
                self._set_sees(True)
                async with aclosing(self._store.follow(state.revision)) as items:
                    async for item in items:
                        self._take(state, item)
                why = "the stream ended"
            except (CompactedError, RecordError, _Unfit) as error:
                self._drop(error)
                why = str(error)
            except StoreError as error:
                why = str(error)
            if self.sees:
                self._log(LogName.STANDBY_CUT, error=why)
            self._set_sees(False)
            await asyncio.sleep(self._settings.follow_retry_seconds)

    async def reached(self, revision: int) -> State:
        """The copy, once it has everything up to `revision`."""
        while True:
            if self.sees and self.state is not None and self.state.revision >= revision:
                return self.state
            self._moved.clear()
            await self._moved.wait()

    async def _load(self) -> State:
        loaded = await self._store.load()
        state = await restore_in_slices(loaded)
        self._sightings.loaded(state, self._clock.boottime_ns())
        settings = self._settings
        self.hub = WatchHub(
            state.history, state.revision, commits_max=settings.watch_commits_max, bytes_max=settings.watch_bytes_max
        )
        self.state = state
        self._log(LogName.STANDBY_LOADED, revision=state.revision, records=len(loaded.records))
        self._see(loaded.incumbent)
        self._on_loaded()
        return state

    def _take(self, state: State, item: Commit | LeaderSeen) -> None:
        if item.revision <= state.revision:
            raise _Unfit(f"revision {item.revision} after {state.revision}")
        if isinstance(item, LeaderSeen):
            state.apply((), item.revision)
            self._see(item.incumbent)
        else:
            changes = tuple(map(codec.decode_change, item.changes))
            state.apply(changes, item.revision)
            self._sightings.committed(changes, item.revision, self._clock.boottime_ns())
            assert self.hub is not None
            size_bytes = sum(len(c.key) + len(c.value or b"") for c in item.changes)
            self.hub.publish(CommittedBatch(item.revision, changes, told(changes)), size_bytes)
        self._moved.set()

    def _see(self, incumbent: Incumbent | None) -> None:
        self.incumbent = incumbent
        self._on_leader(incumbent)

    def _set_sees(self, sees: bool) -> None:
        if sees is not self.sees:
            self.sees = sees
            self._moved.set()
            self._on_sees()

    def _drop(self, error: Exception) -> None:
        self._log(LogName.STANDBY_DROPPED, error=str(error))
        if self.hub is not None:
            self.hub.close(CompactedError(0 if self.state is None else self.state.revision))
        self.state, self.hub = None, None
