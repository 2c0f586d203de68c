"""Why a gang was not placed: every reason with its count, and the smallest change found that would fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from controld.core.ids import NodeUid
from controld.core.spec import Constraint
from controld.matching.bench import Bench
from controld.matching.constraints import meets
from controld.matching.port import Pending, UnfitCount, Unplaced
from virialpb.reasons import Unfit


def unplaced(
    pending: Pending,
    benches: Mapping[NodeUid, Bench],
    barred: Mapping[NodeUid, Unfit],
    room: Mapping[NodeUid, int],
    rooms_total: int,
) -> Unplaced:
    """`room`: ranks that fit on each node that is not barred; `rooms_total`: their sum within what is allowed."""
    counts: Counter[Unfit] = Counter(barred.values())
    lacking: dict[Unfit, list[Bench]] = {}
    for uid, bench in benches.items():
        if uid in barred or room.get(uid, 0):
            continue
        reason = bench.lacking(pending.resources)
        if reason is not None:
            counts[reason] += 1
            lacking.setdefault(reason, []).append(bench)
    reasons = [
        UnfitCount(r, n, _numbers(pending, r, lacking.get(r, [])), _details(pending, r, benches, barred))
        for r, n in sorted(counts.items())
    ]
    if rooms_total or not reasons:
        numbers = (("ranks_fit", rooms_total), ("ranks_needed", pending.gang.ranks))
        reasons.append(UnfitCount(Unfit.TOO_FEW_NODES, sum(1 for n in room.values() if n), numbers))
    return Unplaced(
        pending.job, pending.number, tuple(reasons), len(benches), _relaxation(pending, benches, barred, rooms_total)
    )


def _numbers(pending: Pending, reason: Unfit, benches: list[Bench]) -> tuple[tuple[str, int], ...]:
    need = pending.resources
    match reason:
        case Unfit.CPU:
            most = max(b.cpu_millis for b in benches)
            return (("free_most_cpu_millis", most), ("needed_cpu_millis", need.cpu_millis))
        case Unfit.MEMORY:
            most = max(b.memory_bytes for b in benches)
            return (("free_most_memory_bytes", most), ("needed_memory_bytes", need.memory_bytes))
        case Unfit.DEVICES:
            return tuple(
                number
                for r in need.devices
                for number in (
                    (f"free_most_{r.kind}_count", max(b.devices_free(r) for b in benches)),
                    (f"needed_{r.kind}_count", r.count),
                )
            )
        case _:
            return ()


def _details(
    pending: Pending, reason: Unfit, benches: Mapping[NodeUid, Bench], barred: Mapping[NodeUid, Unfit]
) -> tuple[tuple[str, str], ...]:
    """The constraints that keep nodes out, as their user wrote them, in the order of the spec."""
    match reason:
        case Unfit.CONSTRAINT:
            views = [bench.view for uid, bench in benches.items() if barred.get(uid) is reason]
            broken = {meets(dict(view.attributes), pending.node_constraints) for view in views}
            return tuple((c.attribute, _written(c)) for c in pending.node_constraints if c in broken)
        case Unfit.DEVICES:
            return tuple((r.kind, f"{r.kind} {_written(c)}") for r in pending.resources.devices for c in r.constraints)
        case _:
            return ()


def _written(constraint: Constraint) -> str:
    return " ".join((constraint.attribute, constraint.operator.value, ",".join(constraint.values))).strip()


def _relaxation(
    pending: Pending, benches: Mapping[NodeUid, Bench], barred: Mapping[NodeUid, Unfit], rooms_total: int
) -> tuple[tuple[str, int], ...]:
    """Fewer ranks, or less CPU or memory a rank, whichever alone would do; nothing when none does."""
    if rooms_total:
        return (("ranks", rooms_total),)
    if pending.gang.spread != "node":
        return ()
    open_ = [b for uid, b in benches.items() if uid not in barred]
    need, ranks = pending.resources, pending.gang.ranks
    for name, values, other_fits in (
        ("cpu_millis", [b.cpu_millis for b in open_], [b.memory_bytes >= need.memory_bytes for b in open_]),
        ("memory_bytes", [b.memory_bytes for b in open_], [b.cpu_millis >= need.cpu_millis for b in open_]),
    ):
        enough = sorted((v for v, ok in zip(values, other_fits, strict=True) if ok), reverse=True)
        if len(enough) >= ranks and 0 < enough[ranks - 1] < getattr(need, name):
            return ((name, enough[ranks - 1]),)
    return ()
