"""Quantities: text with a unit to an integer in base units, and back. Pure, exact, standard library only.

RDL files and job specs carry text (``80GiB``, ``1.2TB/s``, ``150ns``); everything past the edge, protos included,
carries an integer whose name ends in its base unit. Prefixes: k M G T P are powers of 1000, Ki Mi Gi Ti Pi powers of
1024; ``B`` is a byte, ``b`` a bit; case matters (``mW`` is not ``MW``). There is ONE grammar:

- a number is ASCII digits with at most one decimal point, digits on both sides; no sign, exponent, separator or space;
- a unit follows it at once (``80GiB``); a bare number is accepted only where there is nothing to confuse (CPU, shares,
  counts), and ``0`` only where the caller allows zero;
- a duration is ``1.5h`` or whole parts from large to small, each smaller than one of the part before (``1h30m``).

Arithmetic is exact: what is not a whole number of base units, or does not fit a signed 64-bit integer, is refused,
never rounded or wrapped. Every parser takes what a YAML or JSON loader gives (``object``), raises only
``QuantityError``, and every ``format_*`` gives text that parses back to the same integer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Final

from virialpb.suggest import did_you_mean, nearest

# Everything is stored in a proto int64.
MAX_VALUE: Final = 2**63 - 1
# "9223372036854775807.999999999999" is 32 characters; a longer number is not a quantity but an attack or a paste error.
MAX_TEXT_LENGTH: Final = 64

NANOS_PER_SECOND: Final = 1_000_000_000
MILLIS_PER_CORE: Final = 1_000
WHOLE_SHARE_THOUSANDTHS: Final = 1_000
ABSOLUTE_ZERO_MILLIDEGREES: Final = -273_150

_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_NUMBER_AND_REST = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)(.*)", re.DOTALL)
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)([^0-9.]*)")
_CLOCK = re.compile(r"[0-9]+(?:-[0-9]+)?(?::[0-9]+)+(?:\.[0-9]+)?")


class QuantityError(ValueError):
    """A text that is not the quantity asked for.

    ``text`` is what was given (shortened), ``message`` says what is wrong, ``nearest`` is the right unit or the whole
    right text where one is evident. ``str()`` is ``message`` with the suggestion after it.
    """

    def __init__(self, text: str, message: str, nearest: str | None = None) -> None:
        super().__init__(message + did_you_mean(nearest))
        self.text = text
        self.message = message
        self.nearest = nearest


@dataclass(frozen=True, slots=True)
class _Scale:
    """One kind of quantity: its units in base units, and how to speak of it."""

    noun: str
    base: str
    example: str
    units: Mapping[str, Fraction]
    # What a bare number most likely meant, for the hint.
    usual: str = ""
    # Spellings that people bring from elsewhere, too far from ours for the edit distance.
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    # The unit a bare number is counted in, for kinds where that cannot be confused.
    bare: Fraction | None = None
    signed: bool = False


_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_PREFIXES = _DECIMAL | _BINARY

_BYTES = _Scale(
    noun="size",
    base="bytes",
    example="80GiB",
    usual="B",
    units={f"{prefix}B": Fraction(factor) for prefix, factor in _PREFIXES.items()},
    aliases={"byte": "B", "bytes": "B"} | {prefix: f"{prefix}B" for prefix in _PREFIXES if prefix},
)
_BYTE_RATE_UNITS = {f"{prefix}B/s": Fraction(factor) for prefix, factor in _PREFIXES.items()}
_BYTES_PER_SECOND = _Scale(
    noun="rate",
    base="bytes per second",
    example="1.2TB/s",
    usual="B/s",
    units=_BYTE_RATE_UNITS | {f"{prefix}b/s": Fraction(factor, 8) for prefix, factor in _PREFIXES.items()},
    aliases={f"{prefix}bps": f"{prefix}b/s" for prefix in _PREFIXES}
    | {f"{prefix}Bps": f"{prefix}B/s" for prefix in _PREFIXES}
    | {f"{prefix}bit/s": f"{prefix}b/s" for prefix in _PREFIXES}
    | {f"{prefix}B": f"{prefix}B/s" for prefix in _PREFIXES}
    | {f"{prefix}b": f"{prefix}b/s" for prefix in _PREFIXES},
)
_DURATION = _Scale(
    noun="duration",
    base="ns",
    example="1h30m",
    usual="s",
    units={
        "d": Fraction(86_400 * NANOS_PER_SECOND),
        "h": Fraction(3_600 * NANOS_PER_SECOND),
        "m": Fraction(60 * NANOS_PER_SECOND),
        "s": Fraction(NANOS_PER_SECOND),
        "ms": Fraction(1_000_000),
        "us": Fraction(1_000),
        "ns": Fraction(1),
    },
    aliases={
        "\N{MICRO SIGN}s": "us",
        "\N{GREEK SMALL LETTER MU}s": "us",
        **dict.fromkeys(("sec", "secs", "second", "seconds", "S"), "s"),
        **dict.fromkeys(("min", "mins", "minute", "minutes", "M"), "m"),
        **dict.fromkeys(("hr", "hrs", "hour", "hours", "H"), "h"),
        **dict.fromkeys(("day", "days", "D"), "d"),
        **dict.fromkeys(("msec", "millis", "milliseconds"), "ms"),
    },
)
_CPU = _Scale(
    noun="CPU quantity",
    base="thousandths of a core",
    example="1.5",
    units={"m": Fraction(1)},
    aliases=dict.fromkeys(("c", "core", "cores", "cpu", "cpus"), ""),
    bare=Fraction(MILLIS_PER_CORE),
)
_SHARE = _Scale(
    noun="share",
    base="thousandths",
    example="0.25",
    units={"m": Fraction(1)},
    bare=Fraction(WHOLE_SHARE_THOUSANDTHS),
)
_COUNT = _Scale(noun="count", base="whole units", example="8", units={}, bare=Fraction(1))
_POWER = _Scale(
    noun="power",
    base="milliwatts",
    example="700W",
    usual="W",
    units={"mW": Fraction(1), "W": Fraction(10**3), "kW": Fraction(10**6), "MW": Fraction(10**9)},
    aliases={"watt": "W", "watts": "W"},
)
_TEMPERATURE = _Scale(
    noun="temperature",
    base="thousandths of a degree Celsius",
    example="85C",
    usual="C",
    units={"C": Fraction(1_000), "mC": Fraction(1)},
    aliases={"\N{DEGREE SIGN}C": "C", "degC": "C", "c": "C"},
    signed=True,
)


def parse_bytes(value: object, *, allow_zero: bool = False) -> int:
    """Bytes of a size such as ``80GiB`` or ``1.5TB``. Raises QuantityError."""
    return _parse(value, _BYTES, allow_zero)


def parse_bytes_per_second(value: object, *, allow_zero: bool = False) -> int:
    """Bytes per second of a rate such as ``1.2TB/s`` (bytes) or ``400Gb/s`` (bits). Raises QuantityError."""
    return _parse(value, _BYTES_PER_SECOND, allow_zero)


def parse_duration_ns(value: object, *, allow_zero: bool = False) -> int:
    """Nanoseconds of a duration such as ``150ns``, ``1.5h``, ``1h30m`` or ``2d``. Raises QuantityError.

    ``MM:SS`` and its kin are refused, because other systems read the same text as hours; so is zero, which elsewhere
    came to mean "for ever", unless ``allow_zero`` says that it has a meaning here.
    """
    text = _text(value, _DURATION)
    if _CLOCK.fullmatch(text):
        raise QuantityError(
            text,
            f"'{text}' could be hours, minutes or seconds; name the unit of each part, as in '1h30m'",
            _clock_as_duration(text),
        )
    parts = _DURATION_PART.findall(text)
    if len(parts) < 2 or "".join(number + unit for number, unit in parts) != text:
        return _parse(text, _DURATION, allow_zero)
    return _checked(text, _sum_parts(text, parts), _DURATION, allow_zero)


def parse_cpu_millis(value: object, *, allow_zero: bool = False) -> int:
    """Thousandths of a core of ``300m``, ``1.5`` or ``2``. Raises QuantityError."""
    return _parse(value, _CPU, allow_zero)


def parse_share_thousandths(
    value: object, *, allow_zero: bool = False, maximum_thousandths: int = WHOLE_SHARE_THOUSANDTHS
) -> int:
    """Thousandths of one device of ``0.25``, ``250m`` or ``1``; at most ``maximum_thousandths``.

    Raises QuantityError.
    """
    share = _parse(value, _SHARE, allow_zero)
    if share > maximum_thousandths:
        text = _text(value, _SHARE)
        raise QuantityError(text, f"'{text}' is more than {format_share_thousandths(maximum_thousandths)}")
    return share


def parse_count(value: object, *, allow_zero: bool = False) -> int:
    """A whole number such as ``8``. Raises QuantityError."""
    return _parse(value, _COUNT, allow_zero)


def parse_power_milliwatts(value: object, *, allow_zero: bool = False) -> int:
    """Milliwatts of ``700W`` or ``1.2kW``. Raises QuantityError."""
    return _parse(value, _POWER, allow_zero)


def parse_temperature_millidegrees(value: object) -> int:
    """Thousandths of a degree Celsius of ``85C`` or ``-40C``; not below absolute zero. Raises QuantityError."""
    temperature = _parse(value, _TEMPERATURE, allow_zero=True)
    if temperature < ABSOLUTE_ZERO_MILLIDEGREES:
        text = _text(value, _TEMPERATURE)
        raise QuantityError(text, f"'{text}' is below absolute zero")
    return temperature


def format_bytes(value_bytes: int) -> str:
    """The shortest exact text: ``80GiB``, ``1.5TB``, ``1023B``."""
    return _format(value_bytes, _BYTES.units)


def format_bytes_per_second(value_bytes_per_second: int) -> str:
    """The shortest exact text, in bytes: ``1.2TB/s``."""
    return _format(value_bytes_per_second, _BYTE_RATE_UNITS)


def format_duration_ns(value_ns: int) -> str:
    """Whole parts from large to small: ``1h30m``, ``1s500ms``, ``150ns``."""
    _require_range(value_ns)
    parts: list[str] = []
    rest = value_ns
    for unit, factor in _DURATION.units.items():
        count, rest = divmod(rest, int(factor))
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def format_cpu_millis(value_millis: int) -> str:
    """``2`` for whole cores, else ``1500m``."""
    return _format_thousandths(value_millis)


def format_share_thousandths(value_thousandths: int) -> str:
    """``1`` for a whole device, else ``250m``."""
    return _format_thousandths(value_thousandths)


def format_power_milliwatts(value_milliwatts: int) -> str:
    """The shortest exact text: ``700W``, ``1.2kW``."""
    return _format(value_milliwatts, _POWER.units)


def format_temperature_millidegrees(value_millidegrees: int) -> str:
    """Degrees with as many decimals as it needs: ``85C``, ``-40.5C``."""
    sign = "-" if value_millidegrees < 0 else ""
    return f"{sign}{_decimal(Fraction(abs(value_millidegrees), 1_000))}C"


def _text(value: object, scale: _Scale) -> str:
    """The text to parse. A float's shortest decimal is what the file's author typed, so it is read exactly."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, float) and scale.bare is not None:
        text = str(Decimal(repr(value)))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        # Python refuses to print an integer of thousands of digits, so its size is looked at first.
        if abs(value) > MAX_VALUE:
            raise QuantityError("", f"the number is too large for a {scale.noun}")
        text = str(value)
    else:
        kind = "nothing" if value is None else f"a {type(value).__name__}"
        raise QuantityError("", f"expected a {scale.noun} such as '{scale.example}', got {kind}")
    if len(text) > MAX_TEXT_LENGTH:
        shown = text[:MAX_TEXT_LENGTH]
        raise QuantityError(shown, f"'{shown}...' is too long for a {scale.noun}")
    return text


