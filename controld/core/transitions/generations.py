"""A generation's life: PREPARING -> GO -> ACTIVE -> STOPPING -> ENDED. Every change of members is a new one."""

from __future__ import annotations

from dataclasses import replace

from controld.core import events
from controld.core.capacity import fits
from controld.core.commands import (
    CommitGo,
    EndGeneration,
    MarkActive,
    MarkProgress,
    Now,
    StartGeneration,
    StopGeneration,
)
from controld.core.draft import Draft
from controld.core.ids import JobId, NodeUid, slot_id
from controld.core.model import (
    Checkpoint,
    CheckpointState,
    Event,
    Generation,
    Job,
    JobState,
    LeaseState,
    Liveness,
    Member,
    Phase,
    TaskError,
)
from controld.core.outcome import Outcome, Refused, Reply, Transition
from controld.core.spec import Writes
from controld.core.state import State
from controld.core.transitions.endings import BLAMES_NODE, PREPARE_FAILURES_MAX, begin_stop, end_job, release_spares
from virialpb.reasons import Reason, StopReason

# After so many generations in a row without a new step, the checkpoint they started from is not trusted again.
FRUITLESS_MAX = 3


def start(state: State, command: StartGeneration, now: Now) -> Outcome:
    """Verify a plan's grant against the head: what the plan saw may be gone, and then it is refused as STALE."""
    job = state.jobs.get(command.job)
    if job is None:
        return Refused(Reason.NOT_FOUND, f"jobs/{command.job}")
    current = state.current(command.job)
    if (
        job.state not in (JobState.PENDING, JobState.RESTARTING)
        or command.number != job.generation + 1
        or (current is not None and current.phase is not Phase.ENDED)
    ):
        return Refused(Reason.STALE, f"jobs/{command.job}", detail="state")
    wrong = _shape_wrong(job, command.number, command.members)
    if wrong:
        return Refused(Reason.INVARIANT_BROKEN, f"jobs/{command.job}", detail=wrong)
    checkpoint: Checkpoint | None = None
    if command.checkpoint is not None:
        checkpoint = state.checkpoints.get(command.job, {}).get(command.checkpoint)
        if checkpoint is None or checkpoint.state is not CheckpointState.COMMITTED:
            return Refused(Reason.STALE, f"jobs/{command.job}", detail="checkpoint")
    draft = Draft(state)
    # Spares of the last generation are given up in the commit that takes their place: nobody slips in between.
    release_spares(draft, job)
    # Ranks never have two generations alive unless every output is under the token (promise 3).
    if job.spec.writes is Writes.SHARED and current is not None and any(m.lease.holds for m in current.ranks):
        return Refused(Reason.STALE, f"jobs/{command.job}", detail="former generation holds leases")
    wanted = _by_node(command.members)
    # One pass over all leases, not one a node: a gang of thousands of ranks must not stall the leader's loop.
    held = draft.held_by_node()
    for node_uid in sorted(wanted):
        node = draft.node(node_uid)
        mine = tuple(wanted[node_uid])
        if node is None or node.liveness is not Liveness.LIVE or node.draining:
            return Refused(Reason.STALE, f"nodes/{node_uid}", detail="not schedulable")
        if any(not h.device_key and h.active(now.unix_ns) for h in node.holds) or any(
            m.incarnation != node.incarnation for m in mine
        ):
            return Refused(Reason.STALE, f"nodes/{node.name}", detail="held or another incarnation")
        if job.spec.fencing == "strong" and node.fencing == "weak":
            return Refused(Reason.STALE, f"nodes/{node.name}", detail="fencing")
        lacking = fits(node, tuple(held.get(node_uid, ())), mine, now.unix_ns)
        if lacking:
            return Refused(Reason.STALE, f"nodes/{node.name}", detail=lacking)
    generation = Generation(
        job=job.id,
        number=command.number,
        phase=Phase.PREPARING,
        members=command.members,
        restored_checkpoint=command.checkpoint,
        restored_step=checkpoint.step if checkpoint is not None else 0,
        cause_id=command.cause_id,
    )
    draft.put(generation)
    first = command.number == 1
    draft.put(
        replace(
            job,
            generation=command.number,
            state=JobState.STARTING if first else JobState.RESTARTING,
            restarts=job.restarts + (0 if first else 1),
        )
    )
    draft.tell(_started(draft, generation))
    return draft.done(Reply(job.id))


