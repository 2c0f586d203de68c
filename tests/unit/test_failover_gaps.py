"""The gap that the failover benchmark reports: what counts, and from when on."""

from __future__ import annotations

from benchmarks.writers import Acks

MS = 1_000_000


def acks(*times_ms: int) -> Acks:
    return Acks([at_ms * MS for at_ms in times_ms])


def test_the_gap_begins_with_the_last_answer_before_the_kill() -> None:
    assert acks(0, 100, 110, 500, 505).longest_gap_ms(115 * MS) == 390.0


def test_what_was_slow_before_the_kill_does_not_count() -> None:
    assert acks(0, 900, 910, 950).longest_gap_ms(905 * MS) == 40.0


def test_a_second_silence_after_the_first_answer_counts_too() -> None:
    assert acks(0, 10, 300, 1_000).longest_gap_ms(10 * MS) == 700.0


def test_answers_are_counted_from_the_kill_on() -> None:
    assert acks(0, 10, 20).since(10 * MS) == 1