def _parse(value: object, scale: _Scale, allow_zero: bool) -> int:
    text = _text(value, scale)
    match = _NUMBER_AND_REST.fullmatch(text)
    if match is None:
        raise QuantityError(text, f"'{text}' is not a {scale.noun}; write a number as in '{scale.example}'")
    number, unit = match.groups()
    if number.startswith("-") and not scale.signed:
        raise QuantityError(text, f"'{text}' is negative")
    factor = _factor(text, number, unit, scale)
    return _checked(text, Fraction(number) * factor, scale, allow_zero)


def _factor(text: str, number: str, unit: str, scale: _Scale) -> Fraction:
    if unit in scale.units:
        return scale.units[unit]
    if not unit:
        if scale.bare is not None:
            return scale.bare
        if not Fraction(number):
            return Fraction(1)
        raise QuantityError(text, f"no unit in '{text}'", f"{number}{scale.usual}")
    if unit == "%" and scale is _SHARE:
        raise QuantityError(text, f"unknown unit '%' in '{text}'", _decimal(Fraction(number) / 100))
    if unit.split() != [unit]:
        raise QuantityError(text, f"a space in '{text}'", _joined(text, scale))
    if not scale.units:
        raise QuantityError(text, f"'{text}' is not a {scale.noun}; write a number as in '{scale.example}'")
    suggestion = scale.aliases.get(unit)
    if suggestion is None:
        suggestion = nearest(unit, scale.units)
    elif not suggestion:
        raise QuantityError(text, f"unknown unit '{unit}' in '{text}'", number)
    known = "" if suggestion is not None else f"; known units are {', '.join(scale.units)}"
    raise QuantityError(text, f"unknown unit '{unit}' in '{text}'{known}", suggestion)


