"""A beat always fits into a control message."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from noded.core.beats import BeatClock, fitted
from noded.core.messages import Beat, Hello, Sample, SlotState, SlotStatus, TaskExit
from noded.link.convert import report_to_proto
from noded.run.slots import SLOTS_MAX
from tests.unit.noded_builders import FACTS, MS, SLOT, TOKEN
from virialpb.ids import Epoch, Incarnation, JobId, NodeUid, SlotId, Token
from virialpb.reasons import ExitReason, PrepareFailure

CONTROL_BYTES_MAX = 64 * 1024


def test_the_interval_a_controller_names_is_bounded() -> None:
    clock = BeatClock()
    clock.set_interval(1)
    assert clock.interval_ns == 50 * MS
    clock.set_interval(3_600_000)
    assert clock.interval_ns == 10_000 * MS


def test_a_short_exit_is_told_whole() -> None:
    status = SlotStatus(SLOT, TOKEN, SlotState.EXITED, exit=TaskExit(ExitReason.EXITED, 1, 0, "x" * 4096))
    assert fitted((status,), ()) == ((status,), ())


def test_the_end_of_a_tail_is_what_is_kept() -> None:
    exits = tuple(
        SlotStatus(
            SlotId(f"j.1.{rank}"), TOKEN, SlotState.EXITED, exit=TaskExit(ExitReason.EXITED, 1, 0, "é" * 3000 + "end")
        )
        for rank in range(64)
    )
    tails = [status.exit.stderr_tail for status in fitted(exits, ())[0] if status.exit is not None]
    assert len(tails) == 64
    assert all(tail.endswith("end") and "\ufffd" not in tail for tail in tails)


def test_readings_that_do_not_fit_are_counted() -> None:
    readings = tuple(Sample(f"t/{index:060}", 1, "count", "ok", 0) for index in range(1000))
    _, kept = fitted((), readings)
    assert kept[:-1] == readings[: len(kept) - 1]
    assert kept[-1].value == 1000 - (len(kept) - 1)
    assert fitted((), readings[:10]) == ((), readings[:10])


@given(
    slots=st.integers(0, SLOTS_MAX),
    tail=st.integers(0, 4096),
    metrics=st.integers(0, 256),
    name=st.text(max_size=64),
    detail=st.text(max_size=5000),
    gone=st.integers(0, SLOTS_MAX),
)
@settings(max_examples=40)
@example(slots=SLOTS_MAX, tail=4096, metrics=256, name="\u2603" * 64, detail="\u2603" * 5000, gone=0)
@example(slots=4, tail=4096, metrics=256, name="\U0001f600" * 60, detail="\U0001f600" * 5000, gone=SLOTS_MAX)
def test_a_full_beat_of_a_full_node_fits(
    slots: int, tail: int, metrics: int, name: str, detail: str, gone: int
) -> None:
    job = JobId("j" * 63)
    numbers = tuple((f"{index:03}{name}", 0.1) for index in range(metrics))
    facts = replace(FACTS, labels=(("rack", "r" * 200),))
    told_gone = tuple(SlotId(f"{job}.999.{rank}") for rank in range(min(gone, SLOTS_MAX - slots)))
    readings = tuple(
        Sample(f"temperature/{index:050}", 40_000, "millidegrees_celsius", "ok", 5) for index in range(400)
    )
    statuses = tuple(
        SlotStatus(
            SlotId(f"{job}.1000.{rank}"),
            Token(job, 1000, Epoch(1, 1 << 40)),
            SlotState.PREPARE_FAILED,
            port=65_535,
            exit=TaskExit(ExitReason.LEASE_EXPIRED, 255, 64, "\u2603" * (tail // 3)),
            progress_step=10**12,
            metrics=numbers,
            failure=PrepareFailure.WORKING_DIRECTORY_MISSING,
            failure_detail=detail,
            progress_age_ms=10**9,
        )
        for rank in range(slots)
    )
    beat = Beat(1 << 32, *fitted(statuses, readings))
    uid = Incarnation(NodeUid("u" * 32), "b" * 36, "n" * 32)
    assert report_to_proto(beat).ByteSize() <= CONTROL_BYTES_MAX
    hello = Hello(uid, facts, "pidns+cgroup", replace(beat, readings=()), Epoch(1, 1 << 40), gone_slots=told_gone)
    assert report_to_proto(hello).ByteSize() <= CONTROL_BYTES_MAX
    assert [status.slot for status in beat.slots] == [status.slot for status in statuses]
