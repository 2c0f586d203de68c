"""Calls from inside tasks -> commands, and outcomes -> what the task is told."""

from __future__ import annotations

from controld.core.agent import (
    CheckpointBeginCall,
    CheckpointFailedCall,
    CheckpointPreparedCall,
    CheckpointWaitCall,
    TaskCall,
    TaskReply,
)
from controld.core.commands import AbortCheckpoint, BeginCheckpoint, Command, PrepareShard
from controld.core.ids import NodeUid
from controld.core.model import CheckpointState, Generation, Member
from controld.core.outcome import Refused, Reply
from controld.core.state import State
from virialpb.reasons import Reason

# A sha256 in hex, and room for what may follow it.
DIGEST_LENGTH_MAX = 128


def command_for_call(call: TaskCall, node: NodeUid, state: State) -> Command | TaskReply:
    """What to decide for a call, or the answer when there is nothing to decide.

    A wait for a checkpoint that is still open is answered with state BEGUN: the caller asks again when it changed.
    """
    found = _caller(call, node, state)
    if found is None:
        return TaskReply(call.call_id, call.slot, error=Reason.FENCED, error_message=call.slot)
    generation, member = found
    rank = member.rank if member.rank is not None else -1
    job, number, epoch = call.token.job, generation.number, call.token.epoch
    match call.call:
        case CheckpointBeginCall(step):
            return BeginCheckpoint(job, number, epoch, rank, step)
        case CheckpointPreparedCall() as c:
            if c.file != f"rank-{rank:05d}.shard":
                # No agent would restore another name: the checkpoint would commit and never start a rank.
                message = f"{call.slot}: file must be rank-{rank:05d}.shard"
                return TaskReply(call.call_id, call.slot, error=Reason.INVALID_SPEC, error_message=message)
            if len(c.digest) > DIGEST_LENGTH_MAX:
                # One record of the store has those of every rank.
                message = f"{call.slot}: digest has {len(c.digest)} characters, the most is {DIGEST_LENGTH_MAX}"
                return TaskReply(call.call_id, call.slot, error=Reason.INVALID_SPEC, error_message=message)
            return PrepareShard(job, number, epoch, rank, node, c.checkpoint, c.step, c.size_bytes, c.digest, c.file)
        case CheckpointFailedCall() as c:
            return AbortCheckpoint(job, number, c.checkpoint, c.reason)
        case CheckpointWaitCall(id_):
            checkpoint = state.checkpoints.get(job, {}).get(id_)
            if checkpoint is None or checkpoint.generation != number:
                return TaskReply(call.call_id, call.slot, error=Reason.NOT_FOUND, error_message=id_)
            state_name = checkpoint.state
            if state_name is CheckpointState.DROPPING:
                # Collected since: whether it was whole tells how it had ended.
                whole = len(checkpoint.parts) == checkpoint.world_size
                state_name = CheckpointState.COMMITTED if whole else CheckpointState.ABORTED
            return TaskReply(call.call_id, call.slot, checkpoint=id_, state=state_name.value)


def _caller(call: TaskCall, node: NodeUid, state: State) -> tuple[Generation, Member] | None:
    """The generation and member a call comes from; None when its token is not that of a lease on that node."""
    generation = state.generations.get(call.token.job, {}).get(call.token.generation)
    if generation is None or state.epoch_of(generation) != call.token.epoch:
        return None
    member = generation.member(call.slot)
    if member is None or member.node != node or member.rank is None or not member.lease.holds:
        return None
    return generation, member


def reply_for(call: TaskCall, outcome: Reply | Refused) -> TaskReply:
    if isinstance(outcome, Refused):
        detail = f"{outcome.subject} {outcome.detail}".strip()
        return TaskReply(call.call_id, call.slot, error=outcome.reason, error_message=detail)
    return TaskReply(
        call.call_id,
        call.slot,
        checkpoint=outcome.subject,
        directory=outcome.directory,
        tier=outcome.tier,
        state=outcome.state,
    )
