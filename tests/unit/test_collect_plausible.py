"""Which temperatures are believed. Rows D1 and D2: nonsense is dropped and counted, a "no value" mark is no value."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from noded.collect.files import Number
from noded.collect.model import Quality, Readings, Sample, Unit
from noded.collect.plausible import temperature_degrees, temperature_millidegrees
from noded.collect.temperatures import hottest

Judge = Callable[[int], Number]

# As reported: degrees that a vendor library gave for a GPU.
NONSENSE_DEGREES = (345, 82_505, 200_000, 644_245_923, -41, -128, 126)
BLANK_DEGREES = (
    9_223_372_036_854_775_794,  # DCGM_INT64_NOT_SUPPORTED
    9_223_372_036_854_775_792,  # DCGM_INT64_BLANK
    9_223_372_036_854_776_000,  # the same through a double, as printed
    2**63,
    2_147_483_632,  # DCGM_INT32_BLANK
    2_147_483_634,
    0,
)


def _keeps_d1(judge: Judge) -> bool:
    return all(judge(value) == Number(None, Quality.IMPLAUSIBLE) for value in NONSENSE_DEGREES)


def _keeps_d2(judge: Judge) -> bool:
    return all(judge(value) == Number(None, Quality.ABSENT) for value in BLANK_DEGREES)


@pytest.mark.row("D1")
def test_case_d1_an_implausible_temperature_is_dropped() -> None:
    assert _keeps_d1(temperature_degrees)
    assert temperature_degrees(85) == Number(85_000, Quality.OK)
    assert temperature_degrees(125) == Number(125_000, Quality.OK)


@pytest.mark.row("D2")
def test_case_d2_a_blank_mark_is_an_absent_value() -> None:
    assert _keeps_d2(temperature_degrees)


def passes_everything(value: int) -> Number:
    return Number(value * 1_000, Quality.OK)


def clamps_to_the_range(value: int) -> Number:
    return Number(min(max(value * 1_000, -40_000), 125_000), Quality.OK)


def filters_one_blank_only(value: int) -> Number:
    return Number(None, Quality.ABSENT) if value == 9_223_372_036_854_775_794 else temperature_degrees(value % 2**31)


@pytest.mark.row("D1")
@pytest.mark.parametrize("defect", [passes_everything, clamps_to_the_range])
def test_case_d1_catches_a_seeded_defect(defect: Judge) -> None:
    assert not _keeps_d1(defect)


@pytest.mark.row("D2")
@pytest.mark.parametrize("defect", [passes_everything, filters_one_blank_only])
def test_case_d2_catches_a_seeded_defect(defect: Judge) -> None:
    assert not _keeps_d2(defect)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (49_925, Number(49_925, Quality.OK)),
        (-39_999, Number(-39_999, Quality.OK)),
        (0, Number(None, Quality.ABSENT)),
        (-1, Number(None, Quality.ABSENT)),
        (-1_000, Number(None, Quality.ABSENT)),
        (-273_150, Number(None, Quality.ABSENT)),
        (-44_000, Number(None, Quality.IMPLAUSIBLE)),
        (65_261_850, Number(None, Quality.IMPLAUSIBLE)),
        (127_000, Number(None, Quality.IMPLAUSIBLE)),
    ],
)
def test_kernel_sensors(raw: int, expected: Number) -> None:
    assert temperature_millidegrees(Number(raw, Quality.OK)) == expected


@pytest.mark.parametrize("quality", [Quality.ABSENT, Quality.DENIED, Quality.IMPLAUSIBLE])
def test_why_there_is_no_value_is_kept(quality: Quality) -> None:
    assert temperature_millidegrees(Number(None, quality)) == Number(None, quality)


def sensor(name: str, value: int | None, quality: Quality) -> Sample:
    return Sample(f"temperature/{name}", value, Unit.MILLIDEGREES, quality, 7)


def test_an_unknown_sensor_is_never_the_coolest_nor_the_hottest() -> None:
    readings = Readings(
        (sensor("a", 40_000, Quality.OK), sensor("b", None, Quality.IMPLAUSIBLE), sensor("c", 50_000, Quality.OK)), 7
    )
    assert hottest(readings) == Sample("temperature_max", 50_000, Unit.MILLIDEGREES, Quality.OK, 7)


def test_a_host_without_a_known_temperature_is_unknown() -> None:
    assert hottest(Readings((), 7)).quality is Quality.ABSENT
    assert hottest(Readings((sensor("a", None, Quality.STALE),), 7)) == Sample(
        "temperature_max", None, Unit.MILLIDEGREES, Quality.STALE, 7
    )


@pytest.mark.parametrize(("value", "quality"), [(None, Quality.OK), (0, Quality.ABSENT), (5, Quality.STALE)])
def test_a_sample_without_a_value_cannot_carry_one(value: int | None, quality: Quality) -> None:
    with pytest.raises(ValueError, match="does not go with quality"):
        sensor("a", value, quality)
