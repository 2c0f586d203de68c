"""One generation: what its phase wants of each slot, against what agents say of it."""

from __future__ import annotations

from controld.core.agent import Go, Prepare, Restore, SlotState, SlotStatus, Stop
from controld.core.commands import (
    CommitGo,
    EndGeneration,
    MarkActive,
    MarkProgress,
    ReleaseMember,
    ReportBadShard,
    StopGeneration,
)
from controld.core.ids import CheckpointId, SlotId, Token
from controld.core.model import (
    Generation,
    Job,
    Liveness,
    Member,
    Phase,
    TaskError,
    TaskExit,
)
from controld.core.spec import SECOND_NS, Writes
from controld.core.transitions.endings import BLAMES_NODE
from controld.core.transitions.generations import may_leave_behind
from controld.health.view import Refusals
from controld.reconcile import drain
from controld.reconcile.decisions import Pass
from controld.reconcile.liveness import heard_again
from virialpb.reasons import ExitReason, PrepareFailure, StopReason

BAD_SHARD = (PrepareFailure.SHARD_MISSING, PrepareFailure.SHARD_CORRUPT)
# Why a generation is stopped, the members that are the cause (the first is named), and a detail.
Late = tuple[StopReason, list[Member], str]
# After these the slot runs nothing and holds nothing at the agent.
OVER = (SlotState.EXITED, SlotState.PREPARE_FAILED)


def status_of(p: Pass, member: Member, token: Token) -> SlotStatus | None:
    """What the node said of this member in its last beat; None when it knows no such slot."""
    session = p.view.sessions.get(member.node)
    if session is None or session.incarnation != member.incarnation:
        return None
    status = session.slots.get(member.slot)
    return status if status is not None and status.token == token else None


def reconcile(p: Pass, job: Job, generation: Generation) -> None:
    """Drive one generation a step: the current one, or a former one that still holds leases."""
    token = Token(job.id, generation.number, p.state.epoch_of(generation))
    statuses = {m.slot: status_of(p, m, token) for m in generation.members}
    if generation.phase.under_way:
        _watch_progress(p, job, generation, statuses)
        if _stop_if_lost(p, job, generation, token, statuses):
            return
    for member in generation.members:
        if member.lease.holds:
            _member(p, job, generation, member, token, statuses[member.slot])
    if generation.phase is Phase.PREPARING:
        _go_if_ready(p, job, generation, statuses)
    elif generation.phase is Phase.GO:
        _active_if_running(p, job, generation, statuses)
    elif generation.phase is Phase.STOPPING and all(
        not m.lease.holds or may_leave_behind(p.state, job, m) for m in generation.ranks
    ):
        p.commands.append(EndGeneration(job.id, generation.number))


def _member(p: Pass, job: Job, generation: Generation, member: Member, token: Token, status: SlotStatus | None) -> None:
    session = p.view.sessions.get(member.node)
    if session is None or not session.connected or session.incarnation != member.incarnation:
        return
    if status is None:
        _absent(p, job, generation, member, token)
    elif status.state in OVER:
        if status.state is SlotState.PREPARE_FAILED and generation.phase is Phase.PREPARING:
            _prepare_failed(p, job, generation, member, status)
        exit_ = status.exit
        if exit_ is not None and exit_.reason is ExitReason.LEASE_EXPIRED and generation.phase.under_way:
            _leave_out(p, job, member)  # it beats, so it is there; but it did not hear that its beats were acknowledged
        if exit_ is None and member.rank is not None and generation.phase.under_way:
            exit_ = TaskExit(ExitReason.START_FAILED, stderr_tail=status.failure_detail)
        elif exit_ is not None and exit_.reason is ExitReason.START_FAILED and generation.phase.under_way:
            _leave_out(p, job, member)
        p.commands.append(
            ReleaseMember(
                job.id,
                generation.number,
                token.epoch,
                member.slot,
                member.incarnation,
                exit_,
                status.progress_step,
            )
        )
    elif generation.phase in (Phase.STOPPING, Phase.ENDED):
        if member.rank is not None:
            reason = generation.stop_reason or StopReason.SUPERSEDED
            p.order(member.node, member.slot, Stop(member.slot, token, job.spec.task.grace_ms, reason))
    elif status.state is SlotState.READY and generation.phase in (Phase.GO, Phase.ACTIVE) and member.rank is not None:
        p.order(
            member.node,
            member.slot,
            Go(
                slot=member.slot,
                token=token,
                world_size=len(generation.ranks),
                master_address=generation.master_address,
                master_port=generation.master_port,
                restart_count=job.restarts,
            ),
        )


