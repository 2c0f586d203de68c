"""Small parts of the shell: waits between dials, work with a deadline, readings."""

from __future__ import annotations

import asyncio
import threading
from random import Random

import pytest

from noded.collect.model import Quality, Readings, Unit
from noded.collect.model import Sample as Reading
from noded.collect.runner import Latest
from noded.link.backoff import FIRST_SECONDS, LONGEST_SECONDS, Backoff
from noded.readings import ReadingsReport
from noded.worker import THREADS_MAX, Worker, WorkRefused, WorkTimeout

SECOND = 1_000_000_000


def test_waits_double_are_spread_and_bounded() -> None:
    backoff = Backoff(Random(1))
    waits = [backoff.next_seconds() for _ in range(40)]
    assert all(0 < wait <= LONGEST_SECONDS for wait in waits)
    assert waits[0] <= FIRST_SECONDS
    assert len(set(waits)) == 40
    backoff.reset()
    assert backoff.next_seconds() <= FIRST_SECONDS
    again = Backoff(Random(1))
    assert [again.next_seconds() for _ in range(40)] == waits


async def test_work_returns_or_raises_what_it_did() -> None:
    worker = Worker()

    def fail() -> None:
        raise OSError("disk")

    def late() -> None:
        raise TimeoutError("its own")

    assert await worker.run(lambda: 3, 30) == 3
    with pytest.raises(OSError, match="disk"):
        await worker.run(fail, 30)
    with pytest.raises(TimeoutError, match="its own"):
        await worker.run(late, 30)
    assert worker.running == 0


async def test_work_that_hangs_is_given_up_and_counted() -> None:
    worker, release = Worker(), threading.Event()
    with pytest.raises(WorkTimeout):
        await worker.run(release.wait, 0.01)
    assert worker.running == 1
    hanging = [asyncio.create_task(worker.run(release.wait, 30)) for _ in range(THREADS_MAX - 1)]
    await asyncio.sleep(0)
    with pytest.raises(WorkRefused):
        await worker.run(lambda: 3, 30)
    release.set()
    assert all(await asyncio.gather(*hanging))


def sweep(at_ns: int, busy: int, total: int, degrees: int) -> Latest[Readings]:
    samples = (
        Reading("cpu/busy", busy, Unit.TICKS, Quality.OK, at_ns),
        Reading("cpu/total", total, Unit.TICKS, Quality.OK, at_ns),
        Reading("disk/free", 5, Unit.BYTES, Quality.OK, at_ns),
        Reading("temperature/a", degrees, Unit.MILLIDEGREES, Quality.OK, at_ns),
    )
    return Latest(Readings(samples, at_ns), at_ns)


def test_readings_are_sent_with_their_age_and_the_most_important_first() -> None:
    report = ReadingsReport(10 * SECOND)
    report.samples(sweep(10 * SECOND, 100, 1000, 40_000), 10 * SECOND)
    found = report.samples(sweep(20 * SECOND, 150, 1100, 50_000), 21 * SECOND)
    by_name = {sample.name: sample for sample in found}
    assert [sample.name for sample in found[:3]] == ["temperature/a", "temperature_max", "cpu/usage"]
    assert (by_name["temperature_max"].value, by_name["temperature_max"].age_ms) == (50_000, 1000)
    assert by_name["cpu/usage"].value == 500
    assert found[-1].name == "disk/free"


def test_old_readings_are_unknown_not_still_true() -> None:
    report = ReadingsReport(10 * SECOND)
    found = report.samples(sweep(10 * SECOND, 100, 1000, 40_000), 60 * SECOND)
    by_name = {sample.name: sample for sample in found}
    assert (by_name["temperature_max"].value, by_name["temperature_max"].quality) == (None, "stale")
