"""tick(state, view, now): desired against actual, once. Everything that happens by itself starts here.

Level-triggered: nothing is remembered of what was tried, only of when an order was last given. What a pass
decides is verified again by the transitions, so a pass on a state that is a commit behind does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final
from zlib import crc32

from controld.core.agent import DropCheckpoint, Release, SlotState, SlotStatus, Stop
from controld.core.checkpoints import droppable, holders
from controld.core.commands import AbortCheckpoint, CollectCheckpoints, Now
from controld.core.ids import NodeUid
from controld.core.model import Checkpoint, CheckpointState, Job, JobState, Liveness, Phase, Tier
from controld.core.state import State
from controld.health.view import View
from controld.reconcile import gang, pending
from controld.reconcile.decisions import Decisions, Pass
from controld.reconcile.limits import Limits
from controld.reconcile.liveness import assess
from virialpb.ids import Epoch
from virialpb.reasons import StopReason

# Of so many, a piece takes some 3 ms.
PART_MEMBERS: Final = 1_000
PART_SESSIONS: Final = 2_000


def tick(state: State, view: View, now: Now, leader_epoch: Epoch, limits: Limits) -> Decisions:
    """A whole pass at one moment."""
    p = Pass(state, view, now, leader_epoch, limits)
    for part in parts(state, view):
        part(p)
    return p.decisions()


Part = Callable[[Pass], None]


def parts(state: State, view: View) -> Iterator[Part]:
    """A pass in pieces of a few ms. Each stands alone: state and view may change between two of them.

    So what a piece decides is to be given before the next one is taken: an expiry rests on what was heard till then.
    """
    yield _liveness
    chunk: list[Job] = []
    weight = 0
    for job in sorted(state.jobs.values(), key=lambda j: j.number):
        chunk.append(job)
        weight += _weight(state, job)
        if weight >= PART_MEMBERS:
            yield partial(_jobs, jobs=tuple(chunk))
            chunk, weight = [], 0
    yield partial(_jobs, jobs=tuple(chunk))
    sessions = sorted(view.sessions)
    for begin in range(0, len(sessions), PART_SESSIONS):
        yield partial(_slots, uids=sessions[begin : begin + PART_SESSIONS])
    yield _forget


def _weight(state: State, job: Job) -> int:
    """About how many members a pass looks at; a job long over costs little."""
    current = state.current(job.id)
    return 1 + (0 if current is None or job.state.ended else len(current.members))


def _liveness(p: Pass) -> None:
    liveness = assess(p.state, p.view, p.now, p.limits)
    p.commands += liveness.commands
    p.look_again_ns = liveness.look_again_ns


def _jobs(p: Pass, jobs: Sequence[Job]) -> None:
    for listed in jobs:
        job = p.state.jobs.get(listed.id)
        if job is None:
            continue
        try:
            _job(p, job)
            _checkpoints(p, job)
        except Exception as error:  # noqa: BLE001 - one job that a rule trips over must not stop all the others
            p.broken.append((job.id, repr(error)))


def _slots(p: Pass, uids: Sequence[NodeUid]) -> None:
    for uid in uids:
        if uid in p.view.sessions:
            _stale_slots(p, uid)


def _forget(p: Pass) -> None:
    _forget_finished(p)


def _job(p: Pass, job: Job) -> None:
    current = p.state.current(job.id)
    for number in sorted(p.state.generations.get(job.id, {})):
        generation = p.state.generations[job.id][number]
        # A former one may have been left behind on a silent node: it is wound up when the node speaks again.
        under_way = generation is current and generation.phase is not Phase.ENDED
        if under_way or (p.state.is_leased(job.id, number) and any(m.lease.holds for m in generation.ranks)):
            gang.reconcile(p, job, generation)
    if job.state in (JobState.PENDING, JobState.RESTARTING) and (current is None or current.phase is Phase.ENDED):
        pending.propose(p, job, current)


def _stale_slots(p: Pass, uid: NodeUid) -> None:
    """Slots an agent has that no lease stands behind: stop what runs, then let the agent forget it."""
    session = p.view.sessions[uid]
    for status in session.slots.values():
        token = status.token
        if (token.epoch.history, token.epoch.revision) > (p.state.history, p.state.revision):
            p.newer_seen = True
            continue
        if _stands(p, uid, status):
            continue
        if status.state in gang.OVER:
            p.order(uid, status.slot, Release(status.slot, token))
        elif status.state is not SlotState.STUCK:
            p.order(uid, status.slot, Stop(status.slot, token, _grace_ms(p, status), StopReason.SUPERSEDED))


def _stands(p: Pass, uid: NodeUid, status: SlotStatus) -> bool:
    token = status.token
    key = (token.job, token.generation)
    if (known := p.seats.get(key)) is None:
        generation = p.state.generations.get(token.job, {}).get(token.generation)
        if generation is None:
            return False
        # Once a generation: each of thousands of agents asks for its own member.
        known = p.seats[key] = (p.state.epoch_of(generation), {m.slot: m for m in generation.members})
    epoch, members = known
    if epoch != token.epoch:
        return False
    member = members.get(status.slot)
    session = p.view.sessions[uid]
    return (
        member is not None and member.node == uid and member.incarnation == session.incarnation and member.lease.holds
    )


def _grace_ms(p: Pass, status: SlotStatus) -> int:
    job = p.state.jobs.get(status.token.job)
    return job.spec.task.grace_ms if job is not None else 0


def _checkpoints(p: Pass, job: Job) -> None:
    table = p.state.checkpoints.get(job.id, {})
    newest = max(
        ((c.generation, c.step) for c in table.values() if c.state is CheckpointState.COMMITTED), default=(0, 0)
    )
    for checkpoint in table.values():
        if checkpoint.state is CheckpointState.BEGUN:
            _abort_if_hopeless(p, job, checkpoint, newest)
        elif checkpoint.state is CheckpointState.DROPPING:
            _order_drop(p, checkpoint)
    may_go = sorted(droppable(p.state, job.id))
    doomed = tuple(may_go[: p.limits.collects_per_tick_max])
    if doomed:
        p.commands.append(CollectCheckpoints(job.id, doomed))


def _abort_if_hopeless(p: Pass, job: Job, checkpoint: Checkpoint, newest: tuple[int, int]) -> None:
    """A part that never comes must not keep the record open. `newest`: (generation, step) of the newest committed.

    Every phase has a deadline (G20). And a gang that has committed a later step has no use for an earlier one: ranks
    that gave up their saves while the controller was away leave some behind, and only so many may be open at a time.
    """
    since_ns = p.view.first_seen(p.now.boottime_ns, "begun", job.id, checkpoint.id)
    reason = ""
    if (checkpoint.generation, checkpoint.step) < newest:
        reason = "OVERTAKEN"
    elif p.now.boottime_ns - since_ns > job.spec.checkpoint.timeout_ns:
        reason = "DEADLINE"
    if reason:
        p.commands.append(AbortCheckpoint(job.id, checkpoint.generation, checkpoint.id, reason))


def _order_drop(p: Pass, checkpoint: Checkpoint) -> None:
    """Tell the nodes that may have files to delete them; for a shared directory one of those, or else any.

    That one is another for each checkpoint, and after a while: one that cannot must not keep the files for ever.
    """
    order = DropCheckpoint(checkpoint.job, checkpoint.id, checkpoint.directory, checkpoint.tier)
    chosen = [n for n in sorted(holders(p.state, checkpoint)) if p.state.nodes[n].liveness is Liveness.LIVE]
    if checkpoint.tier is Tier.SHARED:
        candidates = chosen or [n for n in sorted(p.state.nodes) if p.state.nodes[n].liveness is Liveness.LIVE]
        turn = crc32(checkpoint.directory.encode()) + p.now.boottime_ns // p.limits.drop_patience_ns
        chosen = [candidates[turn % len(candidates)]] if candidates else []
    for uid in chosen:
        p.order(uid, f"{checkpoint.job}/{checkpoint.id}", order)


def _forget_finished(p: Pass) -> None:
    """Bound the view: what it remembers of jobs that are gone or have ended, and of nodes that are gone."""
    alive = {id_ for id_, job in p.state.jobs.items() if not job.state.ended}
    for key in [k for k in p.view.since_ns if k[1] not in alive]:
        del p.view.since_ns[key]
    for job_id in [j for j in p.view.explain if j not in alive]:
        del p.view.explain[job_id]
    for pair in [k for k in p.view.refusals if k[0] not in alive]:
        del p.view.refusals[pair]
    # Hosts that were made anew or removed: their identities never come again.
    for uid in [u for u, s in p.view.sessions.items() if not s.connected and u not in p.state.nodes]:
        del p.view.sessions[uid]
    horizon_ns = p.now.boottime_ns - 60 * p.limits.resend_ns
    for session in p.view.sessions.values():
        if session.sent_ns:
            for key in [k for k, at_ns in session.sent_ns.items() if at_ns < horizon_ns]:
                del session.sent_ns[key]
