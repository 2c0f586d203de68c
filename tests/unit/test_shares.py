"""What callers take of the server."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from controld.service.failures import CallError
from controld.service.gate import ANYONE, Caller
from controld.service.shares import MACHINE_MAX, Shares
from virialpb.identity import Role, make_identity
from virialpb.reasons import Reason

MOST = 400


def caller(role: Role, name: str) -> Caller:
    return Caller(make_identity("rack-7", role, name))


def take_all(shares: Shares, stack: ExitStack, who: Caller) -> int:
    """How many they get before they are refused."""
    for count in range(2 * MOST):
        try:
            stack.enter_context(shares.taken(who, MOST))
        except CallError as error:
            return count if error.details.reason is Reason.OVERLOADED else -1
    return 2 * MOST


def test_people_take_nothing_from_agents_and_controllers() -> None:
    shares = Shares("streams are open")
    with ExitStack() as stack:
        assert [take_all(shares, stack, caller(Role.USER, name)) for name in "abcde"] == [100, 100, 100, 100, 0]
        assert take_all(shares, stack, caller(Role.ADMIN, "ann")) == 0
        assert take_all(shares, stack, caller(Role.NODE, "n1")) == MACHINE_MAX
        assert take_all(shares, stack, caller(Role.CONTROLLER, "c1")) == MACHINE_MAX


def test_what_was_taken_is_given_back_however_it_ends() -> None:
    shares = Shares("calls are under way")
    alice = caller(Role.USER, "alice")
    for _ in range(2):
        with ExitStack() as stack:
            assert take_all(shares, stack, alice) == 100
    with pytest.raises(ZeroDivisionError), shares.taken(alice, 4):
        raise ZeroDivisionError
    with shares.taken(alice, 4):
        pass


def test_where_nobody_is_asked_all_share() -> None:
    with ExitStack() as stack:
        assert take_all(Shares("calls are under way"), stack, ANYONE) == MOST
