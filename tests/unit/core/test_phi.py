"""The failure detector: its sums against the plain definition, and when a silent node is suspect."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.core.spec import SECOND_NS
from controld.health.phi import (
    DEVIATION_MAX_NS,
    DEVIATION_MIN_NS,
    DEVIATIONS_AT_THRESHOLD,
    MEAN_MAX_NS,
    MEAN_MIN_NS,
    PAUSE_NS,
    SAMPLES_MAX,
    THRESHOLD,
    Arrivals,
    phi,
)


@given(st.lists(st.integers(0, 100 * SECOND_NS), min_size=1, max_size=3 * SAMPLES_MAX))
def test_the_sums_are_those_of_the_last_intervals(intervals_ns: list[int]) -> None:
    arrivals = Arrivals()
    for interval_ns in intervals_ns:
        arrivals.add(interval_ns)
    last = intervals_ns[-SAMPLES_MAX:]
    mean = min(max(statistics.fmean(last), MEAN_MIN_NS), MEAN_MAX_NS)
    deviation = min(max(statistics.pstdev(last), DEVIATION_MIN_NS), DEVIATION_MAX_NS)
    expected_ns = PAUSE_NS + mean + DEVIATIONS_AT_THRESHOLD * deviation
    assert arrivals.suspect_after_ns() == pytest.approx(expected_ns, abs=1_000)


def test_phi_reaches_the_threshold_where_it_was_computed_to() -> None:
    assert phi(DEVIATIONS_AT_THRESHOLD) == pytest.approx(THRESHOLD)
    assert phi(DEVIATIONS_AT_THRESHOLD - 0.01) < THRESHOLD


def test_beats_each_second_are_missed_within_the_time_the_design_names() -> None:
    arrivals = Arrivals()
    assert 4 * SECOND_NS < arrivals.suspect_after_ns() < 6 * SECOND_NS
    for _ in range(10):
        arrivals.add(SECOND_NS)
    assert 4 * SECOND_NS < arrivals.suspect_after_ns() < 5 * SECOND_NS
