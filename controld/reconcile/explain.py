"""Why a job is not running: always an answer, from the last plan or from what its last generation waits for."""

from __future__ import annotations

from controld.core.ids import JobId
from controld.core.model import Generation, Job, Liveness, Phase
from controld.core.spec import Writes
from controld.core.state import State
from controld.health.view import View
from controld.matching.port import UnfitCount, Unplaced
from virialpb.reasons import Unfit


def explain(state: State, view: View, job_id: JobId) -> Unplaced:
    """Reasons with counts; none for a job that has ended, or that runs, has all its spares and waits for nobody.

    Raises KeyError for an unknown job.
    """
    job = state.jobs[job_id]
    number = job.generation + 1
    current = state.current(job_id)
    if job.state.ended:
        return Unplaced(job_id, job.generation, (), 0)
    waits = _waits_for_leases(state, job_id)
    if current is not None and current.phase.under_way:
        # A running job waits only for what is silent: it may come back, or its lease ends and the gang restarts.
        silent = tuple(w for w in waits if w.reason is Unfit.WAITS_FOR_EXPIRY)
        return Unplaced(job_id, job.generation, (*silent, *_missing_spares(job, current)), 0)
    if waits:
        return Unplaced(job_id, number, waits, 0)
    found = view.explain.get(job_id)
    if found is not None and found.number == number:
        return found
    return Unplaced(job_id, number, (UnfitCount(Unfit.WAITS_FOR_PLANNER, 0),), 0)


def _missing_spares(job: Job, current: Generation) -> tuple[UnfitCount, ...]:
    """A gang starts without spares where there is no room for them, and then its next loss costs more."""
    wanted = job.spec.gang.spares
    held = sum(m.rank is None and m.lease.holds for m in current.members)
    if held >= wanted:
        return ()
    return (UnfitCount(Unfit.SPARE_MISSING, 0, (("spares_held", held), ("spares_wanted", wanted))),)


def _waits_for_leases(state: State, job_id: JobId) -> tuple[UnfitCount, ...]:
    job = state.jobs[job_id]
    current = state.current(job_id)
    if current is None or current.phase is Phase.ENDED:
        return ()
    expiry: list[str] = []
    release: list[str] = []
    for member in current.ranks:
        node = state.nodes.get(member.node)
        if not member.lease.holds or node is None:
            continue
        silent = node.liveness is not Liveness.LIVE
        if silent and job.spec.writes is Writes.SHARED:
            expiry.append(node.name)
        elif not silent:
            release.append(node.name)
    counts = ((Unfit.WAITS_FOR_EXPIRY, expiry), (Unfit.WAITS_FOR_RELEASE, release))
    return tuple(UnfitCount(r, len(names), details=(("nodes", ", ".join(names)),)) for r, names in counts if names)
