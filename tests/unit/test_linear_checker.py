"""The checker of histories, on histories written by hand: each defect it is there for, and what is none."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from tests.linear.checker import Operation, UndecidedError, check, check_each
from tests.linear.models import (
    ALREADY_EXISTS,
    CANCELLED,
    NOT_FOUND,
    OK,
    PENDING,
    Cancel,
    HoldCall,
    Holds,
    JobCall,
    Jobs,
    Place,
    ReadHold,
    ReadJob,
    Release,
    Submit,
)

K = "k"


def hold(call: HoldCall, invoked: int, returned: int | None, reply: Hashable = None) -> Operation[HoldCall]:
    return Operation("c", call, invoked, returned, reply)


def job(call: JobCall, invoked: int, returned: int | None, reply: Hashable = None) -> Operation[JobCall]:
    return Operation("c", call, invoked, returned, reply)


def place(reason: str, invoked: int, returned: int | None) -> Operation[HoldCall]:
    return hold(Place(K, reason), invoked, returned, None if returned is None else OK)


def read(reason: str | None, invoked: int, returned: int) -> Operation[HoldCall]:
    return hold(ReadHold(K), invoked, returned, reason)


def test_one_after_another_is_fine() -> None:
    history = [place("a", 0, 1), read("a", 2, 3), hold(Release(K), 4, 5, OK), read(None, 6, 7)]
    assert check(Holds(), history) is None
    assert check(Holds(), []) is None


def test_concurrent_operations_may_take_effect_in_either_order() -> None:
    for seen in ("a", "b"):
        assert check(Holds(), [place("a", 0, 10), place("b", 5, 15), read(seen, 20, 21)]) is None
    both = [place("a", 0, 10), place("b", 5, 15), read("a", 20, 21), read("b", 22, 23)]
    assert check(Holds(), both) is not None


def test_a_lost_acknowledged_write_is_caught() -> None:
    found = check(Holds(), [place("a", 0, 1), read(None, 2, 3)])
    assert found is not None
    assert (found.done, found.of, found.state) == (1, 2, "a")
    assert [operation.call for operation in found.stuck] == [ReadHold(K)]
    assert "none of these can be next" in str(found)


def test_a_stale_read_is_caught() -> None:
    assert check(Holds(), [place("a", 0, 1), place("b", 2, 3), read("a", 4, 5)]) is not None
    assert check(Holds(), [place("a", 0, 1), place("b", 2, 3), read("b", 2, 3), read("a", 4, 5)]) is not None
    # While the write is under way either may be read, but nobody reads the old one after the new one.
    assert check(Holds(), [place("a", 0, 1), place("b", 2, 9), read("a", 3, 4), read("b", 5, 6)]) is None
    assert check(Holds(), [place("a", 0, 1), place("b", 2, 9), read("b", 3, 4), read("a", 5, 6)]) is not None


def test_a_write_that_is_applied_twice_is_caught() -> None:
    again = [place("a", 0, 1), hold(Release(K), 2, 3, OK), read(None, 4, 5), read("a", 6, 7)]
    assert check(Holds(), again) is not None


def test_a_refusal_of_what_stands_is_caught() -> None:
    assert check(Holds(), [place("a", 0, 1), hold(Release(K), 2, 3, NOT_FOUND)]) is not None
    assert check(Holds(), [place("a", 0, 5), hold(Release(K), 2, 3, NOT_FOUND), read("a", 6, 7)]) is None
    assert check(Holds(), [hold(Release(K), 2, 3, OK)]) is not None


def test_an_unknown_outcome_may_come_late_or_never_but_once() -> None:
    lost = place("a", 0, None)
    assert check(Holds(), [lost, read(None, 5, 6)]) is None
    assert check(Holds(), [lost, read(None, 5, 6), read("a", 50, 51)]) is None
    assert check(Holds(), [lost, read("a", 5, 6), read(None, 50, 51)]) is not None
    assert check(Holds(), [lost, read("a", 5, 6), hold(Release(K), 7, 8, OK), read("a", 50, 51)]) is not None
    # Not before it was called.
    assert check(Holds(), [place("a", 10, None), read("a", 5, 6)]) is not None


def test_only_one_of_two_authors_gets_the_id() -> None:
    two = [job(Submit(K, "x"), 0, 5, OK), job(Submit(K, "y"), 1, 6, ALREADY_EXISTS)]
    assert check(Jobs(), [*two, job(ReadJob(K), 7, 8, ("x", PENDING))]) is None
    assert check(Jobs(), [*two, job(ReadJob(K), 7, 8, ("y", PENDING))]) is not None
    assert check(Jobs(), [job(Submit(K, "x"), 0, 5, OK), job(Submit(K, "y"), 1, 6, OK)]) is not None


def test_a_cancelled_job_stays_cancelled() -> None:
    ended = [job(Submit(K, "x"), 0, 1, OK), job(Cancel(K), 2, 3, OK)]
    assert check(Jobs(), [*ended, job(Cancel(K), 4, 5, OK), job(ReadJob(K), 6, 7, ("x", CANCELLED))]) is None
    assert check(Jobs(), [*ended, job(ReadJob(K), 6, 7, ("x", PENDING))]) is not None
    assert check(Jobs(), [*ended, job(Cancel(K), 4, 5, NOT_FOUND)]) is not None
    assert (
        check(Jobs(), [job(Cancel(K), 0, None), job(Submit(K, "x"), 1, 2, OK), job(ReadJob(K), 3, 4, None)]) is not None
    )


def test_each_key_is_an_object_of_its_own() -> None:
    history = [
        hold(Place("a", "1"), 0, 1, OK),
        hold(ReadHold("b"), 2, 3, None),
        hold(Place("b", "2"), 4, 5, OK),
        hold(ReadHold("b"), 6, 7, None),
    ]
    assert set(check_each(Holds(), history, lambda call: call.key)) == {"b"}


def test_a_search_that_would_not_end_says_so() -> None:
    many = [place(str(number), 0, 100) for number in range(20)]
    with pytest.raises(UndecidedError):
        check(Holds(), [*many, read("none of them", 101, 102)], steps_max=10_000)
