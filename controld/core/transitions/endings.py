"""How generations and jobs end: shared by every transition that may end one."""

from __future__ import annotations

from dataclasses import replace

from controld.core import events
from controld.core.commands import Now
from controld.core.draft import Draft
from controld.core.model import (
    CheckpointState,
    Generation,
    Job,
    JobState,
    LeaseState,
    Phase,
    TaskError,
)
from virialpb.reasons import StopReason

# Ends that are nobody's fault: not charged to the restart budget.
UNCHARGED = frozenset({StopReason.DRAIN, StopReason.CANCELLED, StopReason.FINISHED, StopReason.SUPERSEDED})
# Ends before a rank's program ran: its node's fault. The budget is not charged for them, or one bad node would fail a
# job that may not restart; so that they end all the same, only so many are allowed in a row.
BLAMES_NODE = frozenset({StopReason.PREPARE_FAILED, StopReason.PREPARE_DEADLINE, StopReason.GO_DEADLINE})
PREPARE_FAILURES_MAX = 6
# Ends that the job or what it was restored from may be to blame for; the loss of a node is not.
BLAMES_JOB = frozenset({StopReason.RANK_FAILED, StopReason.START_DEADLINE, StopReason.NO_PROGRESS})


def begin_stop(draft: Draft, generation: Generation, reason: StopReason, error: TaskError | None, now: Now) -> None:
    """Mark a generation STOPPING: its ranks' leases are REVOKING, its open checkpoints can never commit.

    A restart that the job is to answer for is charged here, once a generation, so that no rejoin can reset it (G3).
    """
    job = draft.job(generation.job)
    if job is None:
        return
    members = tuple(
        replace(m, lease=LeaseState.REVOKING) if m.rank is not None and m.lease.holds else m for m in generation.members
    )
    draft.put(replace(generation, phase=Phase.STOPPING, stop_reason=reason, members=members))
    details = {} if error is None or not error.detail else {"detail": error.detail}
    numbers = {} if error is None else {"rank": error.rank}
    draft.tell(events.of_generation("generation.stopping", generation, reason=reason, numbers=numbers, details=details))
    for checkpoint in draft.checkpoints(job.id):
        if checkpoint.generation == generation.number and checkpoint.state is CheckpointState.BEGUN:
            draft.put(replace(checkpoint, state=CheckpointState.ABORTED))
            draft.tell(
                events.of_generation("checkpoint.aborted", generation, reason=reason, numbers={"step": checkpoint.step})
            )
    if job.state is JobState.CANCELLING:
        return
    changed = replace(job, state=JobState.RESTARTING)
    if reason in BLAMES_NODE:
        changed = replace(changed, first_error=job.first_error or error, prepare_failures=job.prepare_failures + 1)
    elif reason not in UNCHARGED:
        fruitless = 0 if generation.progressed else job.fruitless_generations + (reason in BLAMES_JOB)
        times = tuple(t for t in job.restart_times_unix_ns if t > now.unix_ns - job.spec.restart.window_ns)
        changed = replace(
            changed,
            first_error=job.first_error or error,
            restart_times_unix_ns=(*times, now.unix_ns),
            fruitless_generations=fruitless,
        )
    draft.put(changed)


def end_job(draft: Draft, job: Job, state: JobState, now: Now, reason: str = "") -> None:
    """The job is over: its spares are free. Ranks were released, expired or left behind before."""
    ended = replace(job, state=state, end_time_unix_ns=now.unix_ns)
    draft.put(ended)
    release_spares(draft, job)
    details = {"error": job.first_error.stop_reason.value} if job.first_error is not None else None
    draft.tell(events.of_job(f"job.{state.value.lower()}", ended, reason=reason, details=details))


def release_spares(draft: Draft, job: Job) -> None:
    """Spares run nothing, so their leases end by decree; agents drop the reservation when told."""
    current = draft.generation(job.id, job.generation)
    if current is None:
        return
    members = tuple(
        replace(m, lease=LeaseState.RELEASED) if m.rank is None and m.lease.holds else m for m in current.members
    )
    if members != current.members:
        draft.put(replace(current, members=members))
