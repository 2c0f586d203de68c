"""Laws of quantities: rendering round-trips, the sum of parts is the whole, hostile text never raises anything else."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virialpb import units
from virialpb.units import MAX_VALUE, QuantityError

FACTORS = [1000**power for power in range(6)] + [1024**power for power in range(6)]


@st.composite
def round_numbers(draw: st.DrawFn) -> int:
    """Amounts as people write them: a short number and a prefix."""
    return min(draw(st.integers(0, 9_999)) * draw(st.sampled_from(FACTORS)), MAX_VALUE)


amounts = st.one_of(st.integers(0, MAX_VALUE), round_numbers())

PAIRS: list[tuple[Callable[[int], str], Callable[[object], int]]] = [
    (units.format_bytes, lambda text: units.parse_bytes(text, allow_zero=True)),
    (units.format_bytes_per_second, lambda text: units.parse_bytes_per_second(text, allow_zero=True)),
    (units.format_duration_ns, lambda text: units.parse_duration_ns(text, allow_zero=True)),
    (units.format_cpu_millis, lambda text: units.parse_cpu_millis(text, allow_zero=True)),
    (
        units.format_share_thousandths,
        lambda text: units.parse_share_thousandths(text, allow_zero=True, maximum_thousandths=MAX_VALUE),
    ),
    (units.format_power_milliwatts, lambda text: units.parse_power_milliwatts(text, allow_zero=True)),
]
PARSERS: list[Callable[[object], int]] = [parse for _, parse in PAIRS] + [
    units.parse_count,
    units.parse_temperature_millidegrees,
]


@pytest.mark.parametrize(("render", "parse"), PAIRS, ids=lambda function: getattr(function, "__name__", ""))
@given(amount=amounts)
def test_text_parses_back_to_the_same_integer(
    render: Callable[[int], str], parse: Callable[[object], int], amount: int
) -> None:
    assert parse(render(amount)) == amount


@given(st.integers(units.ABSOLUTE_ZERO_MILLIDEGREES, 10**9))
def test_temperature_round_trips(temperature: int) -> None:
    assert units.parse_temperature_millidegrees(units.format_temperature_millidegrees(temperature)) == temperature


@given(st.text(alphabet="0123456789.-:dhmsunkMGTPiBb/WC% e\n\u0663\u00b5", max_size=24))
def test_any_text_is_an_amount_or_a_quantity_error(text: str) -> None:
    for parse in PARSERS:
        try:
            amount = parse(text)
        except QuantityError:
            continue
        assert -MAX_VALUE <= amount <= MAX_VALUE


@given(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.binary(),
        st.lists(st.integers()),
        st.dates(),
        st.text(),
    )
)
def test_any_loaded_value_is_an_amount_or_a_quantity_error(value: object) -> None:
    for parse in PARSERS:
        try:
            parse(value)
        except QuantityError:
            continue


UNIT_NS = {"d": 86_400 * 10**9, "h": 3_600 * 10**9, "m": 60 * 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


@given(st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(sorted(UNIT_NS))), min_size=1, max_size=4))
def test_a_duration_is_the_sum_of_its_parts_or_refused(parts: list[tuple[int, str]]) -> None:
    """A slow second reading of the grammar."""
    text = "".join(f"{count}{unit}" for count, unit in parts)
    total = sum(count * UNIT_NS[unit] for count, unit in parts)
    orderly = all(
        UNIT_NS[unit] < UNIT_NS[above] and count * UNIT_NS[unit] < UNIT_NS[above]
        for (_, above), (count, unit) in pairwise(parts)
    )
    if orderly and 0 < total <= MAX_VALUE:
        assert units.parse_duration_ns(text) == total
    else:
        with pytest.raises(QuantityError):
            units.parse_duration_ns(text)


@given(st.from_regex(re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?", re.ASCII), fullmatch=True), st.sampled_from("kMGT"))
def test_decimals_are_exact(number: str, prefix: str) -> None:
    factor = 1000 ** ("kMGT".index(prefix) + 1)
    exact = Fraction(number) * factor
    if exact.denominator == 1:
        assert units.parse_bytes(f"{number}{prefix}B", allow_zero=True) == exact
    else:
        with pytest.raises(QuantityError):
            units.parse_bytes(f"{number}{prefix}B", allow_zero=True)
