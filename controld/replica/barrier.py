"""Leadership barriers: one under way serves everything that waited before it started.

Renewals wait for the periodic one (250 ms); readers ask for one at once and share it. What arrives while one is
under way waits for the next: only a barrier that STARTED after a receipt proves that this leader was still the
leader when it took the renewal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from controld.replica.clock import Clock
from controld.replica.observe import Log, LogName
from controld.replica.settings import LeaderSettings
from controld.store.port import DeposedError, Leadership, MemberLostError, OutcomeUnknownError, Store, StoreError


class Attendant(Protocol):
    """Who has something to be proved by each barrier: what stands at `begin`, and nothing later, by `proved`."""

    def barrier_began(self) -> None: ...

    def barrier_proved(self) -> None: ...

    def barrier_failed(self) -> None: ...


class Barrier:
    """`proved_ns`: a BOOTTIME at or after which this leadership was certainly in force; the newest that is known.
    `hopeless`: the store's own end was not there at the last attempt, so that the next will prove nothing either."""

    def __init__(
        self,
        *,
        store: Store,
        leadership: Leadership,
        clock: Clock,
        proved_ns: int,
        settings: LeaderSettings,
        log: Log,
        on_lost: Callable[[StoreError], None],
    ) -> None:
        self.proved_ns = proved_ns
        self.hopeless = False
        self._store = store
        self._clock = clock
        self._leadership = leadership
        self._settings = settings
        self._log = log
        self._on_lost = on_lost
        self._attendant: Attendant | None = None
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._demand = asyncio.Event()
        self._closed: StoreError | None = None

    def attend(self, attendant: Attendant) -> None:
        self._attendant = attendant

    async def wait(self) -> None:
        """Return when a barrier that started after this call has succeeded. Raises StoreError."""
        if self._closed is not None:
            raise self._closed
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        self._demand.set()
        try:
            await future
        finally:
            self._waiting.pop(future, None)

    def close(self, error: StoreError) -> None:
        if self._closed is None:
            self._closed = error
        self._fail(self._swap(), self._closed)

    async def run(self) -> None:
        """Until closed."""
        while self._closed is None:
            await self._demanded(self._settings.barrier_interval_seconds)
            if self._closed is None and not await self._once():
                await asyncio.sleep(self._settings.barrier_retry_seconds)

    async def _demanded(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, self._demand.set)
        try:
            await self._demand.wait()
        finally:
            timer.cancel()
        self._demand.clear()

    async def _once(self) -> bool:
        waiting = self._swap()
        if self._attendant is not None:
            self._attendant.barrier_began()
        began_ns = self._clock.boottime_ns()
        try:
            await self._store.barrier(self._leadership)
        except asyncio.CancelledError:
            self._fail(waiting, self._closed or OutcomeUnknownError("the controller stopped"))
            raise
        except Exception as error:  # noqa: BLE001 - a store that failed in any way has proved nothing
            reason = error if isinstance(error, StoreError) else OutcomeUnknownError(f"the store failed: {error!r}")
            self.hopeless = isinstance(error, MemberLostError)
            self._log(LogName.BARRIER_FAILED, reason=reason.reason, error=str(reason))
            if self._attendant is not None:
                self._attendant.barrier_failed()
            self._fail(waiting, reason)
            if isinstance(reason, DeposedError):
                self._on_lost(reason)
            return False
        if self._closed is not None:
            self._fail(waiting, self._closed)
            return False
        self.proved_ns, self.hopeless = began_ns, False
        for future in waiting:
            if not future.done():
                future.set_result(None)
        if self._attendant is not None:
            self._attendant.barrier_proved()
        return True

    def _swap(self) -> dict[asyncio.Future[None], None]:
        waiting, self._waiting = self._waiting, {}
        return waiting

    @staticmethod
    def _fail(waiting: dict[asyncio.Future[None], None], error: StoreError) -> None:
        for future in waiting:
            if not future.done():
                future.set_exception(error)