def _joined(text: str, scale: _Scale) -> str | None:
    """`text` without its spaces, or with the unit that was meant, if that is a quantity."""
    joined = "".join(text.split())
    try:
        if scale is _DURATION:
            parse_duration_ns(joined, allow_zero=True)
        else:
            _parse(joined, scale, allow_zero=True)
    except QuantityError as error:
        match = _NUMBER_AND_REST.fullmatch(joined)
        return None if error.nearest is None or match is None else _with_unit(match[1], error.nearest)
    return joined


def _with_unit(number: str, nearest_text: str) -> str:
    """What is nearest is a unit, or the whole right text."""
    return nearest_text if nearest_text[:1].isdigit() else number + nearest_text


def _checked(text: str, amount: Fraction, scale: _Scale, allow_zero: bool) -> int:
    if amount.denominator != 1:
        raise QuantityError(text, f"'{text}' is {_decimal(amount)} {scale.base}, which is not a whole number")
    if abs(amount) > MAX_VALUE:
        raise QuantityError(text, f"'{text}' is too large: the most is {MAX_VALUE} {scale.base}")
    if not amount and not allow_zero:
        raise QuantityError(text, f"'{text}' is zero; a {scale.noun} here must be more than zero")
    return int(amount)


def _sum_parts(text: str, parts: list[tuple[str, str]]) -> Fraction:
    """Sum of ``1h30m``: whole numbers, units strictly descending, each part less than one of the unit before."""
    total = Fraction(0)
    before: str | None = None
    for number, unit in parts:
        factor = _factor(text, number, unit, _DURATION) if unit else None
        if factor is None:
            raise QuantityError(text, f"no unit after '{number}' in '{text}'")
        if "." in number:
            raise QuantityError(text, f"'{text}' mixes a decimal with several parts; use whole parts as in '1h30m'")
        if before is not None:
            above = _DURATION.units[before]
            if factor >= above:
                raise QuantityError(
                    text, f"'{unit}' after '{before}' in '{text}'; parts go from large to small, once each"
                )
            if Fraction(number) * factor >= above:
                raise QuantityError(text, f"'{number}{unit}' in '{text}' is 1{before} or more; carry it over")
        total += Fraction(number) * factor
        before = unit
    return total


