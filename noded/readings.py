"""The readings of a beat, made of the collector's last sweeps: believed only while fresh, what matters most first."""

from __future__ import annotations

from typing import Final

from noded.collect.counters import cpu_usage
from noded.collect.model import Readings
from noded.collect.model import Sample as Reading
from noded.collect.runner import Latest, aged
from noded.collect.temperatures import hottest
from noded.core.messages import Sample

NS_PER_MS: Final = 1_000_000
_FIRST: Final = ("temperature", "cpu/usage", "link", "rdma", "collector", "memory", "cpu")
"""By the start of their names: what does not fit into a beat is left out from the end."""


class ReadingsReport:
    """Keeps the sweep before, since the use of a CPU is a difference."""

    def __init__(self, period_ns: int) -> None:
        self._period_ns = period_ns
        self._before: Readings | None = None
        self._last: Readings | None = None

    def samples(self, latest: Latest[Readings], now_ns: int) -> tuple[Sample, ...]:
        """As they are to be sent at `now_ns`."""
        if latest.value is not self._last:
            self._before, self._last = self._last, latest.value
        believed = aged(latest, "readings", self._period_ns, now_ns)
        found = [hottest(believed), *believed.samples]
        if self._before is not None:
            found.append(cpu_usage(self._before, believed))
        found.sort(key=lambda sample: (_rank(sample.name), sample.name))
        return tuple(_sent(sample, now_ns) for sample in found)


def _rank(name: str) -> int:
    return next((rank for rank, start in enumerate(_FIRST) if name.startswith(start)), len(_FIRST))


def _sent(sample: Reading, now_ns: int) -> Sample:
    """With its age instead of its time: clocks of two hosts are never compared."""
    age_ms = max(0, now_ns - sample.at_ns) // NS_PER_MS
    return Sample(sample.name, sample.value, sample.unit.value, sample.quality.value, age_ms)
