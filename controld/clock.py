"""The machine's clocks."""

from __future__ import annotations

import time


class SystemClock:
    """CLOCK_BOOTTIME goes on while the machine is suspended, so a lease that ran out in its sleep has run out."""

    def boottime_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def unix_ns(self) -> int:
        return time.time_ns()
