"""Notices that the leader's own loop stood still: then missing beats say nothing about the agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from controld.core.state import State
from controld.health.view import View
from controld.replica.clock import SECOND_NS, Clock
from controld.replica.observe import Log, LogName, Observer
from controld.replica.settings import LeaderSettings

# A leader that stalled for more than this part of a lease re-arms instead of expiring (design: leases).
STALL_FRACTION = 8


class StallWatch:
    """`check` is called by a pulse and before every tick, since after a stall either may come first."""

    def __init__(
        self,
        *,
        clock: Clock,
        settings: LeaderSettings,
        view: View,
        state: Callable[[], State],
        observer: Observer,
        log: Log,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._view = view
        self._state = state
        self._observer = observer
        self._log = log
        self._pulse_ns = int(settings.pulse_interval_seconds * SECOND_NS)
        self._last_ns = clock.boottime_ns()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.pulse_interval_seconds)
            self.check()

    def check(self) -> None:
        """Time every session anew when the loop stood still for too long since the last check."""
        now_ns = self._clock.boottime_ns()
        elapsed_ns = now_ns - self._last_ns
        self._last_ns = now_ns
        late_ns = elapsed_ns - self._pulse_ns
        if late_ns <= 0:
            return
        self._observer.stalled(late_ns / SECOND_NS)
        # Most of the time nothing is late, so the shortest lease is looked for only when something is.
        if late_ns > self._shortest_fence_after_ns() // STALL_FRACTION:
            self._log(LogName.LEADER_STALLED, stall_ms=late_ns // 1_000_000)
            self._view.rearm(now_ns)

    def _shortest_fence_after_ns(self) -> int:
        running = (j.spec.fence_after_ns for j in self._state().jobs.values() if not j.state.ended)
        return min(running, default=self._settings.limits.session_fence_after_ns)
