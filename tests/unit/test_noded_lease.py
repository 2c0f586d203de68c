"""The lease clock and the leader epoch."""

from __future__ import annotations

import pytest

from noded.core.epochs import Admission, LeaderEpoch
from noded.core.lease import BEATS_REMEMBERED_MAX, LeaseClock
from virialpb.ids import Epoch
from virialpb.lease import lease_length_ns

SECOND = 1_000_000_000


def test_a_lease_is_shorter_than_the_controller_waits_by_rate_and_kill_budget() -> None:
    assert lease_length_ns(60_000) == 58_400_000_000
    assert lease_length_ns(5_000) == 3_950_000_000


def test_no_deadline_before_the_first_acknowledgement() -> None:
    clock = LeaseClock()
    clock.sent(1, 5 * SECOND, renews=True)
    assert clock.deadline_ns(60_000) is None


def test_a_deadline_counts_from_the_send_time_not_from_the_acknowledgement() -> None:
    clock = LeaseClock()
    clock.sent(1, 5 * SECOND, renews=True)
    clock.sent(2, 6 * SECOND, renews=True)
    assert clock.acknowledged(1)
    assert clock.deadline_ns(60_000) == 5 * SECOND + lease_length_ns(60_000)


def test_an_acknowledgement_covers_every_beat_up_to_it() -> None:
    clock = LeaseClock()
    for seq in (1, 2, 3):
        clock.sent(seq, seq * SECOND, renews=True)
    assert clock.acknowledged(2)
    assert clock.renewed_ns == 2 * SECOND


def test_a_late_or_repeated_acknowledgement_moves_nothing_back() -> None:
    clock = LeaseClock()
    for seq in (1, 2):
        clock.sent(seq, seq * SECOND, renews=True)
    assert clock.acknowledged(2)
    assert not clock.acknowledged(1)
    assert not clock.acknowledged(2)
    assert clock.renewed_ns == 2 * SECOND


def test_an_acknowledgement_of_a_beat_that_was_never_sent_is_worth_nothing() -> None:
    clock = LeaseClock()
    clock.sent(1, SECOND, renews=True)
    assert not clock.acknowledged(2)
    assert clock.renewed_ns is None


def test_a_beat_without_a_guardian_renews_nothing() -> None:
    clock = LeaseClock()
    clock.sent(1, SECOND, renews=True)
    clock.sent(2, 2 * SECOND, renews=False)
    assert clock.acknowledged(2)
    assert clock.renewed_ns == SECOND


def test_a_new_incarnation_inherits_no_renewal() -> None:
    clock = LeaseClock()
    clock.sent(1, SECOND, renews=True)
    clock.sent(2, 2 * SECOND, renews=True)
    clock.acknowledged(1)
    clock.reset()
    assert clock.deadline_ns(60_000) is None
    assert not clock.acknowledged(2)


def test_send_times_are_bounded() -> None:
    clock = LeaseClock()
    for seq in range(1, BEATS_REMEMBERED_MAX + 10):
        clock.sent(seq, seq, renews=True)
    assert not clock.acknowledged(9)
    assert clock.acknowledged(10)


@pytest.mark.parametrize(
    ("epoch", "admission", "seen"),
    [
        (Epoch(2, 6), Admission.REFUSED, Epoch(2, 7)),
        (Epoch(1, 99), Admission.REFUSED, Epoch(2, 7)),
        (Epoch(2, 7), Admission.CURRENT, Epoch(2, 7)),
        (Epoch(2, 8), Admission.NEWER, Epoch(2, 8)),
        (Epoch(3, 1), Admission.NEW_HISTORY, Epoch(3, 1)),
    ],
)
def test_the_highest_leader_epoch_is_kept_and_a_lower_one_refused(
    epoch: Epoch, admission: Admission, seen: Epoch
) -> None:
    leader = LeaderEpoch(Epoch(2, 7))
    assert leader.admit(epoch) is admission
    assert leader.seen == seen
