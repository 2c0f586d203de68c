"""Submit and cancel."""

from __future__ import annotations

from dataclasses import replace

from controld.core import events
from controld.core.commands import CancelJob, Now, SubmitJob
from controld.core.draft import Draft
from controld.core.ids import ID_LENGTH_MAX, JobId
from controld.core.model import Job, JobState, Phase
from controld.core.outcome import Outcome, Refused, Reply
from controld.core.state import State
from controld.core.transitions import requests
from controld.core.transitions.endings import begin_stop, end_job
from virialpb.reasons import Reason, StopReason


def submit(state: State, command: SubmitJob, now: Now) -> Outcome:
    replayed = requests.replay(state, command)
    if replayed is not None:
        return replayed
    draft = Draft(state)
    cluster = draft.cluster()
    number = cluster.job_counter + 1
    if command.job_id:
        job_id = JobId(command.job_id)
        if job_id in state.jobs:
            return Refused(Reason.ALREADY_EXISTS, f"jobs/{job_id}")
    else:
        # The counter never goes back, so an id is not used again after its job is evicted (H4).
        while (job_id := _made_id(command.spec.name, number)) in state.jobs:
            number += 1
    job = Job(
        id=job_id,
        spec=command.spec,
        state=JobState.PENDING,
        create_time_unix_ns=now.unix_ns,
        owner=command.owner,
        number=number,
    )
    draft.put(replace(cluster, job_counter=number))
    draft.put(job)
    requests.remember(draft, command, job_id, now)
    draft.tell(
        events.of_job(
            "job.submitted", job, numbers={"ranks": command.spec.gang.ranks, "spares": command.spec.gang.spares}
        )
    )
    return draft.done(Reply(job_id))


def _made_id(name: str, number: int) -> JobId:
    suffix = f"-{number}"
    return JobId(name[: ID_LENGTH_MAX - len(suffix)].rstrip("-") + suffix)


def cancel(state: State, command: CancelJob, now: Now) -> Outcome:
    replayed = requests.replay(state, command)
    if replayed is not None:
        return replayed
    job = state.jobs.get(command.job)
    if job is None:
        return Refused(Reason.NOT_FOUND, f"jobs/{command.job}")
    if command.only_of is not None and job.owner != command.only_of:
        return Refused(Reason.PERMISSION_DENIED, f"jobs/{command.job}", detail=f"owner {job.owner}".rstrip())
    draft = Draft(state)
    requests.remember(draft, command, command.job, now)
    if job.state.ended or job.state is JobState.CANCELLING:
        return draft.done(Reply(command.job))
    current = state.current(command.job)
    if current is None or current.phase is Phase.ENDED:
        end_job(draft, job, JobState.CANCELLED, now)
        return draft.done(Reply(command.job))
    draft.put(replace(job, state=JobState.CANCELLING))
    draft.tell(events.of_job("job.cancelling", job))
    if current.phase is not Phase.STOPPING:
        begin_stop(draft, current, StopReason.CANCELLED, None, now)
    return draft.done(Reply(command.job))
