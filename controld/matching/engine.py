"""plan(snapshot, pending) -> Plan: the first engine behind the port.

Every rank of a gang has one shape, so a gang fits if and only if the rooms of the nodes it may use add up to
its ranks: taking the tightest node first loses no feasible placement. Gangs are served by priority, then in the
order they came; each takes all it needs or nothing. Ties fall to the lower node uid, so a snapshot gives the
same plan anywhere and in any order of input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from controld.core.ids import NodeUid
from controld.core.spec import Resources, RestartWay
from controld.matching.bench import Bench
from controld.matching.constraints import meets
from controld.matching.port import Grant, Pending, Plan, Seat, Snapshot, Unplaced
from controld.matching.unfit import unplaced
from virialpb.reasons import Unfit


def plan(snapshot: Snapshot, pending: tuple[Pending, ...]) -> Plan:
    """Grants for what fits now, reasons for what does not."""
    benches = {v.uid: Bench.of(v) for v in sorted(snapshot.nodes, key=lambda v: v.uid)}
    rooms = _Rooms(benches)
    grants: list[Grant] = []
    refused: list[Unplaced] = []
    for gang in sorted(pending, key=lambda g: (-g.priority, g.order, g.job)):
        outcome = _place(gang, benches, rooms)
        if isinstance(outcome, Grant):
            grants.append(outcome)
        else:
            refused.append(outcome)
    return Plan(snapshot.revision, tuple(grants), tuple(refused))


class _Rooms:
    """How many ranks of one shape each node has room for: counted once a shape, and anew only where a gang took.

    Gangs are mostly alike and nodes many: counted for each gang, twenty gangs on 10,000 nodes of 8 devices took 12 s.
    """

    def __init__(self, benches: dict[NodeUid, Bench]) -> None:
        self._benches = benches
        self._counted: dict[tuple[Resources, int], dict[NodeUid, int]] = {}

    def of(self, need: Resources, limit: int) -> dict[NodeUid, int]:
        """A copy, the caller's own."""
        counted = self._counted.get((need, limit))
        if counted is None:
            counted = {uid: bench.room(need, limit) for uid, bench in self._benches.items()}
            self._counted[need, limit] = counted
        return dict(counted)

    def recount(self, uids: Iterable[NodeUid]) -> None:
        for uid in uids:
            for (need, limit), counted in self._counted.items():
                counted[uid] = self._benches[uid].room(need, limit)


def _place(gang: Pending, benches: dict[NodeUid, Bench], rooms: _Rooms) -> Grant | Unplaced:
    """Takes from `benches` when the gang is placed, and only then."""
    per_node = 1 if gang.gang.spread == "node" else gang.gang.ranks
    room = rooms.of(gang.resources, per_node)
    trial = dict(benches)
    touched: set[NodeUid] = set()

    def own(uid: NodeUid) -> Bench:
        """A node of the trial that may be changed."""
        if uid not in touched:
            touched.add(uid)
            trial[uid] = trial[uid].copy()
        return trial[uid]

    for offer in gang.offers:
        if offer.node in trial:
            own(offer.node).give_back(offer)
    for uid in touched:
        room[uid] = trial[uid].room(gang.resources, per_node)
    barred = _barred(gang, trial)
    for uid in barred:
        del room[uid]
    chosen = _choose_ranks(gang, trial, room)
    if isinstance(chosen, int):
        return unplaced(gang, trial, barred, room, chosen)
    seated = [_seat(gang, own(uid), rank) for rank, uid in enumerate(chosen)]
    used = set(chosen) if gang.gang.spread == "node" else set[NodeUid]()
    spares = _seat_spares(gang, trial, {u for u, n in room.items() if n} - used, own)
    # Unclaimed spares of the last generation are given up with it, so the trial is the new truth.
    benches.update((uid, trial[uid]) for uid in touched)
    rooms.recount(touched)
    seats = tuple(seat for seat in (*seated, *spares) if seat is not None)
    return Grant(gang.job, gang.number, seats, gang.checkpoint, gang.gang.spares - len(spares))


def _barred(gang: Pending, benches: dict[NodeUid, Bench]) -> dict[NodeUid, Unfit]:
    barred: dict[NodeUid, Unfit] = {}
    for uid, bench in benches.items():
        view = bench.view
        if view.unfit is not None:
            barred[uid] = view.unfit
        elif gang.needs_strong_fencing and view.fencing_weak:
            barred[uid] = Unfit.FENCING_WEAK
        elif gang.node_constraints and meets(dict(view.attributes), gang.node_constraints) is not None:
            barred[uid] = Unfit.CONSTRAINT
        elif uid in gang.exclude:
            barred[uid] = Unfit.EXCLUDED
    return barred


def _choose_ranks(gang: Pending, benches: dict[NodeUid, Bench], room: dict[NodeUid, int]) -> list[NodeUid] | int:
    """The node of each rank, or how many ranks there is room for."""
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
    return [chosen[rank] for rank in range(gang.gang.ranks)]


def _seat(gang: Pending, bench: Bench, rank: int | None) -> Seat | None:
    devices = bench.take(gang.resources)
    if devices is None:
        return None
    need = gang.resources
    view = bench.view
    return Seat(rank, view.uid, view.incarnation, need.cpu_millis, need.memory_bytes, devices)


def _seat_spares(
    gang: Pending, benches: dict[NodeUid, Bench], allowed: set[NodeUid], own: Callable[[NodeUid], Bench]
) -> list[Seat]:
    """As many spares as there is room for, each on a node of its own, where most is free."""
    seats: list[Seat] = []
    if not gang.gang.spares:
        return seats
    for uid in sorted(allowed, key=lambda u: (-benches[u].cpu_millis, -benches[u].memory_bytes, u)):
        if len(seats) == gang.gang.spares:
            break
        seat = _seat(gang, own(uid), None)
        if seat is not None:
            seats.append(seat)
    return seats
