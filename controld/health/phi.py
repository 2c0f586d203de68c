"""Phi accrual failure detector.

phi = -log10(P(a beat comes later than this)), by the logistic approximation of the normal distribution that
Akka uses (Hayashibara et al., "The phi accrual failure detector", SRDS 2004): with y = (elapsed - mean) / deviation,
P = 1 / (1 + exp(y * (1.5976 + 0.070566 * y^2))). A node is suspect at phi 8 after a pause of 3 s: with beats each
second, 4.5 to 5.5 s after the last one. Since phi only grows with time, the moment it is reached is known beforehand.
"""

from __future__ import annotations

import math
from collections import deque
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


PATIENCE_MIN_NS: Final = int(PAUSE_NS + MEAN_MIN_NS + DEVIATIONS_AT_THRESHOLD * DEVIATION_MIN_NS)
"""No session is suspected after a shorter silence, whatever its beats were like."""


@dataclass(slots=True)
class Arrivals:
    """Intervals between the last beats of one session.

    Their moments are kept as sums, of integers and so without drift: every tick asks every session, and walking over
    a hundred intervals of each of 10,000 would take longer than the rest of the tick.
    """

    _intervals_ns: deque[int] = field(default_factory=deque[int])
    _sum_ns: int = 0
    _sum_of_squares: int = 0

    def add(self, interval_ns: int) -> None:
        self._intervals_ns.append(interval_ns)
        self._sum_ns += interval_ns
        self._sum_of_squares += interval_ns * interval_ns
        if len(self._intervals_ns) > SAMPLES_MAX:
            oldest_ns = self._intervals_ns.popleft()
            self._sum_ns -= oldest_ns
            self._sum_of_squares -= oldest_ns * oldest_ns

    def suspect_after_ns(self) -> int:
        """Silence after the last beat at which phi reaches the threshold, the pause included."""
        mean, deviation = self._moments()
        return int(PAUSE_NS + mean + DEVIATIONS_AT_THRESHOLD * deviation)

    def _moments(self) -> tuple[float, float]:
        """(mean, standard deviation), each within its bounds."""
        count = len(self._intervals_ns)
        if not count:
            return MEAN_MIN_NS, DEVIATION_MAX_NS
        variance = (count * self._sum_of_squares - self._sum_ns * self._sum_ns) / (count * count)
        return (
            min(max(self._sum_ns / count, MEAN_MIN_NS), MEAN_MAX_NS),
            min(max(math.sqrt(variance), DEVIATION_MIN_NS), DEVIATION_MAX_NS),
        )
