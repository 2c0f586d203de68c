"""When a beat is due, and how much of everything fits into one: control messages stay below 64 KiB."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from noded.core.messages import Sample, SlotStatus, TaskExit
from virialpb.lease import NS_PER_MS

INTERVAL_MS: Final = 1_000
INTERVAL_MS_MIN: Final = 50
INTERVAL_MS_MAX: Final = 10_000
COALESCE_NS: Final = 20 * NS_PER_MS
"""A change of a slot is told at once, but the changes of a whole gang within 20 ms share a beat."""
UNANSWERED_NS: Final = 3_000 * NS_PER_MS
"""No ack for so long: the bytes stop somewhere although nothing is closed. Dial another connection."""
UNANSWERED_NS_MAX: Final = 12_000 * NS_PER_MS
BEAT_BYTES_MAX: Final = 44 * 1024
"""So that a hello, with the slots that are gone beside it, is below 64 KiB too."""
READINGS_BYTES_MAX: Final = 28 * 1024
_READING_BYTES: Final = 32
"""Of tags, lengths and the two numbers of one reading, generously."""
_SLOT_BYTES: Final = 124
"""The same of one slot: token, port, step, age, failure, exit."""
_METRIC_BYTES: Final = 16
_TAIL_MAX: Final = 4096
_METRICS_MAX: Final = 32
_DETAIL_MAX: Final = 1024


class BeatClock:
    """`last_seq` only grows, over reconnects and incarnations alike, so that an ack names one beat for ever."""

    def __init__(self) -> None:
        self.interval_ns = INTERVAL_MS * NS_PER_MS
        self.last_seq = 0
        self.last_sent_ns = 0
        self.heard_ns = 0
        self._silences = 0

    def heard(self, now_ns: int) -> None:
        """The controller acknowledged, or a new session began."""
        self.heard_ns = now_ns
        self._silences = 0

    def next(self, now_ns: int) -> int:
        self.last_seq += 1
        self.last_sent_ns = now_ns
        return self.last_seq

    def due_ns(self, *, changed: bool) -> int:
        """When the next beat is to go out."""
        return self.last_sent_ns + (COALESCE_NS if changed else self.interval_ns)

    def set_interval(self, interval_ms: int) -> None:
        self.interval_ns = min(max(interval_ms, INTERVAL_MS_MIN), INTERVAL_MS_MAX) * NS_PER_MS

    def unanswered(self, now_ns: int) -> bool:
        """Whether to dial another connection: once for each spell of silence, each twice as long as the one before,
        so that agents do not keep a slow controller from getting well."""
        spell_ns = min(UNANSWERED_NS << self._silences, UNANSWERED_NS_MAX)
        if self.heard_ns + spell_ns > now_ns:
            return False
        self.heard_ns = now_ns
        self._silences = min(self._silences + 1, 8)
        return True


def fitted(
    statuses: tuple[SlotStatus, ...], readings: tuple[Sample, ...]
) -> tuple[tuple[SlotStatus, ...], tuple[Sample, ...]]:
    """Every slot, with its texts and metrics shortened as far as needed, and the first readings that still fit.

    Readings that do not are counted in a last one; the caller puts what matters most first.
    """
    shown = statuses
    for halvings in range(_TAIL_MAX.bit_length() + 1):
        shown = tuple(_shortened(status, halvings) for status in statuses)
        if sum(map(_slot_bytes, shown)) <= BEAT_BYTES_MAX:
            break
    room = min(READINGS_BYTES_MAX, BEAT_BYTES_MAX - sum(map(_slot_bytes, shown)))
    for position, reading in enumerate(readings):
        room -= len(reading.name.encode()) + len(reading.unit) + len(reading.quality) + _READING_BYTES
        if room < 0:
            left_out = Sample("collector/left_out", len(readings) - position, "count", "ok", 0)
            return shown, (*readings[:position], left_out)
    return shown, readings


def _slot_bytes(status: SlotStatus) -> int:
    tail = 0 if status.exit is None else len(status.exit.stderr_tail.encode("utf-8", "replace"))
    metrics = sum(len(name.encode()) + _METRIC_BYTES for name, _ in status.metrics)
    names = len(status.slot) + len(status.token.job)
    return _SLOT_BYTES + names + tail + metrics + len(status.failure_detail.encode("utf-8", "replace"))


def _shortened(status: SlotStatus, halvings: int) -> SlotStatus:
    return replace(
        status,
        exit=None if status.exit is None else _shortened_exit(status.exit, _TAIL_MAX >> halvings),
        metrics=status.metrics[: _METRICS_MAX >> halvings],
        failure_detail=status.failure_detail[: _DETAIL_MAX >> halvings],
    )


def _shortened_exit(task_exit: TaskExit, tail_max: int) -> TaskExit:
    tail = task_exit.stderr_tail.encode("utf-8", "replace")
    if len(tail) <= tail_max:
        return task_exit
    # The end says what went wrong. Cutting may split a character, and a replacement mark is longer than one byte.
    kept = tail[len(tail) - tail_max :].decode("utf-8", "ignore")
    return replace(task_exit, stderr_tail=kept)
