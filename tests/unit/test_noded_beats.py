"""A beat always fits into a control message."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from noded.core.beats import BeatClock, fitted, fitted_readings
from noded.core.messages import Beat, Sample, SlotState, SlotStatus, TaskExit
from noded.link.convert import report_to_proto
from tests.unit.noded_builders import MS, SLOT, TOKEN
from virialpb.ids import SlotId
from virialpb.reasons import ExitReason

CONTROL_BYTES_MAX = 64 * 1024


def test_the_interval_a_controller_names_is_bounded() -> None:
    clock = BeatClock()
    clock.set_interval(1)
    assert clock.interval_ns == 50 * MS
    clock.set_interval(3_600_000)
    assert clock.interval_ns == 10_000 * MS


def test_a_short_exit_is_told_whole() -> None:
    status = SlotStatus(SLOT, TOKEN, SlotState.EXITED, exit=TaskExit(ExitReason.EXITED, 1, 0, "x" * 4096))
    assert fitted((status,)) == (status,)


def test_the_end_of_a_tail_is_what_is_kept() -> None:
    exits = tuple(
        SlotStatus(
            SlotId(f"j.1.{rank}"), TOKEN, SlotState.EXITED, exit=TaskExit(ExitReason.EXITED, 1, 0, "é" * 3000 + "end")
        )
        for rank in range(64)
    )
    tails = [status.exit.stderr_tail for status in fitted(exits) if status.exit is not None]
    assert len(tails) == 64
    assert all(tail.endswith("end") and "\ufffd" not in tail for tail in tails)


def test_readings_that_do_not_fit_are_counted() -> None:
    readings = tuple(Sample(f"t/{index:060}", 1, "count", "ok", 0) for index in range(1000))
    kept = fitted_readings(readings)
    assert kept[:-1] == readings[: len(kept) - 1]
    assert kept[-1].value == 1000 - (len(kept) - 1)
    assert fitted_readings(readings[:10]) == readings[:10]


@given(slots=st.integers(0, 64), tail=st.integers(0, 4096), metrics=st.integers(0, 256))
def test_a_full_beat_of_a_full_node_fits(slots: int, tail: int, metrics: int) -> None:
    numbers = tuple((f"metric/{index:040}", 0.1) for index in range(metrics))
    task_exit = TaskExit(ExitReason.EXITED, 1, 0, "\u2603" * (tail // 3))
    statuses = tuple(
        SlotStatus(
            SlotId(f"{'j' * 40}.1.{rank}"),
            TOKEN,
            SlotState.EXITED,
            exit=task_exit,
            progress_step=10**9,
            metrics=numbers,
            failure_detail="d" * 5000 if rank < 4 else "",
        )
        for rank in range(slots)
    )
    readings = tuple(
        Sample(f"temperature/{index:050}", 40_000, "millidegrees_celsius", "ok", 5) for index in range(400)
    )
    beat = Beat(1, fitted(statuses), fitted_readings(readings))
    assert report_to_proto(beat).ByteSize() <= CONTROL_BYTES_MAX
