"""Numbers and times as people read them. Where a value is not known, the word is `unknown`, never 0."""

from __future__ import annotations

# Quantities and dates are imported where they are used: `virial --help` needs neither.

UNKNOWN = "unknown"
SECOND_NS = 1_000_000_000
_PARTS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB")
# An exact text of more characters than this is no help to a reader, nor is a long number of single bytes.
_EXACT_LENGTH_MAX = 7
_SINGLE_BYTES_MAX = 10_000


def clean(text: str) -> str:
    """Text from elsewhere, safe on a terminal and on one line: control characters are shown, not obeyed."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def size(value_bytes: int) -> str:
    """Exact where that is short (`512MiB`), else to a tenth (`31.3GiB`)."""
    from virialpb.units import format_bytes

    exact = format_bytes(value_bytes)
    plain = exact == f"{value_bytes}B"
    if value_bytes < 1024 or (len(exact) <= _EXACT_LENGTH_MAX and (not plain or value_bytes < _SINGLE_BYTES_MAX)):
        return exact
    power = min((value_bytes.bit_length() - 1) // 10, len(_BINARY))
    return f"{value_bytes / 1024**power:.1f}{_BINARY[power - 1]}"


def cpu(value_millis: int) -> str:
    """Cores: `2`, or thousandths: `300m`."""
    from virialpb.units import format_cpu_millis

    return format_cpu_millis(value_millis)


def duration(value_ns: int) -> str:
    """The two largest parts: `3m12s`, `2d4h`; below a second in ms."""
    seconds = value_ns // SECOND_NS
    if seconds < 1:
        return f"{max(0, value_ns) // 1_000_000}ms"
    parts: list[str] = []
    for unit, factor in _PARTS:
        count, seconds = divmod(seconds, factor)
        if count or parts:
            parts.append(f"{count}{unit}")
    kept = parts[:2]
    return "".join(part for part in kept if not part.startswith("0"))


def age(then_unix_ns: int, now_unix_ns: int) -> str:
    """Since a moment on the controller's wall clock, which may not agree with ours."""
    return duration(max(0, now_unix_ns - then_unix_ns)) if then_unix_ns else UNKNOWN


def moment(unix_ns: int) -> str:
    """Local date and time to the second."""
    if not unix_ns:
        return UNKNOWN
    return _local(unix_ns, "%Y-%m-%d %H:%M:%S")


def clock(unix_ns: int) -> str:
    """Local time of day to the second, as in a log."""
    if not unix_ns:
        return "--:--:--"
    return _local(unix_ns, "%H:%M:%S")


def _local(unix_ns: int, form: str) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(unix_ns // SECOND_NS, UTC).astimezone().strftime(form)


def quantity(value: int | None, unit: str) -> str:
    """A reading with its unit. Units that are not known here are written out, not guessed at."""
    if value is None:
        return UNKNOWN
    from virialpb.units import format_bytes_per_second, format_duration_ns

    match unit:
        case "bytes":
            return size(value) if value >= 0 else f"{value} bytes"
        case "bytes_per_second" if value >= 0:
            return format_bytes_per_second(value)
        case "ns" if value >= 0:
            return duration(value) if value >= 1_000_000 else format_duration_ns(value)
        case "millidegrees_celsius":
            return f"{value / 1000:.1f}C"
        case "flag":
            return "yes" if value else "no"
        case "thousandths":
            return f"{value / 1000:.3f}"
        case "" | "count":
            return str(value)
        case _:
            return f"{value} {unit.replace('_', ' ')}"


def named(name: str, value: int) -> str:
    """A number whose unit ends its name, as decisions carry them: ("needed_memory_bytes", 5) -> "needed memory 5B"."""
    for suffix, text in (("_memory_bytes", size), ("_cpu_millis", cpu), ("_bytes", size)):
        if name.endswith(suffix) and value >= 0:
            words = name.removesuffix(suffix).replace("_", " ")
            noun = {"_memory_bytes": " memory", "_cpu_millis": " CPU"}.get(suffix, "")
            return f"{words}{noun} {text(value)}"
    for suffix, factor in (("_ns", 1), ("_ms", 1_000_000), ("_seconds", SECOND_NS)):
        if name.endswith(suffix) and value >= 0:
            return f"{name.removesuffix(suffix).replace('_', ' ')} {duration(value * factor)}"
    return f"{name.removesuffix('_count').replace('_', ' ')} {value}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