def _by_node(members: tuple[Member, ...]) -> dict[NodeUid, list[Member]]:
    found: dict[NodeUid, list[Member]] = {}
    for member in members:
        found.setdefault(member.node, []).append(member)
    return found


def _started(draft: Draft, generation: Generation) -> Event:
    nodes = {f"rank{m.rank}": _node_name(draft, m) for m in generation.ranks}
    nodes |= {f"spare{i}": _node_name(draft, m) for i, m in enumerate(m for m in generation.members if m.rank is None)}
    numbers = {"ranks": len(generation.ranks), "spares": len(generation.members) - len(generation.ranks)}
    if generation.restored_checkpoint is not None:
        numbers["restored_step"] = generation.restored_step
        nodes["checkpoint"] = generation.restored_checkpoint
    return events.of_generation("generation.started", generation, numbers=numbers, details=nodes)


def _node_name(draft: Draft, member: Member) -> str:
    node = draft.node(member.node)
    return node.name if node is not None else member.node


def _shape_wrong(job: Job, number: int, members: tuple[Member, ...]) -> str:
    """A gang is all or nothing: every rank once, named as its slot, nothing left over."""
    gang = job.spec.gang
    ranks = sorted(m.rank for m in members if m.rank is not None)
    spares = [m for m in members if m.rank is None]
    if ranks != list(range(gang.ranks)):
        return "ranks"
    if len(spares) > gang.spares:
        return "spares"
    expected = {slot_id(job.id, number, m.rank) for m in members if m.rank is not None}
    expected |= {slot_id(job.id, number, i, spare=True) for i in range(len(spares))}
    if {m.slot for m in members} != expected:
        return "slots"
    if gang.spread == "node" and len({m.node for m in members}) != len(members):
        return "spread"
    if any(m.lease is not LeaseState.GRANTED or m.exit is not None for m in members):
        return "leases"
    need = job.spec.resources
    shares = sum(d.count * d.share_thousandths for d in need.devices)
    for member in members:
        if (member.cpu_millis, member.memory_bytes) != (need.cpu_millis, need.memory_bytes):
            return "resources"
        if sum(d.share_thousandths for d in member.devices) != shares:
            return "devices"
    return ""


def _current(state: State, job_id: JobId, number: int) -> tuple[Job, Generation] | Refused:
    job = state.jobs.get(job_id)
    if job is None:
        return Refused(Reason.NOT_FOUND, f"jobs/{job_id}")
    generation = state.current(job_id)
    if generation is None or generation.number != number:
        return Refused(Reason.STALE, f"jobs/{job_id}", detail="generation")
    return job, generation


def go(state: State, command: CommitGo) -> Outcome:
    found = _current(state, command.job, command.generation)
    if isinstance(found, Refused):
        return found
    _, generation = found
    if generation.phase is not Phase.PREPARING:
        return Refused(Reason.STALE, f"jobs/{command.job}", detail="phase")
    # A lease may have run out after the tick saw its rank READY: the rest is no gang, and its devices may be granted.
    if not all(m.lease.holds for m in generation.ranks):
        return Refused(Reason.STALE, f"jobs/{command.job}", detail="leases")
    draft = Draft(state)
    draft.put(
        replace(
            generation,
            phase=Phase.GO,
            master_address=command.master_address,
            master_port=command.master_port,
        )
    )
    draft.tell(events.of_generation("generation.went", generation))
    return draft.done()


def mark_active(state: State, command: MarkActive) -> Outcome:
    found = _current(state, command.job, command.generation)
    if isinstance(found, Refused):
        return found
    job, generation = found
    if generation.phase is not Phase.GO:
        return Refused(Reason.STALE, f"jobs/{command.job}", detail="phase")
    draft = Draft(state)
    members = tuple(
        replace(m, lease=LeaseState.ACTIVE) if m.rank is not None and m.lease is LeaseState.GRANTED else m
        for m in generation.members
    )
    draft.put(replace(generation, phase=Phase.ACTIVE, members=members))
    draft.put(replace(job, state=JobState.RUNNING, prepare_failures=0))
    draft.tell(events.of_generation("generation.active", generation))
    return draft.done()


