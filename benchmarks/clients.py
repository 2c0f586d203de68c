"""Closed-loop clients: so many calls in flight, each client's next one when its last was answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

WARM_UP_SECONDS = 0.3

Call = Callable[[int, int], Awaitable[object]]
"""(client, turn): one operation, until it is acknowledged."""


@dataclass
class Figures:
    """Of one run, or of several rounds of it. `cpu_s`: processor time of this process, `store_cpu_s` of the members."""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list[float])
    cpu_s: float = 0.0
    store_cpu_s: float = 0.0

    @property
    def ops_s(self) -> float:
        return len(self.latencies_s) / self.seconds if self.seconds else 0.0

    @property
    def cpu_us(self) -> float:
        """Of this process, an operation."""
        return self.cpu_s / max(1, len(self.latencies_s)) * 1e6

    @property
    def store_cpu_us(self) -> float:
        """Of the members, an operation."""
        return self.store_cpu_s / max(1, len(self.latencies_s)) * 1e6

    def quantile_ms(self, part: float) -> float:
        values = sorted(self.latencies_s)
        return values[min(len(values) - 1, int(len(values) * part))] * 1e3 if values else 0.0


async def drive(
    call: Call, *, inflight: int, seconds: float, store_cpu: Callable[[], float] = float, into: Figures | None = None
) -> Figures:
    """Operations that began after the warm-up and were answered before the end, added to `into`."""
    figures = into or Figures()
    loop = asyncio.get_running_loop()
    begin = loop.time() + WARM_UP_SECONDS
    end = begin + seconds
    latencies_s = figures.latencies_s
    cpu: list[tuple[float, float]] = []

    def look() -> None:
        cpu.append((time.process_time(), store_cpu()))

    async def client(number: int) -> None:
        turn = 0
        while (sent := loop.time()) < end:
            await call(number, turn)
            turn += 1
            if sent >= begin and loop.time() <= end:
                latencies_s.append(loop.time() - sent)

    loop.call_at(begin, look)
    loop.call_at(end, look)
    await asyncio.gather(*(client(number) for number in range(inflight)))
    if len(cpu) < 2:  # the last of it came later than the last answer
        look()
    figures.seconds += seconds
    figures.cpu_s += cpu[1][0] - cpu[0][0]
    figures.store_cpu_s += cpu[1][1] - cpu[0][1]
    return figures
