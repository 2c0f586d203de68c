"""The two-phase checkpoint registry: BEGIN -> every rank PREPARED -> COMMIT, or ABORT. Commit comes last (G7)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from controld.core import events, keys
from controld.core.checkpoints import droppable
from controld.core.commands import (
    AbortCheckpoint,
    BeginCheckpoint,
    CollectCheckpoints,
    ForgetCheckpoint,
    Now,
    PrepareShard,
    ReportBadShard,
)
from controld.core.draft import Draft
from controld.core.ids import CheckpointId
from controld.core.model import Checkpoint, CheckpointState, Generation, Job, Phase, ShardPart, Tier
from controld.core.outcome import Outcome, Refused, Reply, Transition
from controld.core.spec import Durability
from controld.core.state import State
from virialpb.reasons import Reason

# Saves overlap when one is slow; a rank that begins ever new ones and ends none must not fill the store.
OPEN_MAX = 8


def _alive(state: State, command: BeginCheckpoint | PrepareShard) -> tuple[Job, Generation] | Refused:
    """The job and its current generation, when `command` has that generation's token and its rank may still write."""
    job = state.jobs.get(command.job)
    if job is None:
        return Refused(Reason.NOT_FOUND, f"jobs/{command.job}")
    generation = state.current(command.job)
    if (
        generation is None
        or generation.number != command.generation
        or state.epoch_of(generation) != command.epoch
        or generation.phase not in (Phase.GO, Phase.ACTIVE)
        or (member := generation.of_rank(command.rank)) is None
        or not member.lease.holds
    ):
        return Refused(Reason.FENCED, f"jobs/{command.job}", detail=f"generation {command.generation}")
    return job, generation


def _reply(checkpoint: Checkpoint, state: str | None = None) -> Reply:
    return Reply(checkpoint.id, state or checkpoint.state.value, checkpoint.directory, checkpoint.tier.value)


def begin(state: State, command: BeginCheckpoint, now: Now) -> Outcome:
    """The first rank to ask makes the record; the others get the same id and directory (G9, G10)."""
    found = _alive(state, command)
    if isinstance(found, Refused):
        return found
    job, generation = found
    own = [c for c in state.checkpoints.get(job.id, {}).values() if c.generation == generation.number]
    for checkpoint in own:
        if checkpoint.step == command.step and checkpoint.state in (CheckpointState.BEGUN, CheckpointState.COMMITTED):
            return Transition(reply=_reply(checkpoint))
    if sum(c.state is CheckpointState.BEGUN for c in own) >= OPEN_MAX:
        return Refused(Reason.OVERLOADED, f"jobs/{job.id}", detail=f"{OPEN_MAX} checkpoints are open")
    draft = Draft(state)
    number = job.checkpoint_counter + 1
    id_ = CheckpointId(f"c{number:06d}-s{command.step}")
    shared = job.spec.checkpoint.durability is Durability.SHARED_DIRECTORY
    # The cluster's uid and the job's number keep two clusters, or two jobs of one name, out of one directory.
    place = f"{draft.cluster().uid}/{job.id}.{job.number}/{id_}"
    checkpoint = Checkpoint(
        job=job.id,
        id=id_,
        generation=generation.number,
        step=command.step,
        world_size=len(generation.ranks),
        tier=Tier.SHARED if shared else Tier.LOCAL,
        directory=f"{job.spec.checkpoint.directory}/{place}" if shared else place,
        begin_time_unix_ns=now.unix_ns,
    )
    draft.put(replace(job, checkpoint_counter=number))
    draft.put(checkpoint)
    draft.tell(events.of_generation("checkpoint.begun", generation, numbers={"step": command.step}))
    return draft.done(_reply(checkpoint))


def prepare(state: State, command: PrepareShard) -> Outcome:
    found = _alive(state, command)
    if isinstance(found, Refused):
        return found
    job, generation = found
    checkpoint = state.checkpoints.get(job.id, {}).get(command.checkpoint)
    if checkpoint is None:
        return Refused(Reason.NOT_FOUND, f"jobs/{job.id}/checkpoints/{command.checkpoint}")
    if checkpoint.generation != generation.number or checkpoint.step != command.step:
        return Refused(Reason.FENCED, f"jobs/{job.id}/checkpoints/{checkpoint.id}")
    if checkpoint.state is not CheckpointState.BEGUN:
        return Transition(reply=_reply(checkpoint))
    part = ShardPart(command.rank, command.node, command.size_bytes, command.digest, command.file)
    place = bisect_left(checkpoint.parts, command.rank, key=lambda p: p.rank)
    earlier = checkpoint.parts[place] if place < len(checkpoint.parts) else None
    if earlier is not None and earlier.rank == command.rank:
        if earlier == part:
            return Transition(reply=_reply(checkpoint, "PREPARED"))
        return Refused(Reason.ALREADY_EXISTS, f"jobs/{job.id}/checkpoints/{checkpoint.id}", detail="rank")
    draft = Draft(state)
    parts = (*checkpoint.parts[:place], part, *checkpoint.parts[place:])
    if len(parts) < checkpoint.world_size:
        draft.put(replace(checkpoint, parts=parts))
        return draft.done(_reply(checkpoint, "PREPARED"))
    committed = replace(checkpoint, parts=parts, state=CheckpointState.COMMITTED)
    draft.put(committed)
    if job.aborted_saves:
        draft.put(replace(job, aborted_saves=0, last_abort_reason=""))
    size = sum(p.size_bytes for p in parts)
    draft.tell(
        events.of_generation(
            "checkpoint.committed",
            generation,
            numbers={"step": checkpoint.step, "size_bytes": size},
            details={"checkpoint": checkpoint.id},
        )
    )
    return draft.done(_reply(committed))


