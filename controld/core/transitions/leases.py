"""How a lease ends: RELEASED when its processes were seen gone, EXPIRED when its deadline passed; nothing else."""

from __future__ import annotations

from dataclasses import replace

from controld.core import events
from controld.core.commands import ExpireLeases, MarkExpired, Now, ReleaseMember
from controld.core.draft import Draft
from controld.core.ids import SlotId
from controld.core.model import Event, Generation, JobState, LeaseState, Liveness, Member, Node, Phase, TaskError
from controld.core.outcome import Outcome, Refused, Transition
from controld.core.state import State
from controld.core.transitions.endings import begin_stop, end_job
from virialpb.reasons import ExitReason, Reason, StopReason


def _of_life(state: State, command: MarkExpired | ExpireLeases) -> Node | Refused:
    node = state.nodes.get(command.incarnation.node_uid)
    if node is None:
        return Refused(Reason.NOT_FOUND, f"nodes/{command.incarnation.node_uid}")
    return node


def mark_expired(state: State, command: MarkExpired) -> Outcome:
    node = _of_life(state, command)
    if isinstance(node, Refused):
        return node
    draft = Draft(state)
    if node.incarnation == command.incarnation and node.liveness is not Liveness.EXPIRED:
        draft.put(replace(node, liveness=Liveness.EXPIRED))
        draft.tell(events.of_node("node.expired", node))
    for generation, member in draft.free_leases(node.uid, command.incarnation, LeaseState.EXPIRED):
        draft.tell(_expired(generation, member, node))
    return draft.done()


def expire(state: State, command: ExpireLeases) -> Outcome:
    node = _of_life(state, command)
    if isinstance(node, Refused):
        return node
    draft = Draft(state)
    wanted: set[SlotId] = set(command.slots)
    for generation, member in draft.held_on(node.uid):
        if member.slot in wanted and member.incarnation == command.incarnation:
            current = draft.generation(generation.job, generation.number) or generation
            draft.change_member(current, replace(member, lease=LeaseState.EXPIRED))
            draft.tell(_expired(generation, member, node))
    return draft.done()


def _expired(generation: Generation, member: Member, node: Node) -> Event:
    return events.of_generation("lease.expired", generation, node=node.name, details={"slot": member.slot})


def release(state: State, command: ReleaseMember, now: Now) -> Outcome:
    draft = Draft(state)
    generation = draft.generation(command.job, command.generation)
    job = draft.job(command.job)
    if generation is None or job is None:
        return Refused(Reason.NOT_FOUND, f"jobs/{command.job}", detail=command.slot)
    if state.epoch_of(generation) != command.epoch:
        return Refused(Reason.FENCED, f"jobs/{command.job}", detail=command.slot)
    member = generation.member(command.slot)
    if member is None or member.incarnation != command.incarnation:
        return Refused(Reason.FENCED, f"jobs/{command.job}", detail=command.slot)
    if not member.lease.holds:
        return Transition()
    if command.progress_step > job.highest_step:
        job = replace(job, highest_step=command.progress_step)
        draft.put(job)
    node = state.nodes.get(member.node)
    node_name = node.name if node is not None else member.node
    released = replace(member, lease=LeaseState.RELEASED, exit=command.exit)
    generation = draft.change_member(generation, released)
    draft.tell(_exited(generation, released, node_name))
    if member.rank is None or generation.phase is Phase.ENDED:
        return draft.done()
    # All ranks done wins over a failure noticed at the same time, such as the silence of a node whose rank had ended. A
    # rank that was stopped says STOPPED, so none of these was cut short.
    if generation.all_done and job.state is not JobState.CANCELLING:
        draft.put(replace(generation, phase=Phase.ENDED, stop_reason=StopReason.FINISHED))
        end_job(draft, job, JobState.SUCCEEDED, now)
        return draft.done()
    if released.done or generation.phase is Phase.STOPPING:
        return draft.done()
    unstarted = command.exit is not None and command.exit.reason is ExitReason.START_FAILED
    reason = StopReason.PREPARE_FAILED if unstarted else StopReason.RANK_FAILED
    error = TaskError(generation.number, member.rank, member.node, reason, exit=command.exit)
    begin_stop(draft, generation, reason, error, now)
    return draft.done()


def _exited(generation: Generation, member: Member, node_name: str) -> Event:
    exit_ = member.exit
    numbers = {} if member.rank is None else {"rank": member.rank}
    if exit_ is None:
        return events.of_generation("lease.released", generation, node=node_name, numbers=numbers)
    numbers |= {"code": exit_.code, "signal": exit_.signal}
    return events.of_generation("task.exited", generation, node=node_name, reason=exit_.reason, numbers=numbers)
