"""A lost node is removed for good once nothing of it can be needed, and never before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controld.core import keys
from controld.core.commands import CancelJob, RemoveNode
from controld.core.draft import Draft
from controld.core.ids import CheckpointId, NodeUid
from controld.core.model import Checkpoint, CheckpointState, Liveness, ShardPart, Tier
from controld.core.outcome import Refused, Transition
from controld.core.state import Change
from controld.core.transitions import nodes
from controld.service.failures import removal_refused
from tests.support_core import World, spec
from virialpb.reasons import Reason

LOST_SECONDS = 120


def refusal(world: World, name: str = "n0", request_id: str = "r") -> Refused:
    outcome = world.do(RemoveNode(request_id, name))
    assert isinstance(outcome, Refused)
    return outcome


def lost(world: World, name: str = "n0") -> NodeUid:
    """Cut off until its leases have ended."""
    world.agents[name].cut = True
    world.run(LOST_SECONDS)
    uid = world.agents[name].incarnation.node_uid
    assert world.state.nodes[uid].liveness is Liveness.EXPIRED
    return uid


def test_a_lost_node_is_forgotten_and_the_same_request_is_answered_again() -> None:
    world = World(3)
    uid = lost(world)
    assert world.reply(RemoveNode("r", "n0")).subject == uid
    assert uid not in world.state.nodes
    assert world.kinds()[-1] == "node.removed"
    assert world.reply(RemoveNode("r", "n0")).subject == uid
    assert refusal(world, request_id="r2").reason is Reason.NOT_FOUND
    world.run(10)


def test_one_that_comes_back_joins_as_a_new_one() -> None:
    world = World(2)
    uid = lost(world)
    world.reply(RemoveNode("r", "n0"))
    agent = world.join("n0", nonce="g2")
    assert world.state.nodes[uid].incarnation == agent.incarnation
    world.submit(spec(2))
    world.run(5)
    assert agent.slots


def test_one_that_is_not_lost_stays() -> None:
    world = World(2)
    assert refusal(world).detail == "LIVENESS LIVE"
    world.agents["n0"].cut = True
    world.run(12)
    assert refusal(world).detail == "LIVENESS SUSPECT"


def leases_hold_it() -> None:
    """Whatever is stored of its liveness: a lease that has not ended may still be used there."""
    world = World(3)
    job = world.submit(spec(3))
    world.run(5)
    uid = world.agents["n0"].incarnation.node_uid
    world.state.apply(
        (Change.put(replace(world.state.nodes[uid], liveness=Liveness.EXPIRED)),), world.state.revision + 1
    )
    found = refusal(world)
    assert (found.reason, found.detail) == (Reason.NOT_NOW, f"LEASES {job}")
    assert uid in world.state.nodes


def test_one_with_leases_that_have_not_ended_stays() -> None:
    leases_hold_it()


def test_shards_that_are_nowhere_else_keep_it_until_their_job_has_ended() -> None:
    world = World(3)
    job = world.submit(spec(2))
    world.run(5)
    uid = lost(world)
    parts = (ShardPart(0, uid, 1, "d", "f"), ShardPart(1, NodeUid("uid-n1"), 1, "d", "f"))
    checkpoint = Checkpoint(
        job, CheckpointId("c-1"), 1, 5, 2, Tier.LOCAL, "", CheckpointState.COMMITTED, parts, begin_time_unix_ns=1
    )
    world.state.apply((Change.put(checkpoint),), world.state.revision + 1)
    assert refusal(world).detail == f"CHECKPOINTS {job}"
    world.reply(CancelJob("c", job))
    world.run(10)
    world.reply(RemoveNode("r9", "n0"))
    assert keys.node(uid) not in world.state.modified


@pytest.mark.parametrize(
    ("detail", "words"),
    [
        ("LIVENESS SUSPECT", "it is SUSPECT, not lost; stop noded there"),
        ("LEASES train-1", "train-1 may still run there; wait until"),
        ("CHECKPOINTS train-1", "nowhere else; bring the node back, or cancel"),
    ],
)
def test_what_an_operator_is_told(detail: str, words: str) -> None:
    details = removal_refused(Refused(Reason.NOT_NOW, "nodes/n0", detail=detail)).details
    assert words in details.message
    assert "removing nodes/n0 cannot be done" in details.message


def test_the_tests_catch_a_removal_that_looks_at_no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind(Draft):
        def held_on(self, uid: NodeUid) -> tuple[()]:  # type: ignore[override]
            del uid
            return ()

    monkeypatch.setattr(nodes, "Draft", Blind)
    with pytest.raises(AssertionError):
        leases_hold_it()


def test_a_transition_is_what_it_is() -> None:
    world = World(1)
    uid = lost(world)
    outcome = nodes.remove(world.state, RemoveNode("r", "n0"), world.now)
    assert isinstance(outcome, Transition)
    assert Change(keys.node(uid), None) in outcome.changes
