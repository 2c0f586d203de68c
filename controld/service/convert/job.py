"""Jobs as callers see them: the committed records, with what the agents last said about the running generation."""

from __future__ import annotations

from controld.core import keys
from controld.core.model import Checkpoint, Generation, Job, JobState, Member, TaskError
from controld.core.spec import JobSpec
from controld.core.state import State
from controld.health.view import View
from controld.matching.port import UnfitCount, Unplaced
from controld.service.convert.common import (
    CHECKPOINTS,
    epoch_to_proto,
    exit_to_proto,
    grant_to_proto,
    job_name,
    node_name,
)
from controld.service.convert.sessions import progress_step, status_of
from controld.service.convert.spec import spec_to_proto
from virialpb.v1 import job_pb2


def job_to_proto(job: Job, state: State, view: View) -> job_pb2.Job:
    current = state.current(job.id)
    message = job_pb2.Job(
        name=job_name(job.id),
        uid=job.id,  # an id is never used again
        spec=spec_to_proto(job.spec),
        state=state_to_proto(job.state),
        generation=job.generation,
        restarts=job.restarts,
        checkpoints=[
            checkpoint_to_proto(checkpoint) for _, checkpoint in sorted(state.checkpoints.get(job.id, {}).items())
        ],
        create_time_unix_ns=job.create_time_unix_ns,
        end_time_unix_ns=job.end_time_unix_ns,
        revision=_revision(job, current, state),
        progress_step=job.highest_step if job.state.ended else -1,
        progress_generation=job.generation,
        owner=job.owner,
        aborted_saves=job.aborted_saves,
        last_abort_reason=job.last_abort_reason,
    )
    if current is not None:
        message.current.CopyFrom(generation_to_proto(current, state, view))
        if not job.state.ended:
            message.progress_step = progress_step(current, state, view)
    if job.first_error is not None:
        message.first_error.CopyFrom(error_to_proto(job.first_error, state))
    return message


def generation_to_proto(generation: Generation, state: State, view: View) -> job_pb2.Generation:
    return job_pb2.Generation(
        number=generation.number,
        epoch=epoch_to_proto(state.epoch_of(generation)),
        phase=generation.phase.value,
        members=[_member(member, generation, state, view) for member in generation.members],
        restored_checkpoint=generation.restored_checkpoint or "",
        restored_step=generation.restored_step,
        stop_reason=generation.stop_reason.value if generation.stop_reason is not None else "",
    )


def _member(member: Member, generation: Generation, state: State, view: View) -> job_pb2.Member:
    node = state.nodes.get(member.node)
    status = status_of(member, generation, state, view)
    message = job_pb2.Member(
        rank=-1 if member.rank is None else member.rank,
        slot=member.slot,
        node=member.node,
        node_name=node.name if node is not None else "",
        lease=member.lease.value,
        task_state=status.state.value if status is not None else "",
        progress_step=status.progress_step if status is not None else -1,
        devices=[grant_to_proto(grant) for grant in member.devices],
        cpu_millis=member.cpu_millis,
        memory_bytes=member.memory_bytes,
    )
    exit_ = member.exit or (status.exit if status is not None else None)
    if exit_ is not None:
        # Thousands of tails would not fit a message: first_error has the one that matters, ReadLogs all of them.
        message.exit.CopyFrom(exit_to_proto(exit_, with_tail=False))
    return message


def checkpoint_to_proto(checkpoint: Checkpoint) -> job_pb2.Checkpoint:
    return job_pb2.Checkpoint(
        name=f"{job_name(checkpoint.job)}/{CHECKPOINTS}{checkpoint.id}",
        generation=checkpoint.generation,
        step=checkpoint.step,
        state=checkpoint.state.value,
        parts=len(checkpoint.parts),
        world_size=checkpoint.world_size,
        size_bytes=sum(part.size_bytes for part in checkpoint.parts),
        tier=checkpoint.tier.value,
    )


def error_to_proto(error: TaskError, state: State) -> job_pb2.TaskError:
    return job_pb2.TaskError(
        generation=error.generation,
        rank=error.rank,
        node=node_name(error.node, state),
        exit=exit_to_proto(error.exit, with_tail=True) if error.exit is not None else None,
        stop_reason=error.stop_reason.value,
        detail=error.detail,
    )


def explain_to_proto(job: Job, unplaced: Unplaced) -> job_pb2.ExplainJobResponse:
    return job_pb2.ExplainJobResponse(
        name=job_name(job.id),
        state=state_to_proto(job.state),
        reasons=[_unfit(count) for count in unplaced.reasons],
        nodes_considered=unplaced.nodes_considered,
        relaxation=", ".join(f"{name}={value}" for name, value in unplaced.relaxation),
    )


def _unfit(count: UnfitCount) -> job_pb2.UnfitCount:
    return job_pb2.UnfitCount(
        reason=count.reason.value, nodes=count.nodes, numbers=dict(count.numbers), details=dict(count.details)
    )


def state_to_proto(state: JobState) -> job_pb2.Job.State.ValueType:
    return job_pb2.Job.State.Value(state.value)


def states_from_proto(values: list[job_pb2.Job.State.ValueType]) -> frozenset[JobState]:
    """The states asked for; none asked for is all. A number that this controller does not know matches no job."""
    known = {state_to_proto(state): state for state in JobState}
    return frozenset(known[value] for value in values if value in known) if values else frozenset(JobState)


def _revision(job: Job, current: Generation | None, state: State) -> int:
    """The newest revision that changed anything the message shows of the records."""
    touched = [keys.job(job.id), *(keys.checkpoint(job.id, id_) for id_ in state.checkpoints.get(job.id, {}))]
    if current is not None:
        touched.append(keys.generation(job.id, current.number))
    return max(state.modified.get(key, 0) for key in touched)


def planned_job(job_id: str, spec: JobSpec) -> job_pb2.Job:
    """What a submission would make, with every default filled in; nothing was committed."""
    return job_pb2.Job(
        name=job_name(job_id),
        spec=spec_to_proto(spec),
        state=state_to_proto(JobState.PENDING),
        progress_step=-1,
    )
