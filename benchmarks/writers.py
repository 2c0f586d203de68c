"""Writers that never rest, and the longest time in which none of them was answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

PACE_SECONDS = 0.005


@dataclass
class Acks:
    """When each answer came, CLOCK_BOOTTIME in ns."""

    times_ns: list[int] = field(default_factory=list[int])

    def note(self) -> None:
        self.times_ns.append(now_ns())

    def since(self, begin_ns: int) -> int:
        return sum(at_ns > begin_ns for at_ns in self.times_ns)

    def longest_gap_ms(self, begin_ns: int) -> float:
        """Between two answers, from the last one before `begin_ns` on."""
        before = [at_ns for at_ns in self.times_ns if at_ns <= begin_ns]
        after = [at_ns for at_ns in self.times_ns if at_ns > begin_ns]
        return max((b - a for a, b in pairwise([*before[-1:], *after])), default=0) / 1e6


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@asynccontextmanager
async def writing(write: Callable[[], Awaitable[object]]) -> AsyncGenerator[Acks]:
    """One write after another, PACE_SECONDS apart, inside the block. `write` returns when it is acknowledged.

    Leaving the block waits for the answer to the last one. Raises what `write` raised.
    """
    acks = Acks()
    stopping = asyncio.Event()

    async def work() -> None:
        while not stopping.is_set():
            await write()
            acks.note()
            await asyncio.sleep(PACE_SECONDS)

    task = asyncio.create_task(work())
    try:
        yield acks
        stopping.set()
        await task
    finally:
        task.cancel()
        await asyncio.wait((task,))
