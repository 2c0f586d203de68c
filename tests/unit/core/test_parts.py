"""A pass in pieces: together they decide what one at a single moment does, and each survives what came between."""

from __future__ import annotations

import pytest

from controld.core import keys
from controld.core.ids import NodeUid
from controld.core.model import TaskExit
from controld.core.state import Change
from controld.reconcile import tick as ticking
from controld.reconcile.decisions import Pass
from controld.reconcile.tick import parts, tick
from tests.support_core import World, spec
from virialpb.ids import Epoch
from virialpb.reasons import ExitReason


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticking, "PART_MEMBERS", 2)
    monkeypatch.setattr(ticking, "PART_SESSIONS", 1)


def world() -> World:
    made = World(6)
    for number in range(4):
        made.submit(spec(2), f"r{number}")
    made.run(3)
    made.submit(spec(2), "waits")
    agent = next(agent for agent in made.agents.values() if agent.slots)
    agent.exit(next(iter(agent.slots)), TaskExit(ExitReason.EXITED, 1))
    made.view.beat(agent.incarnation.node_uid, agent.beat(), made.now_ns)
    return made


@pytest.mark.usefixtures("small")
def test_the_pieces_decide_what_the_whole_decides() -> None:
    one, other = world(), world()
    whole = tick(one.state, one.view, one.now, Epoch(1, 1), one.limits)
    pieces = [
        Pass(other.state, other.view, other.now, Epoch(1, 1), other.limits) for _ in parts(other.state, other.view)
    ]
    assert len(pieces) > 8
    for p, part in zip(pieces, parts(other.state, other.view), strict=True):
        part(p)
    assert tuple(c for p in pieces for c in p.commands) == whole.commands
    assert tuple(o for p in pieces for o in p.orders) == whole.orders
    assert tuple(w for p in pieces for w in p.pending) == whole.pending
    assert whole.commands or whole.orders
    assert whole.pending


@pytest.mark.usefixtures("small")
def test_what_is_gone_by_the_time_its_piece_comes_does_no_harm() -> None:
    made = world()
    for part in parts(made.state, made.view):
        p = Pass(made.state, made.view, made.now, Epoch(1, 1), made.limits)
        part(p)
        assert p.broken == []
        for job in list(made.state.jobs)[-1:]:
            numbers = made.state.generations.get(job, {})
            made.state.apply([Change(keys.generation(job, n), None) for n in list(numbers)], 0)
            made.state.apply((Change(keys.job(job), None),), 0)
        for uid in list(made.view.sessions)[-1:]:
            del made.view.sessions[uid]
            made.state.apply((Change(keys.node(NodeUid(uid)), None),), 0)
