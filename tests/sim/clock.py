"""The clocks of one host: BOOTTIME with its own start and rate, and a wall clock that may jump."""

from __future__ import annotations

from random import Random

from tests.sim.loop import PROCESS, SimLoop

DRIFT_PPM_MAX = 4_000
"""Two hosts apart by 0.8 %: within the 1 % that leases allow for (rho), far beyond any crystal."""
UNIX_START_NS = 1_700_000_000_000_000_000


class HostClock:
    """Also a `controld.replica.clock.Clock`."""

    def __init__(self, loop: SimLoop, rng: Random) -> None:
        self._loop = loop
        self._start_ns = rng.randrange(10**9, 10**15)
        self._ppm = rng.randrange(-DRIFT_PPM_MAX, DRIFT_PPM_MAX + 1)
        self.wall_offset_ns = 0

    def boottime_ns(self) -> int:
        return self._start_ns + self._loop.now_ns * (1_000_000 + self._ppm) // 1_000_000

    def unix_ns(self) -> int:
        return UNIX_START_NS + self._loop.now_ns + self.wall_offset_ns

    def seconds_until(self, at_ns: int) -> float:
        """True seconds until this host's clock reads `at_ns`; never negative."""
        return max(0, at_ns - self.boottime_ns()) * 1_000_000 / (1_000_000 + self._ppm) / 1e9

    def reboot(self, rng: Random) -> None:
        """BOOTTIME starts again."""
        self._start_ns = rng.randrange(10**9, 10**11) - self._loop.now_ns * (1_000_000 + self._ppm) // 1_000_000


def own_boottime_ns() -> int:
    """BOOTTIME of whoever asks: stands in for the function of that name in real code that takes no clock."""
    return PROCESS.get().host.clock.boottime_ns()
