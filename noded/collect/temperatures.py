"""Temperatures from hwmon and thermal zones. Not through psutil, which passes -274 and 65,261 degrees on as true."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from noded.collect.files import Number, list_names, read_int, read_text
from noded.collect.model import Quality, Readings, Roots, Sample, Unit
from noded.collect.plausible import temperature_millidegrees

_INPUT = re.compile(r"temp([0-9]{1,3})_input")
_BUS_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_PREFIX: Final = "temperature/"
_LIMIT_PREFIX: Final = "temperature_limit/"


def read_temperatures(roots: Roots, now_ns: int) -> list[Sample]:
    """One sample a sensor, named by chip, place and label; and one of its critical limit, where it has a true one.

    A limit that is not there or not plausible is left out: it is a property of the sensor, not a reading.
    """
    samples = [*_hwmon(roots, now_ns), *_thermal_zones(roots, now_ns)]
    return _with_distinct_names(samples)


def hottest(readings: Readings) -> Sample:
    """The highest temperature of the host; without a value when no sensor has one. Unknown is never the coolest."""
    sensors = [sample for sample in readings.samples if sample.name.startswith(_PREFIX)]
    known = [sample for sample in sensors if sample.quality is Quality.OK and sample.value is not None]
    if not known:
        quality = sensors[0].quality if sensors else Quality.ABSENT
        return Sample("temperature_max", None, Unit.MILLIDEGREES, quality, readings.at_ns)
    top = max(known, key=lambda sample: (sample.value or 0, sample.name))
    return replace(top, name="temperature_max")


def _hwmon(roots: Roots, now_ns: int) -> Iterable[Sample]:
    base = f"{roots.sysroot}/class/hwmon"
    for directory in list_names(base):
        path = f"{base}/{directory}"
        real = os.path.realpath(path)
        if "/thermal_zone" in real:  # the kernel shows every zone here a second time
            continue
        names = list_names(path)
        if not any(_INPUT.fullmatch(name) for name in names):
            path = f"{path}/device"  # drivers from before 2.6.34's convention keep their files there
            names = list_names(path)
        chip = read_text(f"{base}/{directory}/name").value or read_text(f"{path}/name").value or "unnamed"
        where = _location(f"{base}/{directory}", real)
        for name in names:
            match = _INPUT.fullmatch(name)
            if match is None:
                continue
            sensor = f"{path}/temp{match[1]}"
            label = read_text(f"{sensor}_label").value or f"temp{match[1]}"
            yield from _sensor(f"{chip}/{where}/{_plain(label)}", sensor, now_ns)


def _sensor(name: str, path: str, now_ns: int) -> Iterable[Sample]:
    if read_int(f"{path}_fault").value == 1:  # the chip says that what it shows is not measured
        number = Number(None, Quality.ABSENT)
    else:
        number = temperature_millidegrees(read_int(f"{path}_input"))
    yield Sample(f"{_PREFIX}{name}", number.value, Unit.MILLIDEGREES, number.quality, now_ns)
    limit = temperature_millidegrees(read_int(f"{path}_crit"))
    if limit.value is not None:
        yield Sample(f"{_LIMIT_PREFIX}{name}", limit.value, Unit.MILLIDEGREES, limit.quality, now_ns)


def _thermal_zones(roots: Roots, now_ns: int) -> Iterable[Sample]:
    base = f"{roots.sysroot}/class/thermal"
    for directory in list_names(base):
        if directory.startswith("thermal_zone"):
            kind = _plain(read_text(f"{base}/{directory}/type").value or "unnamed")
            number = temperature_millidegrees(read_int(f"{base}/{directory}/temp"))
            name = f"{_PREFIX}thermal/{kind}"
            yield Sample(name, number.value, Unit.MILLIDEGREES, number.quality, now_ns)


def _location(path: str, real: str) -> str:
    """Where the chip is: its bus address, else its device's name. hwmonN changes from boot to boot."""
    device = os.path.realpath(f"{path}/device")
    parts = [*real.split("/"), *(device.split("/") if os.path.exists(device) else [])]
    addresses = [part for part in parts if _BUS_ADDRESS.fullmatch(part)]
    if addresses:
        return addresses[-1]
    if os.path.exists(device):
        return _plain(os.path.basename(device))
    above = real.split("/hwmon/", 1)[0] if "/devices/" in real else ""
    return _plain(os.path.basename(above)) if above else "unplaced"


def _plain(label: str) -> str:
    """A label as one part of a name."""
    return re.sub(r"[\s/]+", "-", label.strip())[:64] or "unnamed"


def _with_distinct_names(samples: list[Sample]) -> list[Sample]:
    """Sensors that nothing tells apart are numbered in the kernel's order, so that none hides another."""
    seen: dict[str, int] = {}
    distinct: list[Sample] = []
    for sample in samples:
        seen[sample.name] = seen.get(sample.name, 0) + 1
        count = seen[sample.name]
        distinct.append(sample if count == 1 else replace(sample, name=f"{sample.name}#{count}"))
    return distinct
