"""What a new leader times from when: each session from its takeover, but what it saw happen before from then."""

from __future__ import annotations

from dataclasses import replace

from controld.core.agent import Beat
from controld.core.commands import Command, ExpireLeases, MarkExpired
from controld.core.ids import NodeUid
from controld.core.model import Liveness
from controld.core.spec import SECOND_NS
from controld.health.view import Sighting, View
from controld.reconcile.liveness import assess
from tests.support_core import World, incarnation, spec

UID = NodeUid("uid-n0")


def takeover(world: World, *, at_s: int, sighted: Sighting | None) -> View:
    """A leader that takes over so many seconds after the world began, on its own clock."""
    view = View(started_ns=1000 * SECOND_NS + at_s * SECOND_NS)
    if sighted is not None:
        view.sighted[UID] = sighted
    return view


def expiries(world: World, view: View, at_s: int) -> list[Command]:
    now = replace(world.now, boottime_ns=1000 * SECOND_NS + at_s * SECOND_NS)
    return [
        c for c in assess(world.state, view, now, world.limits).commands if isinstance(c, MarkExpired | ExpireLeases)
    ]


def suspect_world() -> World:
    """One node with a running rank, silent long enough to be SUSPECT."""
    world = World(1)
    world.submit(spec(1))
    world.run(10)
    world.agents["n0"].cut = True
    world.run(8)
    assert world.state.nodes[UID].liveness is Liveness.SUSPECT
    return world


def sighting(*, suspect_s: int | None = None, since_s: int = 0, nonce: str = "g1") -> Sighting:
    suspect_ns = None if suspect_s is None else (1000 + suspect_s) * SECOND_NS
    return Sighting(incarnation("n0", nonce), (1000 + since_s) * SECOND_NS, suspect_ns)


def test_a_suspect_is_timed_from_when_it_was_seen_so() -> None:
    world = suspect_world()
    view = takeover(world, at_s=70, sighted=sighting(suspect_s=15))
    assert expiries(world, view, at_s=75) == []
    assert expiries(world, view, at_s=76) == [MarkExpired(incarnation("n0"))]


def test_everyone_else_is_timed_from_the_takeover() -> None:
    world = suspect_world()
    for sighted in (None, sighting()):
        view = takeover(world, at_s=70, sighted=sighted)
        assert expiries(world, view, at_s=130) == []
        assert expiries(world, view, at_s=131) == [MarkExpired(incarnation("n0"))]


def test_a_beat_counts_whatever_was_seen_before() -> None:
    world = suspect_world()
    view = takeover(world, at_s=70, sighted=sighting(suspect_s=15))
    world.hello(world.agents["n0"])
    view.sessions = world.view.sessions
    view.beat(UID, Beat(99), (1000 + 75) * SECOND_NS)
    assert expiries(world, view, at_s=135) == []
    assert expiries(world, view, at_s=136) == [MarkExpired(incarnation("n0"))]


def test_a_stall_of_the_new_leader_times_suspects_anew_too() -> None:
    world = suspect_world()
    view = takeover(world, at_s=70, sighted=sighting(suspect_s=15))
    view.rearm((1000 + 75) * SECOND_NS)
    assert expiries(world, view, at_s=135) == []
    assert expiries(world, view, at_s=136) == [MarkExpired(incarnation("n0"))]


def test_leases_of_a_former_life_are_timed_from_when_the_present_one_was_seen() -> None:
    world = World(1)
    world.submit(spec(1))
    world.run(10)
    world.join("n0", nonce="g2")
    (former,) = [m for g in world.state.generations.values() for m in g[1].ranks]
    seen = takeover(world, at_s=50, sighted=sighting(since_s=10, nonce="g2"))
    assert expiries(world, seen, at_s=70) == []
    assert expiries(world, seen, at_s=71) == [ExpireLeases(incarnation("n0"), (former.slot,))]
    # Another life still, which nobody has seen yet: from the takeover.
    other = takeover(world, at_s=50, sighted=sighting(since_s=10, nonce="g9"))
    assert expiries(world, other, at_s=110) == []
    assert expiries(world, other, at_s=111) == [MarkExpired(incarnation("n0", "g2"))], "which expires all of them"


def test_a_former_life_that_is_still_connected_is_timed_from_its_last_beat() -> None:
    """Between the commit of the new life and its session, the view holds the former one."""
    world = World(1)
    world.submit(spec(1))
    world.run(100)
    view = world.view
    session = view.sessions[UID]
    assert session.last_receipt_ns is not None
    assert view.life_since_ns(incarnation("n0", "g2")) == session.last_receipt_ns
    assert view.life_since_ns(incarnation("n0")) == session.since_ns
