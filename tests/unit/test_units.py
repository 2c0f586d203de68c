"""The one grammar of quantities: what it takes, what it refuses, and what it says then."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

from virialpb import units
from virialpb.units import QuantityError

Parser = Callable[[object], int]


@pytest.mark.parametrize(
    ("parse", "value", "expected"),
    [
        (units.parse_bytes, "80GiB", 80 * 2**30),
        (units.parse_bytes, "1.5TB", 1_500_000_000_000),
        (units.parse_bytes, "1B", 1),
        (units.parse_bytes, "0.5KiB", 512),
        (units.parse_bytes_per_second, "1.2TB/s", 1_200_000_000_000),
        (units.parse_bytes_per_second, "400Gb/s", 50_000_000_000),
        (units.parse_bytes_per_second, "8Kib/s", 1024),
        (units.parse_duration_ns, "150ns", 150),
        (units.parse_duration_ns, "10us", 10_000),
        (units.parse_duration_ns, "5ms", 5_000_000),
        (units.parse_duration_ns, "60s", 60_000_000_000),
        (units.parse_duration_ns, "1h30m", 5_400_000_000_000),
        (units.parse_duration_ns, "1.5h", 5_400_000_000_000),
        (units.parse_duration_ns, "2d", 172_800_000_000_000),
        (units.parse_duration_ns, "1d1h1m1s1ms1us1ns", 90_061_001_001_001),
        (units.parse_cpu_millis, "300m", 300),
        (units.parse_cpu_millis, "1.5", 1500),
        (units.parse_cpu_millis, 1.5, 1500),
        (units.parse_cpu_millis, 2, 2000),
        (units.parse_share_thousandths, "0.25", 250),
        (units.parse_share_thousandths, 0.1, 100),
        (units.parse_share_thousandths, "250m", 250),
        (units.parse_share_thousandths, 1, 1000),
        (units.parse_count, 8, 8),
        (units.parse_count, "8", 8),
        (units.parse_power_milliwatts, "700W", 700_000),
        (units.parse_power_milliwatts, "1.2kW", 1_200_000),
        (units.parse_temperature_millidegrees, "85.5C", 85_500),
        (units.parse_temperature_millidegrees, "-40C", -40_000),
        (units.parse_temperature_millidegrees, "0C", 0),
    ],
)
def test_takes_the_grammar(parse: Parser, value: object, expected: int) -> None:
    assert parse(value) == expected


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (units.parse_bytes_per_second, "1.2TBs", "unknown unit 'TBs' in '1.2TBs': did you mean 'TB/s'?"),
        (units.parse_bytes_per_second, "400Gbps", "unknown unit 'Gbps' in '400Gbps': did you mean 'Gb/s'?"),
        (units.parse_bytes_per_second, "1GB", "unknown unit 'GB' in '1GB': did you mean 'GB/s'?"),
        (units.parse_bytes, "80gib", "unknown unit 'gib' in '80gib': did you mean 'GiB'?"),
        (units.parse_bytes, "80Gi", "unknown unit 'Gi' in '80Gi': did you mean 'GiB'?"),
        (units.parse_bytes, "80", "no unit in '80': did you mean '80B'?"),
        (units.parse_bytes, 80, "no unit in '80': did you mean '80B'?"),
        (units.parse_bytes, "80 GiB", "a space in '80 GiB': did you mean '80GiB'?"),
        (units.parse_duration_ns, "60 sec", "a space in '60 sec': did you mean '60s'?"),
        (units.parse_duration_ns, "1h 30m", "a space in '1h 30m': did you mean '1h30m'?"),
        (units.parse_share_thousandths, "5 %", "a space in '5 %': did you mean '0.05'?"),
        (units.parse_bytes, "5 x y", "a space in '5 x y'"),
        (units.parse_bytes, "1.5B", "'1.5B' is 1.5 bytes, which is not a whole number"),
        (units.parse_bytes, None, "expected a size such as '80GiB', got nothing"),
        (units.parse_bytes, True, "expected a size such as '80GiB', got a bool"),
        (units.parse_bytes, 10**400, "the number is too large for a size"),
        (units.parse_power_milliwatts, 700, "no unit in '700': did you mean '700W'?"),
        (units.parse_power_milliwatts, "700w", "unknown unit 'w' in '700w': did you mean 'W'?"),
        (units.parse_share_thousandths, "25%", "unknown unit '%' in '25%': did you mean '0.25'?"),
        (units.parse_share_thousandths, 2, "'2' is more than 1"),
        (units.parse_cpu_millis, "2cores", "unknown unit 'cores' in '2cores': did you mean '2'?"),
        (units.parse_cpu_millis, 0.0001, "'0.0001' is 0.1 thousandths of a core, which is not a whole number"),
        (units.parse_count, 8.5, "'8.5' is 8.5 whole units, which is not a whole number"),
        (units.parse_temperature_millidegrees, "-300C", "'-300C' is below absolute zero"),
    ],
)
def test_refuses_and_says_what_is_right(parse: Parser, value: object, message: str) -> None:
    with pytest.raises(QuantityError) as caught:
        parse(value)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "+1GiB",
        "-1GiB",
        "1e3B",
        "1_000B",
        "1,5GB",
        ".5GB",
        "1.GB",
        "0x10B",
        "\u0663B",
        "1GiB\n",
        "nan",
        "inf",
    ],
)
def test_refuses_odd_numbers(text: str) -> None:
    with pytest.raises(QuantityError):
        units.parse_bytes(text)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300, -1.0])
def test_refuses_floats_that_are_no_amount(value: float) -> None:
    with pytest.raises(QuantityError):
        units.parse_cpu_millis(value)


def test_a_message_quotes_no_more_than_a_line() -> None:
    with pytest.raises(QuantityError) as caught:
        units.parse_bytes("9" * 1_000_000)
    assert len(str(caught.value)) < 200


def test_an_integer_python_refuses_to_print_is_refused_all_the_same() -> None:
    with pytest.raises(QuantityError):
        units.parse_cpu_millis(10**5000)


def test_zero_only_where_allowed() -> None:
    for text in ("0", "0s", "0d"):
        assert units.parse_duration_ns(text, allow_zero=True) == 0
        with pytest.raises(QuantityError):
            units.parse_duration_ns(text)


def _catches_h11(parse: Parser) -> bool:
    """Whether a time parser keeps row H11: nothing wraps, MM:SS is not guessed, nothing means "never"."""
    odd = [
        "10:30", "90:00", "1:00:00", "2-00:00:00",  # read by others as minutes, hours or days
        "0", "0d", "0s", "-1s", "never", "unlimited", "inf",  # read by others as "never expires"
        "106752d", "9223372036854775808ns", "18446744073709551616s", "99999999999999999999h",  # 2^63 ns and beyond
        "60", "1h30", "1h90m", "30m1h", "1h1h", "1.5h30m", "1h 30m", "1y", "1M", "1H",
    ]  # fmt: skip
    for text in odd:
        try:
            parse(text)
        except QuantityError:
            continue
        return False
    return parse("106751d") == 106_751 * 86_400 * 10**9 and parse("9223372036854775807ns") == 2**63 - 1


@pytest.mark.row("H11")
def test_case_h11_one_time_grammar_checked_arithmetic_odd_input_refused() -> None:
    assert _catches_h11(units.parse_duration_ns)
    with pytest.raises(QuantityError) as caught:
        units.parse_duration_ns("10:30")
    assert caught.value.nearest == "10m30s"


def wraps_at_64_bits(value: object) -> int:
    try:
        return units.parse_duration_ns(value)
    except QuantityError as refused:
        if "too large" not in refused.message:
            raise
        return 1


def reads_minutes_and_seconds_as_hours(value: object) -> int:
    head, colon, tail = str(value).partition(":")
    return units.parse_duration_ns(f"{head}h{tail}m" if colon and tail.isdigit() and int(tail) else value)


def lets_zero_mean_never(value: object) -> int:
    return units.parse_duration_ns(value, allow_zero=True)


@pytest.mark.row("H11")
@pytest.mark.parametrize("defect", [wraps_at_64_bits, reads_minutes_and_seconds_as_hours, lets_zero_mean_never])
def test_case_h11_catches_a_seeded_defect(defect: Parser) -> None:
    assert not _catches_h11(defect)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_bytes(80 * 2**30), "80GiB"),
        (units.format_bytes(1_500_000_000_000), "1.5TB"),
        (units.format_bytes(0), "0B"),
        (units.format_bytes_per_second(1_200_000_000_000), "1.2TB/s"),
        (units.format_duration_ns(5_400_000_000_000), "1h30m"),
        (units.format_duration_ns(1_500_000_000), "1s500ms"),
        (units.format_duration_ns(0), "0s"),
        (units.format_cpu_millis(1500), "1500m"),
        (units.format_cpu_millis(2000), "2"),
        (units.format_share_thousandths(250), "250m"),
        (units.format_power_milliwatts(700_000), "700W"),
        (units.format_temperature_millidegrees(-500), "-0.5C"),
    ],
)
def test_renders_the_shortest_exact_text(text: str, expected: str) -> None:
    assert text == expected


def test_units_are_what_the_architecture_says() -> None:
    """k M G T P = 1000, Ki Mi Gi Ti Pi = 1024, b = bit, B = byte."""
    for power, prefix in enumerate(("", "k", "M", "G", "T", "P")):
        assert units.parse_bytes(f"1{prefix}B") == 1000**power
        assert units.parse_bytes_per_second(f"8{prefix}b/s") == 1000**power
    for power, prefix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), start=1):
        assert units.parse_bytes(f"1{prefix}B") == 1024**power
        assert Fraction(units.parse_bytes_per_second(f"8{prefix}b/s")) == 1024**power
