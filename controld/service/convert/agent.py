"""The two streams of a node agent, both ways.

An agent may be a release ahead: reasons this controller does not know become the nearest harmless one, while a slot
state it does not know is refused, since guessing one could free a device that is in use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from controld.core import agent
from controld.core.ids import CheckpointId, Epoch, Incarnation, JobId, SlotId
from controld.core.model import TaskExit
from controld.service.convert.common import (
    epoch_from_proto,
    epoch_to_proto,
    grant_to_proto,
    incarnation_from_proto,
    token_from_proto,
    token_to_proto,
)
from controld.service.convert.inventory import samples_from_proto
from controld.service.convert.spec import checkpoint_spec_to_proto, task_to_proto
from controld.service.failures import invalid_field
from virialpb.identity import NODE_NAME
from virialpb.reasons import ExitReason, PrepareFailure
from virialpb.v1 import job_pb2, node_pb2

STDERR_TAIL_LENGTH_MAX = 4_096
METRICS_MAX = 32
SLOTS_MAX = 4_096
LABEL_LENGTH_MAX = 253
_DETAIL_LENGTH_MAX = 1_024
_INT64_MAX = 2**63 - 1
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ADDRESS = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
_FENCINGS = ("pidns+cgroup", "pidns", "weak")


def incarnation_from(message: node_pb2.BulkHello | node_pb2.Hello) -> Incarnation:
    """Raises CallError unless all three parts are there: they become keys of the store."""
    incarnation = incarnation_from_proto(message.incarnation)
    for field, value in zip(("node_uid", "boot_id", "guardian_nonce"), incarnation, strict=True):
        if not _PART.fullmatch(value):
            raise invalid_field(
                f"hello.incarnation.{field}",
                "must be 1 to 128 letters, digits, '.', '_', '-'; no sign first",
            )
    return incarnation


def hello_from_proto(message: node_pb2.Hello) -> agent.Hello:
    """Raises CallError for a malformed one. Slots may stand in the hello or in its beat."""
    incarnation = incarnation_from(message)
    if not NODE_NAME.fullmatch(message.name):
        raise invalid_field(
            "hello.name", f"'{message.name[:60]}' is not a node's name: lower-case letters, digits, '.' and '-'"
        )
    if not _ADDRESS.fullmatch(message.advertise_address):
        raise invalid_field(
            "hello.advertise_address",
            "must be a host name or an IP address: other nodes' ranks are told to connect to it",
        )
    for name, value in message.labels.items():
        if (
            not name
            or len(name) > LABEL_LENGTH_MAX
            or len(value) > LABEL_LENGTH_MAX
            or not (name + value).isprintable()
        ):
            raise invalid_field(
                "hello.labels",
                f"{name[:60]!r} and its value must be printable, of at most {LABEL_LENGTH_MAX} characters",
            )
    if not 0 < message.cpu_millis <= _INT64_MAX or not 0 < message.memory_bytes <= _INT64_MAX:
        raise invalid_field("hello.cpu_millis", "a node offers more than 0 CPU and more than 0 memory")
    beat = beat_from_proto(message.beat) if message.HasField("beat") else agent.Beat(seq=0)
    return agent.Hello(
        incarnation=incarnation,
        name=message.name,
        advertise_address=message.advertise_address,
        fencing=message.fencing if message.fencing in _FENCINGS else "weak",
        cpu_millis=message.cpu_millis,
        memory_bytes=message.memory_bytes,
        beat=agent.Beat(
            seq=beat.seq,
            slots=beat.slots or _slots(message.slots),
            readings=beat.readings,
            guardian_ok=beat.guardian_ok,
        ),
        labels=tuple(sorted(message.labels.items())),
        leader_epoch_seen=epoch_from_proto(message.leader_epoch_seen),
        version=message.version[:64],
        gone_slots=tuple(SlotId(slot) for slot in message.gone_slots),
    )


def report_from_proto(message: node_pb2.ControlUp) -> agent.Beat | agent.TaskCall | agent.DropDone | None:
    """None for a kind of message that this controller does not know. Raises CallError for a malformed one."""
    match message.WhichOneof("message"):
        case "beat":
            return beat_from_proto(message.beat)
        case "task_call":
            return _task_call(message.task_call)
        case "drop_done":
            return agent.DropDone(JobId(message.drop_done.job), CheckpointId(message.drop_done.checkpoint))
        case "hello":
            raise invalid_field("hello", "may only be the first message of a stream; open a new one")
        case _:
            return None


def beat_from_proto(message: node_pb2.Beat) -> agent.Beat:
    return agent.Beat(
        seq=message.seq,
        slots=_slots(message.slots),
        readings=samples_from_proto(message.readings),
        guardian_ok=message.guardian_ok,
    )


def _slots(messages: Iterable[node_pb2.SlotStatus]) -> tuple[agent.SlotStatus, ...]:
    found = tuple(_slot(message) for message in messages)
    if len(found) > SLOTS_MAX:
        raise invalid_field("beat.slots", f"{len(found)} are too many: the most is {SLOTS_MAX}")
    return found


def _slot(message: node_pb2.SlotStatus) -> agent.SlotStatus:
    try:
        state = agent.SlotState(node_pb2.SlotStatus.State.Name(message.state))
    except ValueError:
        raise invalid_field(
            "beat.slots.state", f"{message.state} of slot '{message.slot[:80]}' is unknown; update the controller first"
        ) from None
    return agent.SlotStatus(
        slot=SlotId(message.slot),
        token=token_from_proto(message.token),
        state=state,
        port=message.port,
        exit=_exit(message.exit) if message.HasField("exit") else None,
        progress_step=message.progress_step,
        metrics=_metrics(message),
        failure=_failure(message.failure),
        failure_detail=message.failure_detail[:_DETAIL_LENGTH_MAX],
        prepared_bytes=message.prepared_bytes,
    )


def _exit(message: job_pb2.TaskExit) -> TaskExit:
    known = message.reason in set(ExitReason)
    # A reason of a newer agent must not read as success, which EXITED with code 0 would be.
    return TaskExit(
        reason=ExitReason(message.reason) if known else ExitReason.SIGNALED,
        code=message.code,
        signal=message.signal,
        stderr_tail=message.stderr_tail[-STDERR_TAIL_LENGTH_MAX:],
    )


def _failure(text: str) -> PrepareFailure | None:
    """A failure of a newer agent is still one: the state says so, the detail says what."""
    return PrepareFailure(text) if text in set(PrepareFailure) else None


def _metrics(message: node_pb2.SlotStatus) -> tuple[tuple[str, float], ...]:
    finite = sorted((name, value) for name, value in message.metrics.items() if math.isfinite(value))
    return tuple(finite[:METRICS_MAX])


def _task_call(message: node_pb2.TaskCall) -> agent.TaskCall | None:
    call: (
        agent.CheckpointBeginCall | agent.CheckpointPreparedCall | agent.CheckpointWaitCall | agent.CheckpointFailedCall
    )
    match message.WhichOneof("call"):
        case "checkpoint_begin":
            call = agent.CheckpointBeginCall(_step(message.checkpoint_begin.step))
        case "checkpoint_prepared":
            prepared = message.checkpoint_prepared
            if prepared.size_bytes > _INT64_MAX:
                raise invalid_field("task_call.checkpoint_prepared.size_bytes", "does not fit 63 bits")
            call = agent.CheckpointPreparedCall(
                checkpoint=CheckpointId(prepared.checkpoint),
                step=_step(prepared.step),
                size_bytes=prepared.size_bytes,
                digest=prepared.digest,
                file=prepared.file,
            )
        case "checkpoint_wait":
            call = agent.CheckpointWaitCall(CheckpointId(message.checkpoint_wait.checkpoint))
        case "checkpoint_failed":
            failed = message.checkpoint_failed
            call = agent.CheckpointFailedCall(
                CheckpointId(failed.checkpoint), failed.reason[:64], failed.message[:_DETAIL_LENGTH_MAX]
            )
        case _:
            return None
    return agent.TaskCall(message.call_id, SlotId(message.slot), token_from_proto(message.token), call)


def _step(value: int) -> int:
    if value < 0:
        raise invalid_field("task_call.step", f"{value} is no step: steps count from 0")
    return value


def order_to_proto(order: agent.Order, leader_epoch: Epoch) -> node_pb2.ControlDown:
    message = node_pb2.ControlDown(leader_epoch=epoch_to_proto(leader_epoch))
    match order:
        case agent.Welcome():
            message.welcome.CopyFrom(
                node_pb2.Welcome(renew_interval_ms=order.renew_interval_ms, cluster_uid=order.cluster_uid)
            )
        case agent.BeatAck():
            message.beat_ack.CopyFrom(node_pb2.BeatAck(seq=order.seq))
        case agent.Prepare():
            message.prepare.CopyFrom(_prepare(order))
        case agent.Go():
            message.go.CopyFrom(
                node_pb2.Go(
                    slot=order.slot,
                    token=token_to_proto(order.token),
                    world_size=order.world_size,
                    master_address=order.master_address,
                    master_port=order.master_port,
                    restart_count=order.restart_count,
                )
            )
        case agent.Stop():
            message.stop.CopyFrom(
                node_pb2.Stop(
                    slot=order.slot,
                    token=token_to_proto(order.token),
                    grace_ms=order.grace_ms,
                    reason=order.reason.value,
                )
            )
        case agent.Release():
            message.release.CopyFrom(node_pb2.Release(slot=order.slot, token=token_to_proto(order.token)))
        case agent.TaskReply():
            message.task_reply.CopyFrom(
                node_pb2.TaskReply(
                    call_id=order.call_id,
                    slot=order.slot,
                    error=order.error.value if order.error is not None else "",
                    error_message=order.error_message,
                    checkpoint=order.checkpoint,
                    directory=order.directory,
                    tier=order.tier,
                    state=order.state,
                )
            )
        case agent.SaveNow():
            message.save_now.CopyFrom(
                node_pb2.SaveNow(
                    slot=order.slot, token=token_to_proto(order.token), step=order.step, reason=order.reason
                )
            )
        case agent.DropCheckpoint():
            message.drop_checkpoint.CopyFrom(
                node_pb2.DropCheckpoint(
                    job=order.job, checkpoint=order.checkpoint, directory=order.directory, tier=order.tier.value
                )
            )
        case agent.SessionRefused():
            refused = node_pb2.SessionRefused(reason=order.reason.value, message=order.message, leader=order.leader)
            message.session_refused.CopyFrom(refused)
    return message


def _prepare(order: agent.Prepare) -> node_pb2.Prepare:
    message = node_pb2.Prepare(
        slot=order.slot,
        token=token_to_proto(order.token),
        rank=-1 if order.rank is None else order.rank,
        world_size=order.world_size,
        cpu_millis=order.cpu_millis,
        memory_bytes=order.memory_bytes,
        devices=[grant_to_proto(grant) for grant in order.devices],
        task=task_to_proto(order.task),
        fence_after_ms=order.fence_after_ms,
        hold_port=order.hold_port,
        checkpoint=checkpoint_spec_to_proto(order.checkpoint),
        cause_id=order.cause_id,
    )
    if order.restore is not None:
        message.restore.CopyFrom(
            node_pb2.Restore(
                checkpoint=order.restore.checkpoint,
                step=order.restore.step,
                directory=order.restore.directory,
                tier=order.restore.tier.value,
                file=order.restore.file,
                digest=order.restore.digest,
                size_bytes=order.restore.size_bytes,
            )
        )
    return message
