"""Jobs, their generations with the leases in them, and checkpoints."""

from __future__ import annotations

from controld.core.ids import CheckpointId, JobId, NodeUid, SlotId
from controld.core.model import (
    Checkpoint,
    CheckpointState,
    DeviceGrant,
    Generation,
    Job,
    JobState,
    LeaseState,
    Member,
    Phase,
    ShardPart,
    TaskError,
    TaskExit,
    Tier,
)
from controld.store import codec_values as values
from controld.store.codec_spec import from_spec, spec
from virialpb.reasons import ExitReason, StopReason
from virialpb.store.v1 import records_pb2 as pb

_SHARE_THOUSANDTHS = DeviceGrant(device_key="").share_thousandths
_STEP_BEFORE_THE_FIRST = -1


def job(value: Job) -> pb.Job:
    return pb.Job(
        id=value.id,
        spec=spec(value.spec),
        state=value.state,
        create_time_unix_ns=value.create_time_unix_ns,
        owner=value.owner,
        generation=value.generation,
        restart_times_unix_ns=value.restart_times_unix_ns,
        restarts=value.restarts,
        fruitless_generations=value.fruitless_generations,
        checkpoint_counter=value.checkpoint_counter,
        first_error=None if value.first_error is None else _error(value.first_error),
        end_time_unix_ns=value.end_time_unix_ns,
        highest_step=value.highest_step,
        number=value.number,
        aborted_saves=value.aborted_saves,
        last_abort_reason=value.last_abort_reason,
        prepare_failures=value.prepare_failures,
    )


def from_job(value: pb.Job) -> Job:
    if not value.HasField("spec"):
        raise values.FieldError("spec: missing")
    return Job(
        id=JobId(value.id),
        spec=from_spec(value.spec),
        state=values.name_of(JobState, value.state, "state"),
        create_time_unix_ns=value.create_time_unix_ns,
        owner=value.owner,
        generation=value.generation,
        restart_times_unix_ns=tuple(value.restart_times_unix_ns),
        restarts=value.restarts,
        fruitless_generations=value.fruitless_generations,
        checkpoint_counter=value.checkpoint_counter,
        first_error=_from_error(value.first_error) if value.HasField("first_error") else None,
        end_time_unix_ns=value.end_time_unix_ns,
        highest_step=value.highest_step if value.HasField("highest_step") else _STEP_BEFORE_THE_FIRST,
        number=value.number,
        aborted_saves=value.aborted_saves,
        last_abort_reason=value.last_abort_reason,
        prepare_failures=value.prepare_failures,
    )


def generation(value: Generation) -> pb.Generation:
    return pb.Generation(
        job=value.job,
        number=value.number,
        phase=value.phase,
        members=[_member(member) for member in value.members],
        restored_checkpoint=value.restored_checkpoint,
        restored_step=value.restored_step,
        master_address=value.master_address,
        master_port=value.master_port,
        stop_reason=value.stop_reason,
        progressed=value.progressed,
        cause_id=value.cause_id,
    )


def from_generation(value: pb.Generation) -> Generation:
    return Generation(
        job=JobId(value.job),
        number=value.number,
        phase=values.name_of(Phase, value.phase, "phase"),
        members=tuple(_from_member(member) for member in value.members),
        restored_checkpoint=(
            CheckpointId(value.restored_checkpoint) if value.HasField("restored_checkpoint") else None
        ),
        restored_step=value.restored_step,
        master_address=value.master_address,
        master_port=value.master_port,
        stop_reason=(
            values.name_of(StopReason, value.stop_reason, "stop_reason") if value.HasField("stop_reason") else None
        ),
        progressed=value.progressed,
        cause_id=value.cause_id,
    )


def _member(value: Member) -> pb.Member:
    return pb.Member(
        slot=value.slot,
        rank=value.rank,
        node=value.node,
        incarnation=values.incarnation(value.incarnation),
        cpu_millis=value.cpu_millis,
        memory_bytes=value.memory_bytes,
        devices=[
            pb.DeviceGrant(device_key=grant.device_key, share_thousandths=grant.share_thousandths)
            for grant in value.devices
        ],
        lease=value.lease,
        exit=None if value.exit is None else _exit(value.exit),
    )


def _from_member(value: pb.Member) -> Member:
    return Member(
        slot=SlotId(value.slot),
        rank=value.rank if value.HasField("rank") else None,
        node=NodeUid(value.node),
        incarnation=values.from_incarnation(value.incarnation),
        cpu_millis=value.cpu_millis,
        memory_bytes=value.memory_bytes,
        devices=tuple(
            DeviceGrant(
                device_key=grant.device_key,
                share_thousandths=(
                    grant.share_thousandths if grant.HasField("share_thousandths") else _SHARE_THOUSANDTHS
                ),
            )
            for grant in value.devices
        ),
        # No default, though the model has one: what holds devices is never guessed.
        lease=values.name_of(LeaseState, value.lease, "members.lease"),
        exit=_from_exit(value.exit) if value.HasField("exit") else None,
    )


def _exit(value: TaskExit) -> pb.TaskExit:
    return pb.TaskExit(reason=value.reason, code=value.code, signal=value.signal, stderr_tail=value.stderr_tail)


def _from_exit(value: pb.TaskExit) -> TaskExit:
    return TaskExit(
        reason=values.name_of(ExitReason, value.reason, "exit.reason"),
        code=value.code,
        signal=value.signal,
        stderr_tail=value.stderr_tail,
    )


def _error(value: TaskError) -> pb.TaskError:
    return pb.TaskError(
        generation=value.generation,
        rank=value.rank,
        node=value.node,
        stop_reason=value.stop_reason,
        detail=value.detail,
        exit=None if value.exit is None else _exit(value.exit),
    )


def _from_error(value: pb.TaskError) -> TaskError:
    return TaskError(
        generation=value.generation,
        rank=value.rank,
        node=NodeUid(value.node),
        stop_reason=values.name_of(StopReason, value.stop_reason, "first_error.stop_reason"),
        detail=value.detail,
        exit=_from_exit(value.exit) if value.HasField("exit") else None,
    )


def checkpoint(value: Checkpoint) -> pb.Checkpoint:
    return pb.Checkpoint(
        job=value.job,
        id=value.id,
        generation=value.generation,
        step=value.step,
        world_size=value.world_size,
        tier=value.tier,
        directory=value.directory,
        state=value.state,
        parts=[_part(part) for part in value.parts],
        begin_time_unix_ns=value.begin_time_unix_ns,
    )


def from_checkpoint(value: pb.Checkpoint) -> Checkpoint:
    return Checkpoint(
        job=JobId(value.job),
        id=CheckpointId(value.id),
        generation=value.generation,
        step=value.step,
        world_size=value.world_size,
        tier=values.name_of(Tier, value.tier, "tier"),
        directory=value.directory,
        # No default, though the model has one: what may be restored or dropped is never guessed.
        state=values.name_of(CheckpointState, value.state, "state"),
        parts=tuple(_from_part(part) for part in value.parts),
        begin_time_unix_ns=value.begin_time_unix_ns,
    )


def _part(value: ShardPart) -> pb.ShardPart:
    return pb.ShardPart(
        rank=value.rank,
        node=value.node,
        size_bytes=value.size_bytes,
        digest=value.digest,
        file=value.file,
        quarantined=value.quarantined,
    )


def _from_part(value: pb.ShardPart) -> ShardPart:
    return ShardPart(
        rank=value.rank,
        node=NodeUid(value.node),
        size_bytes=value.size_bytes,
        digest=value.digest,
        file=value.file,
        quarantined=value.quarantined,
    )
