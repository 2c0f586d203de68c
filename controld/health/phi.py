"""Phi accrual failure detector.

phi = -log10(P(a beat comes later than this)), by the logistic approximation of the normal distribution that
Akka uses (Hayashibara et al., "The phi accrual failure detector", SRDS 2004): with y = (elapsed - mean) / deviation,
P = 1 / (1 + exp(y * (1.5976 + 0.070566 * y^2))). A node is suspect at phi 8 after a pause of 3 s: with beats each
second, 4.5 to 5.5 s after the last one. Since phi only grows with time, the moment it is reached is known beforehand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from controld.core.spec import SECOND_NS

THRESHOLD: Final = 8.0
PAUSE_NS: Final = 3 * SECOND_NS
SAMPLES_MAX: Final = 100
# Beats come early when something changes: without a floor those would make the detector hasty. The ceilings bound
# suspicion after the last beat, whatever jitter came before.
MEAN_MIN_NS: Final = SECOND_NS
MEAN_MAX_NS: Final = 1_200_000_000
DEVIATION_MIN_NS: Final = 100_000_000
DEVIATION_MAX_NS: Final = 250_000_000


def phi(deviations: float) -> float:
    """phi of a beat that is so many deviations later than the mean; 0 for one that is not late."""
    if deviations <= 0:
        return 0.0
    exponent = deviations * (1.5976 + 0.070566 * deviations * deviations)
    return math.log1p(math.exp(min(exponent, 700.0))) / math.log(10)


def _deviations_at(threshold: float) -> float:
    """The lateness, in deviations, at which phi reaches `threshold`: by bisection, since phi only grows."""
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if phi(middle) < threshold else (low, middle)
    return high


DEVIATIONS_AT_THRESHOLD: Final = _deviations_at(THRESHOLD)


@dataclass(slots=True)
class Arrivals:
    """Intervals between the last beats of one session."""

    intervals_ns: list[int] = field(default_factory=list[int])

    def add(self, interval_ns: int) -> None:
        self.intervals_ns.append(interval_ns)
        del self.intervals_ns[:-SAMPLES_MAX]

    def suspect_after_ns(self) -> int:
        """Silence after the last beat at which phi reaches the threshold, the pause included."""
        mean, deviation = self._moments()
        return int(PAUSE_NS + mean + DEVIATIONS_AT_THRESHOLD * deviation)

    def _moments(self) -> tuple[float, float]:
        if not self.intervals_ns:
            return MEAN_MIN_NS, DEVIATION_MAX_NS
        mean = sum(self.intervals_ns) / len(self.intervals_ns)
        variance = sum((i - mean) ** 2 for i in self.intervals_ns) / len(self.intervals_ns)
        return (
            min(max(mean, MEAN_MIN_NS), MEAN_MAX_NS),
            min(max(math.sqrt(variance), DEVIATION_MIN_NS), DEVIATION_MAX_NS),
        )
