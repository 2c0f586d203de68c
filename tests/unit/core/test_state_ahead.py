"""A head that is ahead of its commits by two has the same stamps as one that was never ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from controld.core import keys
from controld.core.ids import Incarnation, NodeUid
from controld.core.model import Liveness, Node, Request
from controld.core.state import Change, State

KEY = keys.request("x")
STEPS = ("put", "delete", "nothing")


def change(step: str, number: int) -> tuple[Change, ...]:
    if step == "nothing":
        return ()
    return (Change(KEY, Request("x", str(number), "s", 1) if step == "put" else None),)


def sequences() -> Iterator[tuple[str, ...]]:
    return product(STEPS, repeat=4)


def differs(steps: tuple[str, ...]) -> bool:
    """Commit by commit, against the next one always applied before the former is confirmed."""
    commits = [change(step, number) for number, step in enumerate(steps, start=1)]
    truth, head = State(history=1), State(history=1)
    head.apply(commits[0], 0)
    for index, commit in enumerate(commits):
        revision = index + 1
        following = commits[index + 1] if index + 1 < len(commits) else ()
        head.apply(following, 0)
        truth.apply(commit, revision)
        head.confirm(commit, revision, {c.key: c for c in following})
        # What was put ahead has no epoch before its own commit, and what was deleted ahead keeps none.
        expected = dict(truth.created)
        if following and following[0].record is None:
            expected = {}
        elif following:
            expected.setdefault(KEY, 0)
        if head.created != expected:
            return True
    return (head.requests, head.created, head.modified) != (truth.requests, truth.created, truth.modified)


def test_stamps_are_those_of_commits_in_turn() -> None:
    assert not [steps for steps in sequences() if differs(steps)]


def test_they_are_not_where_what_lies_on_top_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation that is started anew would have the epoch of the one that was deleted."""
    real = State.confirm

    def confirm(self: State, changes: tuple[Change, ...], revision: int, over: object) -> None:
        del over
        real(self, changes, revision)

    monkeypatch.setattr(State, "confirm", confirm)
    assert [steps for steps in sequences() if differs(steps)]


def test_a_key_is_brought_back_with_its_stamps() -> None:
    origin, state = State(history=1), State(history=1)
    for each in (origin, state):
        each.apply((Change(KEY, Request("x", "1", "s", 1)),), 5)
    state.apply((Change(KEY, None), Change.put(Request("y", "1", "s", 1))), 0)
    state.apply((Change(KEY, Request("x", "2", "s", 1)),), 0)
    for key in (KEY, keys.request("y")):
        state.reset(key, origin)
    assert (state.requests, state.created, state.modified) == (origin.requests, origin.created, origin.modified)
    with pytest.raises(ValueError, match="unknown key"):
        state.record("nonsense/1")


def test_a_key_is_brought_back_at_once_and_takes_no_name_from_another() -> None:
    """Node one gave its name to two, which is under way; what was decided on top of that about one is taken back."""
    one, two = node("u1", "n1"), node("u2", "n2")
    committed, head = State(history=1), State(history=1)
    for each in (committed, head):
        each.apply((Change.put(one), Change.put(two)), 5)
    renamed, gone = replace(two, name="n1"), Change(keys.node(one.uid), None)
    head.apply((gone, Change.put(renamed)), 0)  # under way
    head.apply((Change.put(replace(one, name="n3")),), 0)  # on top of it, and taken back
    head.reset(keys.node(one.uid), committed, [gone])
    assert head.node_named("n1") == renamed
    assert head.node_named("n2") is head.node_named("n3") is None
    assert keys.node(one.uid) not in head.created


def node(uid: str, name: str) -> Node:
    return Node(NodeUid(uid), name, Incarnation(NodeUid(uid), "boot", "nonce"), Liveness.LIVE, "h", "pidns", 1, 1)
