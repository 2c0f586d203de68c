"""Phi accrual failure detector.

phi = -log10(P(a beat comes later than this)), by the logistic approximation of the normal distribution that
Akka uses (Hayashibara et al., "The phi accrual failure detector", SRDS 2004). With beats each second, phi 8
and a pause of 3 s are reached 4 to 6 s after the last beat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from controld.core.spec import SECOND_NS

THRESHOLD = 8.0
PAUSE_NS = 3 * SECOND_NS
SAMPLES_MAX = 100
# Beats come early when something changes: without a floor those would make the detector hasty. The ceilings bound
# suspicion at 6 s after a beat each second, whatever jitter came before.
MEAN_MIN_NS = SECOND_NS
MEAN_MAX_NS = 1_200_000_000
DEVIATION_MIN_NS = 100_000_000
DEVIATION_MAX_NS = 300_000_000


@dataclass(slots=True)
class Arrivals:
    """Intervals between the last beats of one session."""

    intervals_ns: list[int] = field(default_factory=list[int])

    def add(self, interval_ns: int) -> None:
        self.intervals_ns.append(interval_ns)
        del self.intervals_ns[:-SAMPLES_MAX]

    def phi(self, elapsed_ns: int) -> float:
        """How surely the next beat will not come, `elapsed_ns` after the last one."""
        mean, deviation = self._moments()
        y = (elapsed_ns - PAUSE_NS - mean) / deviation
        exponent = -y * (1.5976 + 0.070566 * y * y)
        # exp overflows far on the healthy side, where phi is 0 anyhow.
        if exponent > 700:
            return 0.0
        tail = math.exp(exponent)
        return -math.log10(tail / (1 + tail)) if y > 0 and tail > 0 else (300.0 if y > 0 else 0.0)

    def suspect(self, elapsed_ns: int) -> bool:
        return elapsed_ns > PAUSE_NS and self.phi(elapsed_ns) >= THRESHOLD

    def _moments(self) -> tuple[float, float]:
        if not self.intervals_ns:
            return MEAN_MIN_NS, DEVIATION_MAX_NS
        mean = sum(self.intervals_ns) / len(self.intervals_ns)
        variance = sum((i - mean) ** 2 for i in self.intervals_ns) / len(self.intervals_ns)
        return (
            min(max(mean, MEAN_MIN_NS), MEAN_MAX_NS),
            min(max(math.sqrt(variance), DEVIATION_MIN_NS), DEVIATION_MAX_NS),
        )
