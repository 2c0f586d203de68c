"""The clock of the replica room. Waiting goes through asyncio alone, so a virtual event loop controls all of it."""

from __future__ import annotations

from typing import Protocol

from controld.core.commands import Now

SECOND_NS = 1_000_000_000


class Clock(Protocol):
    def boottime_ns(self) -> int:
        """CLOCK_BOOTTIME: times leases. It goes on while the machine is suspended."""
        ...

    def unix_ns(self) -> int:
        """Wall clock: for display and for windows of hours."""
        ...


def now(clock: Clock) -> Now:
    return Now(clock.boottime_ns(), clock.unix_ns())
