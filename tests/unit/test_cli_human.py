"""Numbers and times for people."""

from __future__ import annotations

import pytest

from virial.cli import human

GIB = 1 << 30


@pytest.mark.parametrize(
    ("value_bytes", "text"),
    [
        (0, "0B"),
        (512, "512B"),
        (1 << 20, "1MiB"),
        (80 * GIB, "80GiB"),
        (33_567_891_456, "31.3GiB"),
        (3_325_488, "3.2MiB"),
    ],
)
def test_sizes_are_exact_where_that_is_short(value_bytes: int, text: str) -> None:
    assert human.size(value_bytes) == text


@pytest.mark.parametrize(
    ("value_ns", "text"),
    [
        (0, "0ms"),
        (999_999_999, "999ms"),
        (1_000_000_000, "1s"),
        (61 * 10**9, "1m1s"),
        (3_600 * 10**9, "1h"),
        (90_061 * 10**9, "1d1h"),
        (86_405 * 10**9, "1d"),
    ],
)
def test_durations_have_their_two_largest_parts(value_ns: int, text: str) -> None:
    assert human.duration(value_ns) == text


@pytest.mark.parametrize("unit", ["bytes", "millidegrees_celsius", "count", "flag", "thousandths", "ns", "ticks", ""])
def test_what_is_not_known_is_unknown_and_never_zero(unit: str) -> None:
    assert human.quantity(None, unit) == "unknown"
    assert human.quantity(0, unit) != "unknown"


def test_readings_have_their_units() -> None:
    assert human.quantity(45_500, "millidegrees_celsius") == "45.5C"
    assert human.quantity(-1_000, "millidegrees_celsius") == "-1.0C"
    assert human.quantity(1, "flag") == "yes"
    assert human.quantity(12_500_000_000, "bytes_per_second") == "12.5GB/s"
    assert human.quantity(7, "ticks") == "7 ticks"
    assert human.quantity(60_942_890, "ns") == "60ms"
    assert human.quantity(890, "ns") == "890ns"


def test_a_moment_that_never_was_is_unknown() -> None:
    assert human.moment(0) == "unknown"
    assert human.age(0, 10**18) == "unknown"
    assert human.age(2 * 10**18, 10**18) == "0ms"  # the controller's clock is ahead of ours
