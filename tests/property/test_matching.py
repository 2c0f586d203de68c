"""Laws of the matching engine on random clusters, and a slow obvious second opinion on feasibility."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from controld.core.ids import Incarnation, JobId, NodeUid
from controld.core.model import Device
from controld.core.spec import DeviceRequest, GangSpec, Resources, RestartWay
from controld.matching.engine import plan
from controld.matching.port import FreeDevice, Grant, NodeView, Pending, Snapshot, SpareOffer
from controld.matching.wire import LENGTH_BYTES, Answer, frame, from_planner
from virialpb.reasons import Unfit

ALL_WAYS = tuple(RestartWay)


@st.composite
def node_views(draw: st.DrawFn, index: int) -> NodeView:
    uid = NodeUid(f"n{index}")
    devices = tuple(
        FreeDevice(
            Device(f"g{i}", draw(st.sampled_from(["accelerator", "nic"]))),
            draw(st.sampled_from([0, 250, 500, 1000, 1000])),
        )
        for i in range(draw(st.integers(0, 4)))
    )
    return NodeView(
        uid=uid,
        name=str(uid),
        incarnation=Incarnation(uid, "b", "g"),
        unfit=draw(st.sampled_from([None, None, None, Unfit.HELD, Unfit.NOT_LIVE])),
        cpu_free_millis=draw(st.integers(0, 8)) * 500,
        memory_free_bytes=draw(st.integers(0, 8)) << 30,
        cpu_millis=4000,
        memory_bytes=8 << 30,
        devices=devices,
        attributes=(),
        fencing_weak=draw(st.booleans()),
        slots_free=draw(st.sampled_from([0, 1, 2, 192, 192, 192])),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    count = draw(st.integers(0, 6))
    return Snapshot(1, tuple(draw(node_views(i)) for i in range(count)))


@st.composite
def gangs(draw: st.DrawFn, index: int) -> Pending:
    devices: tuple[DeviceRequest, ...] = ()
    if draw(st.booleans()):
        share = draw(st.sampled_from([1000, 500, 250]))
        devices = (DeviceRequest("accelerator", 1 if share < 1000 else draw(st.integers(1, 2)), share),)
    return Pending(
        job=JobId(f"j{index}"),
        number=1,
        gang=GangSpec(draw(st.integers(1, 5)), draw(st.integers(0, 2)), draw(st.sampled_from(["node", "none"]))),
        resources=Resources(draw(st.integers(0, 4)) * 500, draw(st.integers(0, 4)) << 30, devices),
        priority=draw(st.integers(0, 2)),
        order=index,
        needs_strong_fencing=draw(st.booleans()),
        allow=ALL_WAYS,
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[Snapshot, tuple[Pending, ...]]:
    return draw(snapshots()), tuple(draw(gangs(i)) for i in range(draw(st.integers(0, 4))))


def check_grant(grant: Grant, gang: Pending, nodes: dict[NodeUid, NodeView]) -> None:
    ranks = [s.rank for s in grant.seats if s.rank is not None]
    assert ranks == list(range(gang.gang.ranks))
    spares = [s for s in grant.seats if s.rank is None]
    assert len(spares) + grant.spares_missing == gang.gang.spares
    if gang.gang.spread == "node":
        assert len({s.node for s in grant.seats}) == len(grant.seats)
    for seat in grant.seats:
        node = nodes[seat.node]
        assert node.unfit is None
        assert not (gang.needs_strong_fencing and node.fencing_weak)
        assert (seat.cpu_millis, seat.memory_bytes) == (gang.resources.cpu_millis, gang.resources.memory_bytes)
        wanted = Counter({r.kind: r.count * r.share_thousandths for r in gang.resources.devices})
        kinds = {d.device.key: d.device.kind for d in node.devices}
        got: Counter[str] = Counter()
        for device in seat.devices:
            got[kinds[device.device_key]] += device.share_thousandths
        assert got == wanted


@settings(max_examples=300, deadline=None)
@given(problems())
def test_a_plan_is_all_or_nothing_and_never_takes_more_than_there_is(
    problem: tuple[Snapshot, tuple[Pending, ...]],
) -> None:
    snapshot, pending = problem
    made = plan(snapshot, pending)
    nodes = {n.uid: n for n in snapshot.nodes}
    by_job = {p.job: p for p in pending}
    assert sorted([g.job for g in made.grants] + [u.job for u in made.unplaced]) == sorted(by_job)
    cpu: Counter[NodeUid] = Counter()
    seated: Counter[NodeUid] = Counter()
    memory: Counter[NodeUid] = Counter()
    shares: Counter[tuple[NodeUid, str]] = Counter()
    for grant in made.grants:
        check_grant(grant, by_job[grant.job], nodes)
        for seat in grant.seats:
            cpu[seat.node] += seat.cpu_millis
            seated[seat.node] += 1
            memory[seat.node] += seat.memory_bytes
            for device in seat.devices:
                shares[seat.node, device.device_key] += device.share_thousandths
    for uid, node in nodes.items():
        assert cpu[uid] <= node.cpu_free_millis
        assert seated[uid] <= node.slots_free
        assert memory[uid] <= node.memory_free_bytes
        for device in node.devices:
            assert shares[uid, device.device.key] <= device.free_thousandths
    for unplaced in made.unplaced:
        assert unplaced.reasons, unplaced


@settings(max_examples=150, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_input_changes_nothing(problem: tuple[Snapshot, tuple[Pending, ...]], rng: random.Random) -> None:
    snapshot, pending = problem
    nodes, gangs_ = list(snapshot.nodes), list(pending)
    rng.shuffle(nodes)
    rng.shuffle(gangs_)
    assert plan(replace(snapshot, nodes=tuple(nodes)), tuple(gangs_)) == plan(snapshot, pending)
    answer = Answer(1, plan(snapshot, pending))
    assert from_planner(frame(answer)[LENGTH_BYTES:]) == answer


def rooms(node: NodeView, gang: Pending) -> int:
    """How many ranks fit on a node, by trying each device subset: slow and obvious."""
    if node.unfit is not None or (gang.needs_strong_fencing and node.fencing_weak):
        return 0
    need = gang.resources
    limits = [gang.gang.ranks if gang.gang.spread == "none" else 1, node.slots_free]
    if need.cpu_millis:
        limits.append(node.cpu_free_millis // need.cpu_millis)
    if need.memory_bytes:
        limits.append(node.memory_free_bytes // need.memory_bytes)
    for request in need.devices:
        free = [d.free_thousandths for d in node.devices if d.device.kind == request.kind]
        if request.share_thousandths == 1000:
            limits.append(sum(1 for f in free if f == 1000) // request.count)
        else:
            limits.append(sum(f // request.share_thousandths for f in free))
    return max(0, min(limits))


@settings(max_examples=300, deadline=None)
@given(snapshots(), gangs(0))
def test_a_feasible_gang_is_found_exactly_when_there_is_one(snapshot: Snapshot, gang: Pending) -> None:
    feasible = sum(rooms(n, gang) for n in snapshot.nodes) >= gang.gang.ranks
    assert bool(plan(snapshot, (gang,)).grants) is feasible


@settings(max_examples=150, deadline=None)
@given(snapshots(), gangs(0), st.integers(0, 4), st.data())
def test_survivors_stay_and_the_spare_is_taken_first(
    snapshot: Snapshot, gang: Pending, lost: int, data: st.DataObject
) -> None:
    """After a first plan, losing one rank's node moves that rank alone, to the spare where one was held."""
    gang = replace(gang, gang=replace(gang.gang, spread="node"))
    first = plan(snapshot, (gang,)).grants
    if not first:
        return
    seats = first[0].seats
    ranks = [s for s in seats if s.rank is not None]
    spares = [s for s in seats if s.rank is None]
    victim = ranks[lost % len(ranks)]
    taken = {s.node: s for s in spares}

    def after(node: NodeView) -> NodeView:
        if node.uid == victim.node:
            return replace(node, unfit=Unfit.NOT_LIVE)
        seat = taken.get(node.uid)
        if seat is None:
            return node
        held = {d.device_key: d.share_thousandths for d in seat.devices}
        return replace(
            node,
            cpu_free_millis=node.cpu_free_millis - seat.cpu_millis,
            memory_free_bytes=node.memory_free_bytes - seat.memory_bytes,
            devices=tuple(
                replace(d, free_thousandths=d.free_thousandths - held.get(d.device.key, 0)) for d in node.devices
            ),
        )

    second = replace(
        gang,
        number=2,
        stay=tuple((s.rank, s.node) for s in ranks if s is not victim and s.rank is not None),
        offers=tuple(SpareOffer(s.node, s.cpu_millis, s.memory_bytes, s.devices) for s in spares),
    )
    made = plan(replace(snapshot, nodes=tuple(after(n) for n in snapshot.nodes)), (second,))
    if spares:
        assert made.grants
    for grant in made.grants:
        where = {s.rank: s.node for s in grant.seats if s.rank is not None}
        for seat in ranks:
            if seat is not victim and seat.rank is not None:
                assert where[seat.rank] == seat.node
        if spares and victim.rank is not None:
            assert where[victim.rank] in taken
