"""Which temperatures can be true. Pure; every source of temperatures goes through here, whatever its unit.

Real sensors have been seen to give 345, 82,505, 200,000 and 644,245,923 degrees, -273.15 when nothing is connected,
0 and -1 when a driver has no value, and the vendor library's own marks for "blank". Any of them, taken for true,
quarantines a healthy node or makes a dead sensor the coolest place of the rack.
"""

from __future__ import annotations

from typing import Final

from noded.collect.files import Number
from noded.collect.model import Quality

# Silicon that runs is between these; hotter than 125 degrees it has switched itself off.
MIN_MILLIDEGREES: Final = -40_000
MAX_MILLIDEGREES: Final = 125_000

# In millidegrees: drivers that have no value say 0 or -1; an unconnected input of a Super-I/O chip is -1 degree.
_NO_VALUE_MILLIDEGREES: Final = frozenset({0, -1, -1_000, -273_150})

# DCGM writes "blank", "not found", "not supported" and "no permission" as the topmost 32- and 64-bit integers
# (dcgm_structs.h: DCGM_INT32_BLANK 0x7ffffff0, DCGM_INT64_BLANK 0x7ffffffffffffff0, and the 15 above each). The
# 64-bit ones come rounded, too, where they went through a double: as 2^63, or printed as 9223372036854775794.
_BLANK_32: Final = range(0x7FFFFFF0, 0x80000000)
_BLANK_64: Final = range(2**63 - 4_096, 2**63 + 4_096)


def temperature_millidegrees(raw: Number) -> Number:
    """A kernel sensor's value in thousandths of a degree: OK, or without a value and why."""
    if raw.value is None:
        return raw
    if raw.value in _NO_VALUE_MILLIDEGREES:
        return Number(None, Quality.ABSENT)
    return _in_range(raw.value)


def temperature_degrees(raw: int) -> Number:
    """A vendor library's value in whole degrees, as millidegrees: OK, or without a value and why."""
    if raw in _BLANK_32 or raw in _BLANK_64 or raw == 0:
        return Number(None, Quality.ABSENT)
    return _in_range(raw * 1_000)


def _in_range(millidegrees: int) -> Number:
    if not MIN_MILLIDEGREES <= millidegrees <= MAX_MILLIDEGREES:
        return Number(None, Quality.IMPLAUSIBLE)
    return Number(millidegrees, Quality.OK)
