"""Closed-loop clients: so many calls in flight, each client's next one when its last was answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

WARM_UP_SECONDS = 0.5

Call = Callable[[int, int], Awaitable[object]]
"""(client, turn): one operation, until it is acknowledged."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. `cpu_us`: processor time of this process an operation."""

    ops_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float


async def drive(call: Call, *, inflight: int, seconds: float) -> Figures:
    """Operations that began after the warm-up and were answered before the end."""
    loop = asyncio.get_running_loop()
    begin = loop.time() + WARM_UP_SECONDS
    end = begin + seconds
    latencies_s: list[float] = []
    cpu = [0.0]

    async def client(number: int) -> None:
        turn = 0
        while (sent := loop.time()) < end:
            await call(number, turn)
            turn += 1
            if sent >= begin and loop.time() <= end:
                latencies_s.append(loop.time() - sent)

    loop.call_at(begin, lambda: cpu.append(time.process_time()))
    loop.call_at(end, lambda: cpu.append(time.process_time()))
    await asyncio.gather(*(client(number) for number in range(inflight)))
    latencies_s.sort()
    count = max(1, len(latencies_s))
    return Figures(
        ops_s=len(latencies_s) / seconds,
        p50_ms=_at(latencies_s, 0.50) * 1e3,
        p99_ms=_at(latencies_s, 0.99) * 1e3,
        cpu_us=(cpu[-1] - cpu[-2]) / count * 1e6,
    )


def _at(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(len(values) * part))] if values else 0.0
