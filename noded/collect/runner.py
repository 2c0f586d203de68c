"""Runs a collection in a thread of its own, so that a read that hangs costs readings and nothing else.

Heartbeats share no thread, lock or pool with it: they take what ``latest`` has, by one reference. A read of a dying
disk or a driver in error recovery can hang in the kernel, where no thread can be stopped; then no second one is
started (each would hang the same way) and what was read last grows old, until it is STALE: unknown, not still true.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from noded.collect.model import Quality, Readings, Sample, Unit

T = TypeVar("T")

# A value older than this many periods is unknown (the collector row of the signal table).
STALE_PERIODS: Final = 3
_NANOS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Latest(Generic[T]):
    """``value``: of the last sweep that ended, begun at ``at_ns``; None before the first. ``running_since_ns``: of the
    sweep that is under way. ``failures``: sweeps that raised, which is a defect; ``last_failure`` says which.
    """

    value: T | None = None
    at_ns: int = 0
    running_since_ns: int | None = None
    failures: int = 0
    last_failure: str = ""

    def age_ns(self, now_ns: int) -> int | None:
        return None if self.value is None else max(now_ns - self.at_ns, 0)

    def overdue(self, now_ns: int, deadline_ns: int) -> bool:
        """Whether the sweep under way has taken longer than it may: it hangs."""
        return self.running_since_ns is not None and now_ns - self.running_since_ns > deadline_ns


class CollectRunner(Generic[T]):
    """Calls ``collect(now_ns)`` every ``period_ns`` in one daemon thread; ``clock`` gives CLOCK_BOOTTIME in ns.

    ``latest`` never waits and may be called from any thread, the event loop's included. ``stop`` does not wait for
    a sweep that hangs: the thread ends with the process.
    """

    def __init__(self, name: str, collect: Callable[[int], T], period_ns: int, clock: Callable[[], int]) -> None:
        if period_ns <= 0:
            raise ValueError("period_ns must be more than 0")
        self.name = name
        self.period_ns = period_ns
        self._collect = collect
        self._clock = clock
        # Replaced whole, never changed: a reader has one state or the other, without a lock it could wait for.
        self._latest: Latest[T] = Latest()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"collect-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request(self) -> None:
        """Sweep now, or as soon as the one under way ends."""
        self._wake.set()

    def stop(self, timeout_seconds: float = 1.0) -> bool:
        """End the thread; whether it ended within the time."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def latest(self) -> Latest[T]:
        return self._latest

    def sweep(self) -> None:
        """One collection, in the caller's thread. What it raises is kept and counted, and the old value stays."""
        began_ns = self._clock()
        self._latest = replace(self._latest, running_since_ns=began_ns)
        try:
            value = self._collect(began_ns)
        except Exception as error:  # noqa: BLE001 - a defect in one reader must not end collection for good
            failure = f"{type(error).__name__}: {error}"
            failures = self._latest.failures + 1
            self._latest = replace(self._latest, running_since_ns=None, failures=failures, last_failure=failure)
        else:
            self._latest = replace(self._latest, value=value, at_ns=began_ns, running_since_ns=None)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            self.sweep()
            self._wake.wait(self.period_ns / _NANOS)


def aged(latest: Latest[Readings], name: str, period_ns: int, now_ns: int) -> Readings:
    """The readings as they are to be believed at ``now_ns``, with the collector's own age among them.

    Older than STALE_PERIODS periods, every value is gone and its quality STALE. Before the first sweep there is none.
    """
    age_ns = latest.age_ns(now_ns)
    fresh = age_ns is not None and age_ns <= STALE_PERIODS * period_ns
    samples = () if latest.value is None else latest.value.samples
    if not fresh:
        samples = tuple(replace(sample, value=None, quality=Quality.STALE) for sample in samples)
    quality = Quality.ABSENT if age_ns is None else Quality.OK
    own = Sample(f"collector/{name}/age", age_ns, Unit.NANOSECONDS, quality, now_ns)
    return Readings(tuple(sorted((*samples, own), key=lambda sample: sample.name)), latest.at_ns)