def abort(state: State, command: AbortCheckpoint) -> Outcome:
    checkpoint = state.checkpoints.get(command.job, {}).get(command.checkpoint)
    if checkpoint is None:
        return Refused(Reason.NOT_FOUND, f"jobs/{command.job}/checkpoints/{command.checkpoint}")
    if checkpoint.generation != command.generation:
        return Refused(Reason.FENCED, f"jobs/{command.job}/checkpoints/{command.checkpoint}")
    if checkpoint.state is not CheckpointState.BEGUN:
        return Transition(reply=_reply(checkpoint))
    draft = Draft(state)
    aborted = replace(checkpoint, state=CheckpointState.ABORTED)
    draft.put(aborted)
    job = draft.job(command.job)
    if job is not None and not _overtaken(state, checkpoint):
        draft.put(replace(job, aborted_saves=job.aborted_saves + 1, last_abort_reason=command.reason))
    draft.tell(
        events.event(
            "checkpoint.aborted",
            job=command.job,
            generation=command.generation,
            reason=command.reason,
            numbers={"step": checkpoint.step},
        )
    )
    return draft.done(_reply(aborted))


def _overtaken(state: State, checkpoint: Checkpoint) -> bool:
    """Whether the job has committed a later one: then its work is saved, and this one is no loss."""
    return any(
        c.state is CheckpointState.COMMITTED and (c.generation, c.step) > (checkpoint.generation, checkpoint.step)
        for c in state.checkpoints.get(checkpoint.job, {}).values()
    )


def report_bad(state: State, command: ReportBadShard) -> Outcome:
    """Quarantine the only copy there is of a part: the checkpoint can never be loaded whole again."""
    checkpoint = state.checkpoints.get(command.job, {}).get(command.checkpoint)
    if checkpoint is None:
        return Refused(Reason.NOT_FOUND, f"jobs/{command.job}/checkpoints/{command.checkpoint}")
    if checkpoint.state is not CheckpointState.COMMITTED:
        return Transition()
    draft = Draft(state)
    parts = tuple(replace(p, quarantined=True) if p.rank == command.rank else p for p in checkpoint.parts)
    draft.put(replace(checkpoint, parts=parts, state=CheckpointState.BAD))
    numbers = {"rank": command.rank, "step": checkpoint.step}
    for kind in ("shard.quarantined", "checkpoint.bad"):
        draft.tell(
            events.event(
                kind,
                job=command.job,
                generation=command.generation,
                reason=command.reason,
                numbers=numbers,
                details={"checkpoint": checkpoint.id},
            )
        )
    return draft.done()


def collect(state: State, command: CollectCheckpoints) -> Outcome:
    may_go = droppable(state, command.job)
    wrong = [id_ for id_ in command.checkpoints if id_ not in may_go]
    if wrong:
        return Refused(Reason.STALE, f"jobs/{command.job}/checkpoints/{wrong[0]}", detail="in use")
    draft = Draft(state)
    for id_ in command.checkpoints:
        draft.put(replace(state.checkpoints[command.job][id_], state=CheckpointState.DROPPING))
    return draft.done()


def forget(state: State, command: ForgetCheckpoint) -> Outcome:
    checkpoint = state.checkpoints.get(command.job, {}).get(command.checkpoint)
    if checkpoint is None:
        return Transition()
    if checkpoint.state is not CheckpointState.DROPPING:
        return Refused(Reason.STALE, f"jobs/{command.job}/checkpoints/{command.checkpoint}", detail="in use")
    draft = Draft(state)
    draft.delete(keys.checkpoint(command.job, command.checkpoint))
    draft.tell(events.event("checkpoint.dropped", job=command.job, numbers={"step": checkpoint.step}))
    return draft.done()
