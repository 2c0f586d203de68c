"""What a certificate proves is held against the state itself, so that no other change can come in between."""

from __future__ import annotations

from dataclasses import replace

from controld.core.commands import AdmitNode, CancelJob, SubmitJob
from controld.core.ids import Incarnation, JobId, NodeUid
from controld.core.outcome import Refused, Transition
from controld.core.transitions import decide
from tests.support_core import World, spec
from virialpb.reasons import Reason


def admission(world: World, uid: str, name: str) -> AdmitNode:
    node = next(iter(world.state.nodes.values()))
    return AdmitNode(
        incarnation=Incarnation(NodeUid(uid), "boot", "nonce"),
        name=name,
        advertise_address=node.advertise_address,
        fencing=node.fencing,
        cpu_millis=node.cpu_millis,
        memory_bytes=node.memory_bytes,
        certified=True,
    )


def test_a_certificate_of_one_node_does_not_speak_for_another() -> None:
    world = World(2)
    victim = next(iter(world.state.nodes.values()))
    stolen = admission(world, victim.uid, "other")
    refused = decide(world.state, stolen, world.now)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.subject) == (Reason.PERMISSION_DENIED, f"nodes/{victim.name}")
    own = replace(stolen, name=victim.name)
    assert isinstance(decide(world.state, own, world.now), Transition)
    fresh = replace(stolen, incarnation=Incarnation(NodeUid("new"), "boot", "nonce"))
    assert isinstance(decide(world.state, fresh, world.now), Transition)


def test_a_name_that_is_taken_stays_with_its_uid() -> None:
    world = World(2)
    victim = next(iter(world.state.nodes.values()))
    refused = decide(world.state, admission(world, "another-uid", victim.name), world.now)
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.ALREADY_EXISTS


def test_a_job_is_cancelled_by_its_owner_alone_where_that_is_asked() -> None:
    world = World(1)
    world.reply(SubmitJob("r1", spec(1), "a", "alice"))
    job = JobId("a")
    for stranger in ("bob", "", "alice2"):
        refused = decide(world.state, CancelJob(f"c-{stranger}", job, stranger), world.now)
        assert isinstance(refused, Refused)
        assert refused.reason is Reason.PERMISSION_DENIED
    assert isinstance(decide(world.state, CancelJob("c1", job, "alice"), world.now), Transition)
    assert isinstance(decide(world.state, CancelJob("c2", job), world.now), Transition)
