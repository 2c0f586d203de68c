"""A node is drained: the gangs on it save first, so that moving them costs no step."""

from __future__ import annotations

from collections.abc import Mapping

from controld.core.agent import SaveNow, SlotState, SlotStatus
from controld.core.ids import SlotId, Token
from controld.core.model import Checkpoint, CheckpointState, Generation, Job, Phase
from controld.reconcile.decisions import Pass
from virialpb.reasons import StopReason


def may_go(
    p: Pass, job: Job, generation: Generation, token: Token, statuses: Mapping[SlotId, SlotStatus | None]
) -> bool:
    """Whether a gang with a rank on a draining node may be stopped now.

    One that reports progress is asked to save, and is stopped when a checkpoint that it began since is committed, or
    `drain_save_ns` after the first look: a node that has to go does not wait for ever.
    """
    if generation.phase is not Phase.ACTIVE or not generation.progressed:
        return True
    now_ns = p.now.boottime_ns
    asked_ns = p.view.first_seen(now_ns, "drain", job.id, str(generation.number))
    since = _begun_since(p, generation, asked_ns)
    if any(c.state is CheckpointState.COMMITTED for c in since) or now_ns - asked_ns >= p.limits.drain_save_ns:
        return True
    if not any(c.state is CheckpointState.BEGUN for c in since):
        # Ranks that exchange gradients agree on the step among themselves (`virial.task.SaveRequest`).
        for member in generation.ranks:
            status = statuses[member.slot]
            if status is not None and status.state is SlotState.RUNNING:
                p.order(member.node, member.slot, SaveNow(member.slot, token, -1, StopReason.DRAIN))
    return False


def _begun_since(p: Pass, generation: Generation, asked_ns: int) -> list[Checkpoint]:
    """By when this leader first saw them. The wall clock of a record is of whoever led then, and may have been set."""
    job = generation.job
    own = [c for c in p.state.checkpoints.get(job, {}).values() if c.generation == generation.number]
    return [
        c for c in own if p.view.first_seen(p.now.boottime_ns, "drain", job, str(generation.number), c.id) > asked_ns
    ]