def _clock_as_duration(text: str) -> str | None:
    """What ``MM:SS`` or ``HH:MM:SS`` most likely meant; None where even that is a guess."""
    fields = text.split(":")
    if "-" in text or "." in text or len(fields) > 3:
        return None
    units = ("m", "s") if len(fields) == 2 else ("h", "m", "s")
    return "".join(f"{int(count)}{unit}" for count, unit in zip(fields, units, strict=True) if int(count)) or None


def _require_range(value: int) -> None:
    if not 0 <= value <= MAX_VALUE:
        raise ValueError(f"{value} is outside 0..{MAX_VALUE}")


def _format(value: int, units: Mapping[str, Fraction]) -> str:
    """Shortest exact text; of equally short ones the larger unit. At most three decimals, so that it can be read."""
    _require_range(value)
    smallest = min(units, key=lambda unit: units[unit])
    best = f"{value}{smallest}"
    if value == 0:
        return best
    for unit, factor in sorted(units.items(), key=lambda item: -item[1]):
        amount = value / factor
        if amount < 1 or (amount * 1_000).denominator != 1:
            continue
        text = f"{_decimal(amount)}{unit}"
        if len(text) < len(best):
            best = text
    return best


def _format_thousandths(value: int) -> str:
    _require_range(value)
    whole, rest = divmod(value, 1_000)
    return f"{value}m" if rest else str(whole)


def _decimal(amount: Fraction) -> str:
    """Exact decimal text of a fraction whose denominator has only the factors 2 and 5, as all of ours have."""
    if amount.denominator == 1:
        return str(amount.numerator)
    digits = 0
    scaled = amount
    while scaled.denominator != 1:
        scaled *= 10
        digits += 1
    sign = "-" if scaled < 0 else ""
    text = str(abs(scaled.numerator)).rjust(digits + 1, "0")
    return f"{sign}{text[:-digits]}.{text[-digits:]}"
