"""Join tokens: used once, whoever asks and however often; refusals say why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controld.core.commands import Command, CreateJoinToken, UseJoinToken
from controld.core.outcome import Refused, Reply, Transition
from controld.core.spec import SECOND_NS
from controld.core.transitions import decide, joins
from tests.support_core import World
from virialpb.reasons import Reason

SECRET, OTHER = "a" * 64, "b" * 64
KEY, THIEF = "1" * 64, "2" * 64
HOUR_NS = 3_600 * SECOND_NS
CREATE = CreateJoinToken(SECRET, "n7", HOUR_NS)
USE = UseJoinToken(SECRET, "n7", KEY)


@pytest.fixture
def world() -> World:
    made = World(1)
    assert made.reply(CREATE) == Reply("n7")
    return made


def refusal(world: World, command: Command) -> tuple[Reason, str]:
    found = decide(world.state, command, world.now)
    assert isinstance(found, Refused)
    return found.reason, found.detail


def test_a_token_is_used_once(world: World) -> None:
    assert world.reply(USE) == Reply("n7")
    assert world.state.join_tokens[SECRET].used_by == KEY
    assert refusal(world, replace(USE, key_sha256=THIEF)) == (Reason.PERMISSION_DENIED, "USED")


def test_the_same_key_may_ask_again_and_changes_nothing(world: World) -> None:
    world.reply(USE)
    again = decide(world.state, USE, world.now)
    assert again == Transition(reply=Reply("n7"))


def test_a_token_is_for_one_name_and_for_a_while(world: World) -> None:
    assert refusal(world, replace(USE, node="n8")) == (Reason.PERMISSION_DENIED, "NODE n7")
    assert refusal(world, replace(USE, secret_sha256=OTHER)) == (Reason.UNAUTHENTICATED, "UNKNOWN")
    world.now_ns += HOUR_NS
    assert refusal(world, USE) == (Reason.PERMISSION_DENIED, "EXPIRED")


def test_what_was_used_in_time_is_not_used_again_after_it(world: World) -> None:
    world.reply(USE)
    world.now_ns += HOUR_NS
    assert refusal(world, USE) == (Reason.PERMISSION_DENIED, "EXPIRED")


def test_made_again_it_is_the_same_token(world: World) -> None:
    world.reply(USE)
    assert decide(world.state, CREATE, world.now) == Transition(reply=Reply("n7"))
    assert refusal(world, replace(CREATE, node="n8")) == (Reason.ALREADY_EXISTS, "EXISTS")


def test_tokens_do_not_pile_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joins, "TOKENS_MAX", 1)
    another = CreateJoinToken(OTHER, "n8", HOUR_NS)
    assert refusal(world, another) == (Reason.QUOTA, "TOO_MANY")
    world.now_ns += HOUR_NS
    world.reply(another)
    assert set(world.state.join_tokens) == {OTHER}


def test_however_many_have_run_out_one_more_is_few_changes(world: World) -> None:
    """All of a large cluster joined once; a year later a single node is added. Found: more changes than etcd takes."""
    for number in range(3 * joins.DROPS_MAX):
        world.reply(CreateJoinToken(f"{number:064x}", f"m{number}", HOUR_NS))
    world.now_ns += HOUR_NS
    left: list[int] = []
    for made in ("c" * 64, "d" * 64, "e" * 64, "f" * 64):
        found = decide(world.state, CreateJoinToken(made, "n8", HOUR_NS), world.now)
        assert isinstance(found, Transition)
        assert len(found.changes) <= joins.DROPS_MAX + 1
        world.state.apply(found.changes, world.state.revision + 1)
        left.append(len(world.state.join_tokens))
    assert left == [2 * joins.DROPS_MAX + 2, joins.DROPS_MAX + 3, 4, 4]
