"""Kernel files as they are: missing, refused, empty, in words, endless, or a pipe."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noded.collect.counters import cpu_usage, delta
from noded.collect.files import (
    MAX_FILE_BYTES,
    Number,
    Text,
    format_id_list,
    list_names,
    parse_id_list,
    parse_mask,
    quality_of,
    read_int,
    read_text,
)
from noded.collect.model import Quality, Readings, Sample, Unit


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"42\n", Number(42, Quality.OK)),
        (b"-1\n", Number(-1, Quality.OK)),
        (b"0042\0\n", Number(42, Quality.OK)),
        (b"", Number(None, Quality.ABSENT)),
        (b"\n", Number(None, Quality.ABSENT)),
        (b"N/A (no PMA)\n", Number(None, Quality.ABSENT)),
        (b"1 2\n", Number(None, Quality.ABSENT)),
        (b"0x1f\n", Number(None, Quality.ABSENT)),
        (b"\xff\xfe", Number(None, Quality.ABSENT)),
        (b"9" * 40, Number(None, Quality.IMPLAUSIBLE)),
        (b"9" * (MAX_FILE_BYTES + 1), Number(None, Quality.IMPLAUSIBLE)),
    ],
)
def test_an_integer_or_why_not(tmp_path: Path, content: bytes, expected: Number) -> None:
    (tmp_path / "file").write_bytes(content)
    assert read_int(str(tmp_path / "file")) == expected


def test_what_is_no_file_is_absent(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "loop", "pipe", ".", "a\0b", "missing/below"):
        assert read_text(f"{tmp_path}/{name}") == Text(None, Quality.ABSENT), name


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_a_refusal_is_denied(code: int) -> None:
    assert quality_of(OSError(code, "")) is Quality.DENIED


@pytest.mark.parametrize(
    "code", [errno.ENOENT, errno.ENODATA, errno.EAGAIN, errno.EINVAL, errno.EIO, errno.ENXIO, errno.ENODEV, errno.EBUSY]
)
def test_an_error_instead_of_a_value_is_absent(code: int) -> None:
    assert quality_of(OSError(code, "")) is Quality.ABSENT


def test_names_come_in_natural_order(tmp_path: Path) -> None:
    for name in ("cpu10", "cpu2", "cpu1", "cpufreq"):
        (tmp_path / name).touch()
    assert list_names(str(tmp_path)) == ("cpu1", "cpu2", "cpu10", "cpufreq")
    assert list_names(f"{tmp_path}/missing") == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3,8,10-11", (0, 1, 2, 3, 8, 10, 11)),
        ("7", (7,)),
        ("", None),
        ("x", None),
        ("3-1", None),
        ("1-", None),
        ("-1", None),
        ("0-99999999", None),
    ],
)
def test_id_lists(text: str, expected: tuple[int, ...] | None) -> None:
    assert parse_id_list(text) == expected


@given(st.frozensets(st.integers(0, 5_000), min_size=1))
def test_id_lists_round_trip(ids: frozenset[int]) -> None:
    assert parse_id_list(format_id_list(tuple(ids))) == tuple(sorted(ids))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("f", (0, 1, 2, 3)), ("00000001,00000000", (32,)), ("0", ()), ("", None), ("g", None), ("0x1", None)],
)
def test_masks(text: str, expected: tuple[int, ...] | None) -> None:
    assert parse_mask(text) == expected


def counter(value: int | None, quality: Quality = Quality.OK, name: str = "c") -> Sample:
    return Sample(name, value, Unit.COUNT, quality, 1)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (counter(5), counter(9), counter(4)),
        (counter(5), counter(5), counter(0)),
        (counter(9), counter(5), counter(None, Quality.RESET)),
        (counter(5), counter(255, Quality.SATURATED), counter(250, Quality.SATURATED)),
        (counter(5), counter(None, Quality.DENIED), counter(None, Quality.DENIED)),
        (counter(None, Quality.ABSENT), counter(5), counter(None, Quality.ABSENT)),
    ],
)
def test_a_difference_is_never_negative_nor_made_up(before: Sample, after: Sample, expected: Sample) -> None:
    assert delta(before, after) == expected


def test_different_counters_have_no_difference() -> None:
    with pytest.raises(ValueError, match="different counters"):
        delta(counter(1, name="a"), counter(2, name="b"))


def sweep(busy: int, total: int) -> Readings:
    return Readings((counter(busy, name="cpu/busy"), counter(total, name="cpu/total")), 1)


@pytest.mark.parametrize(
    ("before", "after", "value", "quality"),
    [
        (sweep(100, 1_000), sweep(150, 1_200), 250, Quality.OK),
        (sweep(100, 1_000), sweep(201, 1_100), 1_000, Quality.OK),
        (sweep(100, 1_000), sweep(100, 1_000), None, Quality.ABSENT),
        (sweep(100, 1_000), sweep(5, 10), None, Quality.RESET),
        (Readings((), 1), sweep(5, 10), None, Quality.ABSENT),
    ],
)
def test_cpu_usage(before: Readings, after: Readings, value: int | None, quality: Quality) -> None:
    usage = cpu_usage(before, after)
    assert (usage.value, usage.quality) == (value, quality)
