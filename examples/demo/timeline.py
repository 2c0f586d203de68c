"""The readable part: a line for each thing that happened, with the seconds since the demo began."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import virial
from virial.cli.words import event_line
from virial.models import Event, Job


class Printer:
    """Lines from several threads, each whole."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        with self._lock:
            print(f"[{time.monotonic() - self._started_s:6.1f} s] {text}", flush=True)


@dataclass(slots=True)
class Seen:
    """An event, and when it reached the demo on its own monotonic clock."""

    event: Event
    at_s: float


@dataclass(slots=True)
class Events:
    """Follows a cluster's events: prints each, keeps all."""

    client: virial.SyncClient
    printer: Printer
    seen: list[Seen] = field(default_factory=list[Seen])
    changed: threading.Condition = field(default_factory=threading.Condition)
    closed: bool = False

    def start(self) -> None:
        threading.Thread(target=self._follow, name="events", daemon=True).start()

    def _follow(self) -> None:
        try:
            for event in self.client.watch_events():
                with self.changed:
                    self.seen.append(Seen(event, time.monotonic()))
                    self.changed.notify_all()
                if event.kind not in QUIET:
                    self.printer.say(event_line(event))
        except virial.VirialError as error:
            if not self.closed:
                self.printer.say(f"the event stream ended: {error}")

    def first(self, kind: str, *, node: str = "", after_s: float = 0.0) -> Seen | None:
        with self.changed:
            return next(
                (s for s in self.seen if s.event.kind == kind and s.at_s >= after_s and node in ("", s.event.node)),
                None,
            )

    def count(self, kind: str) -> int:
        with self.changed:
            return sum(1 for s in self.seen if s.event.kind == kind)


# They repeat what a neighbouring line says.
QUIET = frozenset({"checkpoint.begun", "checkpoint.dropped", "inventory.changed", "lease.released"})


@dataclass(slots=True)
class Progress:
    """The highest step seen of each generation, and when a generation's steps first went past a mark."""

    printer: Printer
    highest: dict[int, int] = field(default_factory=dict[int, int])
    first_new_at_s: dict[int, float] = field(default_factory=dict[int, float])
    _said: int = -1

    def note(self, job: Job) -> None:
        generation = job.current
        if generation is None or job.progress_step is None:
            return
        number, step = generation.number, job.progress_step
        if step <= self.highest.get(number, -1):
            return  # a rank that has ended no longer says how far it was
        self.highest[number] = step
        if step > generation.restored_step:
            self.first_new_at_s.setdefault(number, time.monotonic())
        if step // 20 != self._said:
            self._said = step // 20
            self.printer.say(f"job {job.id}: generation {number} is at step {step}")
