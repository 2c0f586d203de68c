"""The collection thread: a read that hangs costs readings, and nothing else."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from noded.collect.model import Quality, Readings, Sample, Unit
from noded.collect.runner import STALE_PERIODS, CollectRunner, Latest, aged

PERIOD_NS = 5_000_000_000
HANG_GUARD_SECONDS = 30.0


def warm(at_ns: int) -> Readings:
    return Readings((Sample("temperature/x", 40_000, Unit.MILLIDEGREES, Quality.OK, at_ns),), at_ns)


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


def test_a_sweep_replaces_the_value_and_its_time() -> None:
    clock = Clock()
    runner = CollectRunner("readings", warm, PERIOD_NS, clock)
    assert runner.latest() == Latest()
    runner.sweep()
    clock.now_ns = 9_000
    runner.sweep()
    assert runner.latest() == Latest(warm(9_000), 9_000)
    assert runner.latest().age_ns(9_500) == 500


def test_what_a_sweep_raises_is_counted_and_the_old_value_stays() -> None:
    clock = Clock()
    broken = False

    def collect(now_ns: int) -> Readings:
        if broken:
            raise ZeroDivisionError("a defect")
        return warm(now_ns)

    runner = CollectRunner("readings", collect, PERIOD_NS, clock)
    runner.sweep()
    broken = True
    clock.now_ns += 7
    runner.sweep()
    assert runner.latest() == Latest(warm(1_000), 1_000, failures=1, last_failure="ZeroDivisionError: a defect")


def test_a_hung_sweep_blocks_nobody_and_no_second_one_is_started() -> None:
    clock = Clock()
    hung, release = threading.Event(), threading.Event()
    begun: list[int] = []

    def collect(now_ns: int) -> Readings:
        begun.append(now_ns)
        hung.set()
        release.wait(HANG_GUARD_SECONDS)
        return warm(now_ns)

    runner = CollectRunner("readings", collect, period_ns=1, clock=clock)
    runner.start()
    assert hung.wait(HANG_GUARD_SECONDS)
    runner.request()
    assert runner.latest() == Latest(running_since_ns=1_000)
    assert not runner.latest().overdue(1_000 + PERIOD_NS, PERIOD_NS)
    assert runner.latest().overdue(1_001 + PERIOD_NS, PERIOD_NS)
    assert not runner.stop(timeout_seconds=0.0)
    assert begun == [1_000]
    release.set()
    assert runner.stop(timeout_seconds=HANG_GUARD_SECONDS)
    assert begun == [1_000]


def test_the_thread_sweeps_again_on_request() -> None:
    swept = threading.Semaphore(0)

    def collect(now_ns: int) -> Readings:
        swept.release()
        return warm(now_ns)

    runner = CollectRunner("readings", collect, period_ns=3_600 * 10**9, clock=Clock())
    runner.start()
    for _ in range(3):
        assert swept.acquire(timeout=HANG_GUARD_SECONDS)
        runner.request()
    assert runner.stop(timeout_seconds=HANG_GUARD_SECONDS)


def test_stopping_before_starting_is_allowed() -> None:
    assert CollectRunner("readings", warm, PERIOD_NS, Clock()).stop()


def test_a_period_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="period_ns"):
        CollectRunner("readings", warm, 0, Clock())


def test_readings_are_believed_for_three_periods() -> None:
    latest = Latest(warm(0), 0)
    limit_ns = STALE_PERIODS * PERIOD_NS
    age = Sample("collector/readings/age", limit_ns, Unit.NANOSECONDS, Quality.OK, limit_ns)
    assert aged(latest, "readings", PERIOD_NS, limit_ns) == Readings((age, *warm(0).samples), 0)


def test_older_readings_are_unknown_not_still_true() -> None:
    now_ns = STALE_PERIODS * PERIOD_NS + 1
    readings = aged(Latest(warm(0), 0), "readings", PERIOD_NS, now_ns)
    (before,) = warm(0).samples
    assert readings.get("temperature/x") == replace(before, value=None, quality=Quality.STALE)
    assert readings.get("collector/readings/age") == Sample(
        "collector/readings/age", now_ns, Unit.NANOSECONDS, Quality.OK, now_ns
    )


def test_before_the_first_sweep_nothing_is_known() -> None:
    assert aged(Latest(), "readings", PERIOD_NS, 5).samples == (
        Sample("collector/readings/age", None, Unit.NANOSECONDS, Quality.ABSENT, 5),
    )