def mark_progress(state: State, command: MarkProgress) -> Outcome:
    found = _current(state, command.job, command.generation)
    if isinstance(found, Refused):
        return found
    job, generation = found
    if not generation.phase.under_way or generation.progressed:
        return Transition()
    draft = Draft(state)
    draft.put(replace(generation, progressed=True))
    draft.put(replace(job, fruitless_generations=0))
    return draft.done()


def stop(state: State, command: StopGeneration, now: Now) -> Outcome:
    found = _current(state, command.job, command.generation)
    if isinstance(found, Refused):
        return found
    job, generation = found
    if not generation.phase.under_way:
        return Transition()
    draft = Draft(state)
    if command.highest_step > job.highest_step:
        draft.put(replace(job, highest_step=command.highest_step))
    begin_stop(draft, generation, command.reason, command.error, now)
    return draft.done()


def may_leave_behind(state: State, job: Job, member: Member) -> bool:
    """Whether a rank that may still run on a silent node can do no harm: every output of its job is under the token."""
    node = state.nodes.get(member.node)
    silent = node is None or node.liveness is not Liveness.LIVE or node.incarnation != member.incarnation
    return job.spec.writes is Writes.TOKEN and silent


def end(state: State, command: EndGeneration, now: Now) -> Outcome:
    found = _current(state, command.job, command.generation)
    if isinstance(found, Refused):
        return found
    job, generation = found
    if generation.phase is not Phase.STOPPING:
        return Refused(Reason.STALE, f"jobs/{command.job}", detail="phase")
    if any(m.lease.holds and not may_leave_behind(state, job, m) for m in generation.ranks):
        return Refused(Reason.STALE, f"jobs/{command.job}", detail="leases held")
    draft = Draft(state)
    draft.put(replace(generation, phase=Phase.ENDED))
    draft.tell(events.of_generation("generation.ended", generation, reason=generation.stop_reason or ""))
    if job.state is JobState.CANCELLING:
        end_job(draft, job, JobState.CANCELLED, now)
        return draft.done()
    job = _distrust_checkpoint(draft, job, generation)
    failure = _final_failure(draft, job, generation, now)
    if failure:
        first = job.first_error or TaskError(
            generation.number, 0, generation.members[0].node, generation.stop_reason or StopReason.RANK_FAILED
        )
        end_job(draft, replace(job, first_error=first), JobState.FAILED, now, failure)
    else:
        draft.put(job)
    return draft.done()


def _distrust_checkpoint(draft: Draft, job: Job, generation: Generation) -> Job:
    if job.fruitless_generations < FRUITLESS_MAX or generation.restored_checkpoint is None:
        return job
    checkpoint = draft.checkpoint(job.id, generation.restored_checkpoint)
    if checkpoint is None or checkpoint.state is not CheckpointState.COMMITTED:
        return job
    draft.put(replace(checkpoint, state=CheckpointState.BAD))
    draft.tell(
        events.of_generation("checkpoint.bad", generation, reason="FRUITLESS", numbers={"step": checkpoint.step})
    )
    return replace(job, fruitless_generations=0)


def _final_failure(draft: Draft, job: Job, generation: Generation, now: Now) -> str:
    """Why the job may not start again; empty when it may."""
    restart = job.spec.restart
    recent = [t for t in job.restart_times_unix_ns if t > now.unix_ns - restart.window_ns]
    if generation.stop_reason in BLAMES_NODE:
        if job.prepare_failures >= PREPARE_FAILURES_MAX:
            return "CANNOT_PREPARE"
    elif generation.stop_reason is not StopReason.DRAIN and len(recent) > restart.max:
        return "RESTART_BUDGET"
    states = [c.state for c in draft.checkpoints(job.id)]
    # A job that saves nothing may never report a step either: its budget alone decides.
    if states and job.fruitless_generations >= FRUITLESS_MAX:
        return "NO_PROGRESS"
    if CheckpointState.BAD in states and CheckpointState.COMMITTED not in states:
        # Starting from zero after good work was saved would be silent loss (G11): say so and stop.
        return "NO_CHECKPOINT_VERIFIES"
    return ""
