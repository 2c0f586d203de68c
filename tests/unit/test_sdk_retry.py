"""When a failed call is sent again, and after how long."""

from __future__ import annotations

import random

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virial._retry import DELAY_ELECTION_MAX_MS, DELAY_MAX_MS, Attempts, leader_address
from virialpb.errors import TABLE, ErrorDetails, details_for
from virialpb.reasons import Reason

FAR_S = 1e9


def attempts(deadline_s: float = FAR_S, seed: int = 1) -> Attempts:
    return Attempts(deadline_s, random.Random(seed))


def transport(code: grpc.StatusCode) -> ErrorDetails:
    return ErrorDetails(reason=None, message="", code=code)


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_retried_exactly_when_its_row_says_so(reason: Reason) -> None:
    delay_s = attempts().delay_s(details_for(reason), 0.0)
    assert (delay_s is not None) == TABLE[reason].retryable


@pytest.mark.parametrize("code", grpc.StatusCode)
def test_of_the_transport_s_own_codes_a_broken_connection_and_an_overdue_try_are_retried(code: grpc.StatusCode) -> None:
    assert (attempts(deadline_s=5.0).delay_s(transport(code), 5.0) is not None) is False
    tried_again = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert (attempts().delay_s(transport(code), 0.0) is not None) == (code in tried_again)


@given(seed=st.integers(), steps=st.integers(1, 60))
def test_delays_grow_to_a_bound_and_stay_within_half_of_it(seed: int, steps: int) -> None:
    tries = attempts(seed=seed)
    delays = [tries.delay_s(transport(grpc.StatusCode.UNAVAILABLE), 0.0) for _ in range(steps)]
    for number, delay_s in enumerate(delays):
        full_s = min(0.05 * 2**number, DELAY_MAX_MS / 1000)
        assert delay_s is not None
        assert full_s / 2 <= delay_s <= full_s


def test_the_server_s_hint_is_waited_for_but_never_beyond_the_bound() -> None:
    details = details_for(Reason.OVERLOADED)
    assert details.retry_after_ms == 500
    first_s = attempts().delay_s(details, 0.0)
    assert first_s is not None
    assert 0.25 <= first_s <= 0.5
    quota_s = attempts().delay_s(details_for(Reason.QUOTA), 0.0)  # hints 5 s
    assert quota_s is not None
    assert quota_s <= DELAY_MAX_MS / 1000


def test_nothing_is_retried_that_would_end_after_the_deadline() -> None:
    tries = attempts(deadline_s=10.0)
    assert tries.delay_s(transport(grpc.StatusCode.UNAVAILABLE), 9.0) is not None
    assert tries.delay_s(transport(grpc.StatusCode.UNAVAILABLE), 9.99) is None


def test_two_clients_do_not_come_back_at_the_same_moment() -> None:
    unavailable = transport(grpc.StatusCode.UNAVAILABLE)
    assert attempts(seed=1).delay_s(unavailable, 0.0) != attempts(seed=2).delay_s(unavailable, 0.0)


def test_the_leader_s_address_is_taken_from_the_answer() -> None:
    assert leader_address(details_for(Reason.NOT_LEADER, metadata={"leader": "10.0.0.2:7600"})) == "10.0.0.2:7600"
    assert leader_address(details_for(Reason.NO_LEADER)) == ""


def test_a_leader_is_asked_at_once_the_first_time_it_is_named() -> None:
    tries = attempts()
    first, second = (details_for(Reason.NOT_LEADER, metadata={"leader": address}) for address in ("a:1", "b:1"))
    assert [tries.delay_s(details, 0.0) for details in (first, second)] == [0.0, 0.0]
    for details in (first, second, first):  # they name each other
        delay_s = tries.delay_s(details, 0.0)
        assert delay_s is not None
        assert delay_s > 0
    assert attempts(deadline_s=1.0).delay_s(first, 1.0) is None


def test_a_client_stays_near_the_end_of_an_election() -> None:
    tries = attempts()
    assert tries.delay_s(details_for(Reason.NO_LEADER), 0.0) is not None
    for _ in range(20):
        delay_s = tries.delay_s(transport(grpc.StatusCode.UNAVAILABLE), 0.0)  # the former leader's address
        assert delay_s is not None
        assert delay_s <= DELAY_ELECTION_MAX_MS / 1000


def test_one_of_several_that_says_nothing_is_not_waited_for_until_the_deadline() -> None:
    tries = attempts(deadline_s=100.0)
    overdue = transport(grpc.StatusCode.DEADLINE_EXCEEDED)
    waits: list[float] = []
    for _ in range(7):
        waits.append(tries.patience_s(10.0, addresses=3))
        assert tries.delay_s(overdue, 10.0) is not None
    assert waits == [3.0, 6.0, 12.0, 24.0, 48.0, 90.0, 90.0]
    assert attempts(deadline_s=100.0).patience_s(10.0, addresses=1) == 90.0
