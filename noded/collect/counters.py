"""Differences of counters. Pure. No difference is ever negative, and none is made up."""

from __future__ import annotations

from noded.collect.model import Quality, Readings, Sample, Unit


def delta(before: Sample, after: Sample) -> Sample:
    """How much a counter grew between two samples of it.

    RESET when it went back (a driver reload, a reboot): what was counted meanwhile is not known. SATURATED when it
    stands at its end: it grew by at least this. Otherwise without a value when either sample is.
    """
    if before.name != after.name:
        raise ValueError(f"{before.name} and {after.name} are different counters")
    if before.value is None or after.value is None:
        quality = after.quality if after.value is None else before.quality
        return Sample(after.name, None, after.unit, quality, after.at_ns)
    if after.value < before.value:
        return Sample(after.name, None, after.unit, Quality.RESET, after.at_ns)
    return Sample(after.name, after.value - before.value, after.unit, after.quality, after.at_ns)


def cpu_usage(before: Readings, after: Readings) -> Sample:
    """Busy share of the host's CPU time between two sweeps, in thousandths."""
    parts: list[Sample] = []
    for name in ("cpu/busy", "cpu/total"):
        earlier, later = before.get(name), after.get(name)
        if earlier is None or later is None:
            return Sample("cpu/usage", None, Unit.THOUSANDTHS, Quality.ABSENT, after.at_ns)
        parts.append(delta(earlier, later))
    busy, total = parts
    if busy.value is None or not total.value:
        quality = busy.quality if busy.value is None else total.quality if total.value is None else Quality.ABSENT
        return Sample("cpu/usage", None, Unit.THOUSANDTHS, quality, after.at_ns)
    # idle and iowait may step back a little between reads of one CPU, so that busy outgrows total
    return Sample("cpu/usage", min(busy.value * 1_000 // total.value, 1_000), Unit.THOUSANDTHS, Quality.OK, after.at_ns)