def _absent(p: Pass, job: Job, generation: Generation, member: Member, token: Token) -> None:
    """The node's last beat does not know the slot under this token."""
    session = p.view.sessions[member.node]
    if member.slot in session.slots:
        return  # it does under that of a history before a restore: stopped first, and till then its devices are in use
    if generation.phase is Phase.PREPARING:
        _order_prepare(p, job, generation, member, token)
    elif member.rank is None:
        if generation.phase.under_way:
            _order_prepare(p, job, generation, member, token)
    elif generation.phase in (Phase.STOPPING, Phase.ENDED):
        # Beats are complete, so nothing of it is there; a PREPARE still on its way can start nothing without GO.
        p.commands.append(
            ReleaseMember(job.id, generation.number, token.epoch, member.slot, member.incarnation, member.exit)
        )
    else:
        lost = TaskExit(ExitReason.GUARDIAN_LOST)
        p.commands.append(ReleaseMember(job.id, generation.number, token.epoch, member.slot, member.incarnation, lost))


def _order_prepare(p: Pass, job: Job, generation: Generation, member: Member, token: Token) -> None:
    session = p.view.sessions[member.node]
    # What held these devices before must be gone from the node first, or its guardian refuses a second holder.
    if any(s.token.job == job.id and s.token.generation < generation.number for s in session.slots.values()):
        return
    p.order(
        member.node,
        member.slot,
        Prepare(
            slot=member.slot,
            token=token,
            rank=member.rank,
            world_size=len(generation.ranks),
            cpu_millis=member.cpu_millis,
            memory_bytes=member.memory_bytes,
            devices=member.devices,
            task=job.spec.task,
            checkpoint=job.spec.checkpoint,
            fence_after_ms=job.spec.fence_after_ns // 1_000_000,
            hold_port=member.rank == 0,
            restore=_restore(p, generation, member),
            cause_id=generation.cause_id,
        ),
    )


def _restore(p: Pass, generation: Generation, member: Member) -> Restore | None:
    if generation.restored_checkpoint is None or member.rank is None:
        return None
    checkpoint = p.state.checkpoints.get(generation.job, {}).get(generation.restored_checkpoint)
    if checkpoint is None:
        return None
    part = next((s for s in checkpoint.parts if s.rank == member.rank), None)
    if part is None:
        return None
    return Restore(
        checkpoint=checkpoint.id,
        step=checkpoint.step,
        directory=checkpoint.directory,
        tier=checkpoint.tier,
        file=part.file,
        digest=part.digest,
        size_bytes=part.size_bytes,
    )


def _leave_out(p: Pass, job: Job, member: Member) -> None:
    """Leave the node out of the job's next plans for a while."""
    refusals = p.view.refusals.setdefault((job.id, member.node), Refusals())
    refusals.count += 1
    back_off_ns = min(p.limits.refusal_back_off_ns << min(refusals.count - 1, 16), p.limits.refusal_back_off_max_ns)
    refusals.until_ns = p.now.boottime_ns + back_off_ns


def _prepare_failed(p: Pass, job: Job, generation: Generation, member: Member, status: SlotStatus) -> None:
    failure = status.failure
    _leave_out(p, job, member)
    if (
        failure is not None
        and failure in BAD_SHARD
        and generation.restored_checkpoint is not None
        and member.rank is not None
    ):
        p.commands.append(
            ReportBadShard(job.id, generation.number, generation.restored_checkpoint, member.rank, failure)
        )
        # The node is not to blame for a copy that another one may have damaged.
        del p.view.refusals[(job.id, member.node)]
    if member.rank is not None:
        detail = f"{failure or ''}: {status.failure_detail}".strip(": ")
        error = TaskError(generation.number, member.rank, member.node, StopReason.PREPARE_FAILED, detail)
        p.commands.append(StopGeneration(job.id, generation.number, StopReason.PREPARE_FAILED, error))


def _go_if_ready(p: Pass, job: Job, generation: Generation, statuses: dict[SlotId, SlotStatus | None]) -> None:
    ready = {m.rank: s for m in generation.ranks if (s := statuses[m.slot]) is not None and s.state is SlotState.READY}
    master = next(m for m in generation.ranks if m.rank == 0)
    node = p.state.nodes.get(master.node)
    if len(ready) == len(generation.ranks) and node is not None:
        p.commands.append(CommitGo(job.id, generation.number, node.advertise_address, ready[0].port))


def _active_if_running(p: Pass, job: Job, generation: Generation, statuses: dict[SlotId, SlotStatus | None]) -> None:
    for member in generation.ranks:
        status = statuses[member.slot]
        if not member.done and (status is None or status.state is not SlotState.RUNNING):
            return
    p.commands.append(MarkActive(job.id, generation.number))


def highest_step(generation: Generation, statuses: dict[SlotId, SlotStatus | None]) -> int:
    steps = [s.progress_step for m in generation.ranks if (s := statuses[m.slot]) is not None]
    return max(steps, default=-1)


def _watch_progress(p: Pass, job: Job, generation: Generation, statuses: dict[SlotId, SlotStatus | None]) -> None:
    start = generation.restored_step if generation.restored_checkpoint is not None else -1
    if not generation.progressed and highest_step(generation, statuses) > start:
        p.commands.append(MarkProgress(job.id, generation.number))


