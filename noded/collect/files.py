"""Reading small kernel files without surprises: bounded, never waiting, never raising.

An attribute of sysfs can vanish between listing and opening, refuse (EACCES), or answer "no value" with half a dozen
error codes (a downed NIC gives EINVAL for its speed, a sleeping sensor EAGAIN or ENODATA). All of that is a Quality.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from typing import Final

from noded.collect.model import Quality

MAX_FILE_BYTES: Final = 64 << 10
MAX_DIRECTORY_ENTRIES: Final = 65_536
# What a proto int64 holds: a larger number is no amount of anything.
MAX_AMOUNT: Final = 2**63 - 1
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_DECIMAL = re.compile(r"[0-9]{1,20}")
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})


@dataclass(frozen=True, slots=True)
class Text:
    """``value`` is stripped of white space and NUL at its ends; None unless ``quality`` is OK."""

    value: str | None
    quality: Quality


@dataclass(frozen=True, slots=True)
class Number:
    value: int | None
    quality: Quality


def quality_of(error: OSError) -> Quality:
    """DENIED for a permission; ABSENT for everything else a kernel file says instead of a value."""
    return Quality.DENIED if error.errno in _DENIED else Quality.ABSENT


def read_text(path: str, max_bytes: int = MAX_FILE_BYTES) -> Text:
    """The text of a file. An empty one is ABSENT; one longer than ``max_bytes`` is IMPLAUSIBLE."""
    try:
        # Without O_NONBLOCK, opening a FIFO in a captured tree would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            data = _read_all(descriptor, max_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        return Text(None, quality_of(error))
    except ValueError:  # a NUL in a name of a captured tree
        return Text(None, Quality.ABSENT)
    if len(data) > max_bytes:
        return Text(None, Quality.IMPLAUSIBLE)
    text = data.decode("utf-8", "replace").strip(" \t\r\n\0")
    return Text(text, Quality.OK) if text else Text(None, Quality.ABSENT)


def read_int(path: str) -> Number:
    """The decimal integer a file holds. Words ("N/A", "<unknown>") are ABSENT, more than 64 bits IMPLAUSIBLE."""
    text = read_text(path)
    if text.value is None:
        return Number(None, text.quality)
    if _INTEGER.fullmatch(text.value):
        number = int(text.value)
        return Number(number, Quality.OK) if abs(number) <= MAX_AMOUNT else Number(None, Quality.IMPLAUSIBLE)
    digits = text.value.removeprefix("-").isdigit()
    return Number(None, Quality.IMPLAUSIBLE if digits else Quality.ABSENT)


def decimal(text: str) -> int | None:
    """A word that is a whole number of 0 to MAX_AMOUNT, else None."""
    number = int(text) if _DECIMAL.fullmatch(text) else None
    return number if number is not None and number <= MAX_AMOUNT else None


def product(number: int | None, factor: int) -> int | None:
    """``number * factor`` where that is an amount; None for a negative or an overflowing one."""
    amount = None if number is None else number * factor
    return amount if amount is not None and 0 <= amount <= MAX_AMOUNT else None


def list_names(path: str) -> tuple[str, ...]:
    """The names in a directory in natural order (``cpu2`` before ``cpu10``); none when it cannot be listed."""
    try:
        names = os.listdir(path)
    except (OSError, ValueError):
        return ()
    return tuple(sorted(names, key=natural_key)[:MAX_DIRECTORY_ENTRIES])


def directory_quality(path: str) -> Quality:
    """OK when the directory can be listed."""
    try:
        os.listdir(path)
    except OSError as error:
        return quality_of(error)
    return Quality.OK


def link_target(path: str) -> str:
    """The last part of what a symbolic link points to (``driver`` -> ``mlx5_core``); "" when it is none."""
    try:
        return os.path.basename(os.readlink(path).rstrip("/"))
    except (OSError, ValueError):
        return ""


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts digits as numbers."""
    return tuple((1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"([0-9]+)", name))


def parse_id_list(text: str) -> tuple[int, ...] | None:
    """``0-3,8,10-11`` as numbers, ascending; None when it is no such list or names more than 65,536."""
    found: set[int] = set()
    left = MAX_DIRECTORY_ENTRIES
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        first, last = decimal(low), decimal(high if dash else low)
        if first is None or last is None or last < first or last - first >= left:
            return None
        left -= last - first + 1
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def format_id_list(ids: tuple[int, ...]) -> str:
    """The reverse of ``parse_id_list``."""
    runs: list[list[int]] = []
    for number in sorted(ids):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_mask(text: str) -> tuple[int, ...] | None:
    """``00000000,0000000f`` (32 bits a word, highest first) as bit numbers; None when it is no such mask."""
    words = text.replace(",", "")
    if not words or len(words) > MAX_DIRECTORY_ENTRIES // 4 or re.fullmatch(r"[0-9a-fA-F]+", words) is None:
        return None
    bits = int(words, 16)
    return tuple(bit for bit in range(bits.bit_length()) if bits >> bit & 1)


def _read_all(descriptor: int, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while size <= max_bytes:
        chunk = os.read(descriptor, max_bytes + 1 - size)
        if not chunk:
            break
        chunks.append(chunk)
        size += len(chunk)
    return b"".join(chunks)
