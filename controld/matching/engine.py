"""plan(snapshot, pending) -> Plan: the first engine behind the port.

Every rank of a gang has one shape, so a gang fits if and only if the rooms of the nodes it may use add up to
its ranks: taking the tightest node first loses no feasible placement. Gangs are served by priority, then in the
order they came; each takes all it needs or nothing. Ties fall to the lower node uid, so a snapshot gives the
same plan anywhere and in any order of input.
"""

from __future__ import annotations

from controld.core.ids import NodeUid
from controld.core.spec import RestartWay
from controld.matching.bench import Bench
from controld.matching.constraints import meets
from controld.matching.port import Grant, Pending, Plan, Seat, Snapshot, Unplaced
from controld.matching.unfit import unplaced
from virialpb.reasons import Unfit


def plan(snapshot: Snapshot, pending: tuple[Pending, ...]) -> Plan:
    """Grants for what fits now, reasons for what does not."""
    benches = {v.uid: Bench.of(v) for v in sorted(snapshot.nodes, key=lambda v: v.uid)}
    grants: list[Grant] = []
    refused: list[Unplaced] = []
    for gang in sorted(pending, key=lambda g: (-g.priority, g.order, g.job)):
        outcome = _place(gang, benches)
        if isinstance(outcome, Grant):
            grants.append(outcome)
        else:
            refused.append(outcome)
    return Plan(snapshot.revision, tuple(grants), tuple(refused))


def _place(gang: Pending, benches: dict[NodeUid, Bench]) -> Grant | Unplaced:
    trial = {uid: bench.copy() for uid, bench in benches.items()}
    for offer in gang.offers:
        if offer.node in trial:
            trial[offer.node].give_back(offer)
    barred = _barred(gang, trial)
    per_node = 1 if gang.gang.spread == "node" else gang.gang.ranks
    room = {uid: b.room(gang.resources, per_node) for uid, b in trial.items() if uid not in barred}
    seated = _seat_ranks(gang, trial, room)
    if isinstance(seated, int):
        return unplaced(gang, trial, barred, room, seated)
    used = {seat.node for seat in seated}
    spares = _seat_spares(
        gang, trial, {u for u, n in room.items() if n} - (used if gang.gang.spread == "node" else set())
    )
    # Unclaimed spares of the last generation are given up with it, so the trial is the new truth.
    benches.update(trial)
    return Grant(gang.job, gang.number, (*seated, *spares), gang.checkpoint, gang.gang.spares - len(spares))


def _barred(gang: Pending, benches: dict[NodeUid, Bench]) -> dict[NodeUid, Unfit]:
    barred: dict[NodeUid, Unfit] = {}
    for uid, bench in benches.items():
        view = bench.view
        if view.unfit is not None:
            barred[uid] = view.unfit
        elif gang.needs_strong_fencing and view.fencing_weak:
            barred[uid] = Unfit.FENCING_WEAK
        elif meets(dict(view.attributes), gang.node_constraints) is not None:
            barred[uid] = Unfit.CONSTRAINT
        elif uid in gang.exclude:
            barred[uid] = Unfit.EXCLUDED
    return barred


def _seat_ranks(gang: Pending, benches: dict[NodeUid, Bench], room: dict[NodeUid, int]) -> list[Seat] | int:
    """A seat for every rank, or how many ranks there is room for."""
    first = gang.number == 1
    spare_nodes = {o.node for o in gang.offers}
    chosen: dict[int, NodeUid] = {}
    left = dict(room)
    wanted = dict(gang.stay) if RestartWay.IN_PLACE in gang.allow else {}
    wanted |= dict(gang.pinned)
    for rank, uid in sorted(wanted.items()):
        if rank < gang.gang.ranks and left.get(uid, 0) > 0:
            chosen[rank] = uid
            left[uid] -= 1
    if any(chosen.get(rank) != uid for rank, uid in gang.pinned):
        return len(chosen)

    def may_use(uid: NodeUid) -> bool:
        if uid in spare_nodes:
            return RestartWay.SPARE in gang.allow
        return first or RestartWay.REQUEUE in gang.allow

    def rank_of(uid: NodeUid) -> tuple[bool, int, int, NodeUid]:
        bench = benches[uid]
        return (uid not in spare_nodes, bench.cpu_millis, bench.memory_bytes, uid)

    open_ = sorted((uid for uid in left if left[uid] > 0 and may_use(uid)), key=rank_of)
    missing = [rank for rank in range(gang.gang.ranks) if rank not in chosen]
    total = len(chosen) + sum(left[uid] for uid in open_)
    if total < gang.gang.ranks:
        return total
    places = (uid for uid in open_ for _ in range(left[uid]))
    chosen |= dict(zip(missing, places, strict=False))
    seats = [_seat(gang, benches[chosen[rank]], rank) for rank in range(gang.gang.ranks)]
    return [s for s in seats if s is not None]


def _seat(gang: Pending, bench: Bench, rank: int | None) -> Seat | None:
    devices = bench.take(gang.resources)
    if devices is None:
        return None
    need = gang.resources
    view = bench.view
    return Seat(rank, view.uid, view.incarnation, need.cpu_millis, need.memory_bytes, devices)


def _seat_spares(gang: Pending, benches: dict[NodeUid, Bench], allowed: set[NodeUid]) -> list[Seat]:
    """As many spares as there is room for, each on a node of its own, where most is free."""
    seats: list[Seat] = []
    for uid in sorted(allowed, key=lambda u: (-benches[u].cpu_millis, -benches[u].memory_bytes, u)):
        if len(seats) == gang.gang.spares:
            break
        seat = _seat(gang, benches[uid], None)
        if seat is not None:
            seats.append(seat)
    return seats