def _stop_if_lost(
    p: Pass, job: Job, generation: Generation, token: Token, statuses: dict[SlotId, SlotStatus | None]
) -> bool:
    """Stop the generation when a member's node is lost to it, or a deadline of its phase has passed."""
    found = _lost_member(p, job, generation, token, statuses) or _deadline_passed(p, job, generation, statuses)
    if found is None:
        return False
    reason, members, detail = found
    if reason in BLAMES_NODE:
        for late in members:
            _leave_out(p, job, late)
    member = members[0]
    error = TaskError(generation.number, member.rank or 0, member.node, reason, detail)
    p.commands.append(StopGeneration(job.id, generation.number, reason, error, highest_step(generation, statuses)))
    return True


def _lost_member(
    p: Pass, job: Job, generation: Generation, token: Token, statuses: dict[SlotId, SlotStatus | None]
) -> Late | None:
    drained: Member | None = None
    for member in generation.ranks:
        if not member.lease.holds and member.done:
            continue
        node = p.state.nodes.get(member.node)
        if node is None or node.liveness is Liveness.EXPIRED or node.incarnation != member.incarnation:
            return StopReason.NODE_LOST, [member], ""
        if not member.lease.holds:
            return StopReason.NODE_LOST, [member], "lease"
        if node.liveness is Liveness.SUSPECT and not heard_again(node, p.view, p.now.boottime_ns):
            # A job that writes elsewhere may not restart before the lease ends, so its peers are left alone till
            # then: the silent rank may yet come back. Before GO nothing runs, and waiting serves nobody.
            if job.spec.writes is Writes.TOKEN or generation.phase is Phase.PREPARING:
                return StopReason.NODE_SUSPECT, [member], ""
        elif node.draining:
            drained = drained or member
    if drained is not None and drain.may_go(p, job, generation, token, statuses):
        return StopReason.DRAIN, [drained], ""
    return None


def _unheard(p: Pass, job: Job, generation: Generation, member: Member, deadline_ns: int) -> bool:
    """A beat from after the deadline says nothing of a PREPARE, nor of a former rank that it has to wait for."""
    session = p.view.sessions.get(member.node)
    if session is None or not session.connected or session.incarnation != member.incarnation:
        return False
    if session.last_receipt_ns is None or session.last_receipt_ns <= deadline_ns:
        return False
    former = any(s.token.job == job.id and s.token.generation < generation.number for s in session.slots.values())
    return not former and member.slot not in session.slots


def _deadline_passed(
    p: Pass, job: Job, generation: Generation, statuses: dict[SlotId, SlotStatus | None]
) -> Late | None:
    what = ("phase", job.id, str(generation.number), generation.phase.value)
    since_ns = p.view.first_seen(p.now.boottime_ns, *what)
    elapsed_ns = p.now.boottime_ns - since_ns
    if generation.phase is Phase.PREPARING:
        return _unprepared(p, job, generation, statuses, since_ns)
    if generation.phase is Phase.GO and elapsed_ns > p.limits.go_timeout_ns:
        waiting = [m for m in generation.ranks if not m.done and _says(statuses[m.slot], SlotState.READY)]
        if waiting:
            return StopReason.GO_DEADLINE, waiting, ""
    start_timeout_ns = job.spec.start_timeout_ns
    if start_timeout_ns and generation.phase in (Phase.GO, Phase.ACTIVE):
        since_go_ns = p.view.first_seen(p.now.boottime_ns, "went", job.id, str(generation.number))
        if p.now.boottime_ns - since_go_ns > start_timeout_ns:
            for member in generation.ranks:
                status = statuses[member.slot]
                if not member.done and (status is None or status.progress_step < 0):
                    return StopReason.START_DEADLINE, [member], ""
    return None


def _says(status: SlotStatus | None, *states: SlotState) -> bool:
    """Whether the node says one of these of the slot, or nothing of it."""
    return status is None or status.state in states


def _unprepared(
    p: Pass, job: Job, generation: Generation, statuses: dict[SlotId, SlotStatus | None], since_ns: int
) -> Late | None:
    """Whether a rank has taken too long to get ready: all told, or since its agent has read on in its shard."""
    late = [m for m in generation.ranks if not m.done and _says(statuses[m.slot], SlotState.PREPARING)]
    if p.now.boottime_ns - since_ns > _prepare_timeout_ns(p, generation) and late:
        status = statuses[late[0].slot]
        return StopReason.PREPARE_DEADLINE, late, status.failure_detail if status is not None else ""
    for member in late:
        if _unheard(p, job, generation, member, since_ns + p.limits.unheard_ns):
            return StopReason.PREPARE_DEADLINE, [member], "unheard"
    stalled = [m for m in late if p.view.reads_nothing_ns(m.node, m.slot) > p.limits.prepare_stall_ns]
    return (StopReason.PREPARE_DEADLINE, stalled, "stalled") if stalled else None


def _prepare_timeout_ns(p: Pass, generation: Generation) -> int:
    """A total for the generation: its largest shard has to be read in it."""
    checkpoint = p.state.checkpoints.get(generation.job, {}).get(generation.restored_checkpoint or CheckpointId(""))
    size_bytes = max((s.size_bytes for s in checkpoint.parts), default=0) if checkpoint is not None else 0
    return p.limits.prepare_timeout_ns + size_bytes * SECOND_NS // p.limits.restore_bytes_per_second_min
