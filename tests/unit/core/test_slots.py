"""A node takes so many tasks, however small: its agent's beat has no room for more, and its guardian refuses them."""

from __future__ import annotations

from dataclasses import replace

from controld.core.capacity import fits
from controld.core.commands import StartGeneration
from controld.core.ids import Incarnation, JobId, NodeUid, SlotId
from controld.core.model import Liveness, Member, Node
from controld.core.outcome import Refused
from controld.core.spec import JobSpec, Resources
from controld.core.transitions import decide
from controld.matching.engine import plan
from controld.matching.port import NodeView, Pending, Snapshot, SpareOffer
from controld.reconcile.snapshot import snapshot
from noded.core import slottable
from noded.run import slots
from tests.support_core import World, spec
from virialpb.ids import NODE_SLOTS_MAX
from virialpb.reasons import Reason, Unfit

SMALL = Resources(1, 1)


def view(uid: str, slots_free: int) -> NodeView:
    incarnation = Incarnation(NodeUid(uid), "b", "g")
    return NodeView(NodeUid(uid), uid, incarnation, None, 1 << 20, 1 << 40, 1 << 20, 1 << 40, (), (), False, slots_free)


def gang(ranks: int, *, spread: str = "none", spares: int = 0, offers: tuple[SpareOffer, ...] = ()) -> Pending:
    shape = replace(spec(ranks).gang, spread=spread, spares=spares)
    return Pending(JobId("j"), 1, shape, SMALL, 0, 1, offers=offers)


def anywhere(ranks: int) -> JobSpec:
    """Ranks that may all be on one node."""
    asked = spec(ranks)
    return replace(asked, gang=replace(asked.gang, spread="none"), resources=SMALL)


def test_all_ends_have_the_same_bound() -> None:
    assert slots.SLOTS_MAX == slottable.SLOTS_MAX == NODE_SLOTS_MAX


def test_a_plan_fills_no_node_beyond_it() -> None:
    made = plan(Snapshot(1, (view("a", 3), view("b", 2))), (gang(5),))
    assert sorted(seat.node for seat in made.grants[0].seats) == ["a", "a", "a", "b", "b"]
    made = plan(Snapshot(1, (view("a", 3), view("b", 2))), (gang(6),))
    assert [(c.reason, dict(c.numbers)) for c in made.unplaced[0].reasons] == [
        (Unfit.TOO_FEW_NODES, {"ranks_fit": 5, "ranks_needed": 6})
    ]
    made = plan(Snapshot(1, (view("a", 0), view("b", 0))), (gang(1),))
    assert [(c.reason, c.nodes) for c in made.unplaced[0].reasons] == [(Unfit.SLOTS, 2)]


def test_a_spare_takes_a_place_and_gives_its_own_back() -> None:
    made = plan(Snapshot(1, (view("a", 1),)), (gang(1, spares=1),))
    assert [seat.rank for seat in made.grants[0].seats] == [0]
    assert made.grants[0].spares_missing == 1
    offered = gang(1, offers=(SpareOffer(NodeUid("a"), 1, 1, ()),))
    assert plan(Snapshot(1, (view("a", 0),)), (replace(offered, allow=spec(1).restart.allow),)).grants


def test_what_leases_hold_is_counted_where_the_planner_sees_it() -> None:
    world = World(1, cpu_millis=10_000)
    world.submit(anywhere(2))
    world.run(1)
    [seen] = snapshot(world.state, world.view, world.now).nodes
    held = sum(m.lease.holds for g in world.state.leased() for m in g.members)
    assert held
    assert seen.slots_free == NODE_SLOTS_MAX - held


def test_a_plan_that_comes_too_late_for_it_is_refused() -> None:
    """Two plans on one snapshot, or a planner of an older version."""
    world = World(1, cpu_millis=1 << 20)
    job = world.submit(anywhere(NODE_SLOTS_MAX + 1))
    [node] = world.state.nodes.values()
    members = tuple(
        Member(SlotId(f"{job}.1.{rank}"), rank, node.uid, node.incarnation, 1, 1) for rank in range(NODE_SLOTS_MAX + 1)
    )
    refused = decide(world.state, StartGeneration(job, 1, members), world.now)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.detail) == (Reason.STALE, "slots")
    big = Node(node.uid, "n", node.incarnation, Liveness.LIVE, "a", "pidns", 1 << 20, 1 << 40)
    assert fits(big, members[1:], members[:1], 0) == "slots"
    assert fits(big, members[2:], members[:1], 0) == ""
