"""Small parts: what is in flight, which files are dropped, whether an order stands, copies of states."""

from __future__ import annotations

import typing
from dataclasses import replace

import pytest

from controld.core import commands
from controld.core.agent import DropDone, Go, Prepare, Stop
from controld.core.commands import CommitGo, ForgetCheckpoint, MarkSuspect, StopGeneration
from controld.core.ids import CheckpointId, JobId, NodeUid, SlotId, Token
from controld.core.model import Checkpoint, CheckpointState, LeaseState, Liveness, Member, ShardPart, Tier
from controld.core.state import Change
from controld.replica.drops import Drops
from controld.replica.flight import Flight, flight_key
from controld.replica.standing import stands
from controld.replica.states import fork
from tests.support_core import World, incarnation, spec
from virialpb.ids import Epoch
from virialpb.reasons import StopReason

JOB = JobId("train-1")


def test_every_command_has_a_key_of_its_own_kind() -> None:
    """A command this forgets would fall through to None, and everything of its kind would look in flight."""
    kinds = typing.get_args(commands.Command)
    node = incarnation("n0")
    given = {"incarnation": node, "slots": (SlotId("s"),), "checkpoints": (CheckpointId("c"),)}
    for kind in kinds:
        fields = typing.get_type_hints(kind)
        command = kind(**{name: given.get(name, "x") for name in fields})
        assert flight_key(command)[0] == kind.__name__


def test_what_only_differs_in_detail_is_the_same_flight() -> None:
    early = StopGeneration(JOB, 1, StopReason.NODE_LOST, highest_step=3)
    late = StopGeneration(JOB, 1, StopReason.NODE_SUSPECT, highest_step=9)
    assert flight_key(early) == flight_key(late)
    assert flight_key(early) != flight_key(CommitGo(JOB, 1, "a", 1))
    assert flight_key(MarkSuspect(incarnation("n0"))) != flight_key(MarkSuspect(incarnation("n0", "g2")))


def test_nothing_takes_off_twice_and_the_refused_are_held_back() -> None:
    flight = Flight(hold_back_ns=100)
    key = ("x",)
    assert flight.take_off(key, 0)
    assert not flight.take_off(key, 1_000)
    flight.land(key, 1_000, carried_out=False)
    assert not flight.take_off(key, 1_099)
    assert flight.take_off(key, 1_100)
    flight.land(key, 1_200, carried_out=True)
    assert flight.take_off(key, 1_200)
    assert len(flight) == 1


def running() -> World:
    world = World(3)
    world.submit(spec(ranks=2))
    world.run(5)
    return world


def token_of(world: World) -> Token:
    generation = world.state.current(JOB)
    assert generation is not None
    return Token(JOB, generation.number, world.state.epoch_of(generation))


def orders_given(world: World, kind: type[Prepare] | type[Go]) -> list[Prepare | Go]:
    return [o for a in world.agents.values() for o in a.orders if isinstance(o, kind)]


def test_orders_that_begin_something_stand_while_their_lease_does() -> None:
    world = running()
    go = orders_given(world, Go)[0]
    prepare = orders_given(world, Prepare)[0]
    stop = Stop(go.slot, go.token, 0, StopReason.CANCELLED)
    assert stands(world.state, go)
    assert stands(world.state, prepare)
    assert not stands(world.state, replace(go, token=go.token._replace(epoch=Epoch(1, 1))))
    assert not stands(world.state, replace(go, slot=SlotId("train-1.1.9")))
    generation = world.state.current(JOB)
    assert generation is not None

    def expired(member: Member) -> Member:
        return replace(member, lease=LeaseState.EXPIRED) if member.slot == go.slot else member

    lost = replace(generation, members=tuple(expired(m) for m in generation.members))
    world.state.apply((Change.put(lost),), world.state.revision + 1)
    assert not stands(world.state, go)
    assert stands(world.state, stop)
    world.do(StopGeneration(JOB, 1, StopReason.NODE_LOST))
    assert not [o for o in (*orders_given(world, Go), *orders_given(world, Prepare)) if stands(world.state, o)]


def dropping(world: World, tier: Tier) -> None:
    parts = (
        ShardPart(0, incarnation("n0").node_uid, 1, "d", "f"),
        ShardPart(1, incarnation("n1").node_uid, 1, "d", "f"),
    )
    record = Checkpoint(JOB, CheckpointId("c1"), 1, 1, 2, tier, "", CheckpointState.DROPPING, parts)
    world.state.apply((Change.put(record),), world.state.revision + 1)


@pytest.mark.parametrize("liveness", Liveness)
def test_local_files_are_gone_when_every_node_that_may_have_some_says_so(liveness: Liveness) -> None:
    """Also one that is silent or was given up: it may come back with files nobody would know of any more."""
    world = running()
    dropping(world, Tier.LOCAL)
    holder = world.state.nodes[NodeUid("uid-n1")]
    world.state.apply((Change.put(replace(holder, liveness=liveness)),), world.state.revision + 1)
    drops, report = Drops(), DropDone(JOB, CheckpointId("c1"))
    forget = ForgetCheckpoint(JOB, CheckpointId("c1"))
    assert drops.done(world.state, NodeUid("uid-n0"), report) is None
    assert drops.done(world.state, NodeUid("uid-n0"), report) is None
    assert drops.done(world.state, NodeUid("uid-n1"), report) == forget


def test_shared_files_are_gone_when_any_node_says_so_and_only_while_they_are_to_go() -> None:
    world = running()
    drops, report = Drops(), DropDone(JOB, CheckpointId("c1"))
    assert drops.done(world.state, NodeUid("uid-n0"), report) is None
    dropping(world, Tier.SHARED)
    assert drops.done(world.state, NodeUid("uid-n2"), report) == ForgetCheckpoint(JOB, CheckpointId("c1"))


def test_a_fork_shares_nothing_that_changes() -> None:
    world = running()
    dropping(world, Tier.LOCAL)
    copy = fork(world.state)
    assert copy == world.state
    before = fork(world.state)
    changes = [Change(key, None) for key in copy.created]
    copy.apply(changes, copy.revision + 1)
    assert not copy.created
    assert not copy.generations
    assert world.state == before
