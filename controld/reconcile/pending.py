"""Jobs that wait for a placement -> what the planner is asked."""

from __future__ import annotations

from controld.core.checkpoints import committed, newest_restorable, pinned_ranks
from controld.core.ids import NodeUid
from controld.core.model import Generation, Job, Liveness, Phase
from controld.core.state import State
from controld.core.transitions.endings import UNCHARGED
from controld.matching.port import Pending, SpareOffer, UnfitCount, Unplaced
from controld.reconcile.decisions import Pass
from virialpb.reasons import Unfit


def propose(p: Pass, job: Job, last: Generation | None) -> None:
    """Ask for a placement, or note why there is nothing to ask yet."""
    wait_ns = _back_off_ns(p, job, last)
    if wait_ns > 0:
        _explain(p, job, Unfit.BACK_OFF, (("wait_ms", wait_ns // 1_000_000),))
        return
    checkpoint = newest_restorable(p.state, job.id)
    if checkpoint is None and committed(p.state, job.id):
        # Never start from zero in silence after work was saved (G11): wait for the nodes that have the shards.
        _explain(p, job, Unfit.NO_RESTORABLE_CHECKPOINT, ())
        return
    p.pending.append(
        Pending(
            job=job.id,
            number=job.generation + 1,
            gang=job.spec.gang,
            resources=job.spec.resources,
            priority=job.spec.priority,
            order=job.number,
            node_constraints=job.spec.node_constraints,
            needs_strong_fencing=job.spec.fencing == "strong",
            stay=_stay(p.state, last),
            exclude=tuple(
                sorted(n for (j, n), r in p.view.refusals.items() if j == job.id and r.until_ns > p.now.boottime_ns)
            ),
            offers=_offers(last),
            allow=job.spec.restart.allow,
            checkpoint=checkpoint.id if checkpoint is not None else None,
            pinned=pinned_ranks(checkpoint) if checkpoint is not None else (),
        )
    )


def _back_off_ns(p: Pass, job: Job, last: Generation | None) -> int:
    """How long to wait still; generations without progress in a row double it, a fruitful one needs none."""
    if last is None or job.fruitless_generations == 0 or last.stop_reason in UNCHARGED:
        return 0
    since_ns = p.view.first_seen(p.now.boottime_ns, "ended", job.id, str(last.number))
    back_off_ns = min(
        p.limits.restart_back_off_ns << min(job.fruitless_generations - 1, 16), p.limits.restart_back_off_max_ns
    )
    return since_ns + back_off_ns - p.now.boottime_ns


def _stay(state: State, last: Generation | None) -> tuple[tuple[int, NodeUid], ...]:
    """Survivors of the last generation: a replacement of one member leaves the others in place."""
    if last is None:
        return ()
    stay: list[tuple[int, NodeUid]] = []
    for member in last.ranks:
        node = state.nodes.get(member.node)
        if (
            member.rank is not None
            and not member.lease.holds
            and node is not None
            and node.liveness is Liveness.LIVE
            and node.incarnation == member.incarnation
        ):
            stay.append((member.rank, member.node))
    return tuple(stay)


def _offers(last: Generation | None) -> tuple[SpareOffer, ...]:
    if last is None or last.phase is not Phase.ENDED:
        return ()
    return tuple(
        SpareOffer(m.node, m.cpu_millis, m.memory_bytes, m.devices)
        for m in last.members
        if m.rank is None and m.lease.holds
    )


def _explain(p: Pass, job: Job, reason: Unfit, numbers: tuple[tuple[str, int], ...]) -> None:
    p.view.explain[job.id] = Unplaced(job.id, job.generation + 1, (UnfitCount(reason, 0, numbers),), 0)
