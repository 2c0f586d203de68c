"""Which checkpoint a gang may start from, and which may be collected."""

from __future__ import annotations

from controld.core.ids import CheckpointId, JobId, NodeUid
from controld.core.model import Checkpoint, CheckpointState, Liveness, Phase, Tier
from controld.core.state import State

# Whatever a job asks for, so many committed ones stay: the newest may turn out to be bad (G13).
KEEP_MIN = 2


def committed(state: State, job: JobId) -> tuple[Checkpoint, ...]:
    """Committed checkpoints, newest first: highest step, then the later id."""
    found = (c for c in state.checkpoints.get(job, {}).values() if c.state is CheckpointState.COMMITTED)
    return tuple(sorted(found, key=lambda c: (c.step, c.id), reverse=True))


def reachable(state: State, checkpoint: Checkpoint) -> bool:
    """Whether every part can be read: the shared tier always, the local one while each node that has a part lives."""
    if checkpoint.tier is Tier.SHARED:
        return True
    nodes = (state.nodes.get(p.node) for p in checkpoint.parts)
    return all(n is not None and n.liveness is Liveness.LIVE for n in nodes)


def newest_restorable(state: State, job: JobId) -> Checkpoint | None:
    """ONE checkpoint for all ranks (G10): the newest whose parts can all be read."""
    return next((c for c in committed(state, job) if reachable(state, c)), None)


def pinned_ranks(checkpoint: Checkpoint) -> tuple[tuple[int, NodeUid], ...]:
    """Ranks that must go where their only copy lies."""
    if checkpoint.tier is Tier.SHARED:
        return ()
    return tuple((p.rank, p.node) for p in checkpoint.parts)


def holders(state: State, checkpoint: Checkpoint) -> frozenset[NodeUid]:
    """The nodes that may have files of a checkpoint: those with a part, and those whose rank may have begun one.

    Every node where nobody knows any more: parts are missing, and the generation is forgotten.
    """
    found = {part.node for part in checkpoint.parts}
    if len(checkpoint.parts) < checkpoint.world_size:
        generation = state.generations.get(checkpoint.job, {}).get(checkpoint.generation)
        if generation is None:
            return frozenset(state.nodes)
        found |= {member.node for member in generation.ranks}
    return frozenset(found & state.nodes.keys())


def droppable(state: State, job: JobId) -> frozenset[CheckpointId]:
    """Checkpoints nobody needs any more: aborted, or older than those that are kept.

    A bad one stays, even when its job has ended: the verdict may be wrong (three failures of the program condemn what
    it started from), and the files all that is left of weeks of work.
    """
    record = state.jobs.get(job)
    if record is None:
        return frozenset()
    keep = max(KEEP_MIN, record.spec.checkpoint.keep)
    old = {c.id for c in committed(state, job)[keep:]}
    aborted = {c.id for c in state.checkpoints.get(job, {}).values() if c.state is CheckpointState.ABORTED}
    reading = {
        g.restored_checkpoint
        for g in state.generations.get(job, {}).values()
        if g.phase is not Phase.ENDED and g.restored_checkpoint is not None
    }
    return frozenset((old | aborted) - reading)
