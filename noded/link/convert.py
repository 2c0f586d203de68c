"""The wire form of what the agent says and hears: the only place of noded that touches `*_pb2`.

What comes in is checked here, once: ids become directory names and keys, so one that is no id never reaches the core.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, TypeVar

from noded.core import messages as m
from virialpb.ids import CheckpointId, Epoch, Incarnation, JobId, SlotId, Token, valid_id
from virialpb.reasons import Reason, StopReason
from virialpb.v1 import common_pb2, job_pb2, node_pb2, rdl_pb2

E = TypeVar("E", bound=StrEnum)

ControlUp = node_pb2.ControlUp
ControlDown = node_pb2.ControlDown
BulkUp = node_pb2.BulkUp
BulkDown = node_pb2.BulkDown

_SLOT: Final = re.compile(r"[a-z][a-z0-9-]{0,62}\.[0-9]{1,10}\.s?[0-9]{1,6}")
_FILE: Final = re.compile(r"rank-[0-9]{5}\.shard")
_ENV_NAME: Final = re.compile(r"[^=\0]+")


class BadOrder(ValueError):
    """A message of a controller that cannot be right; the text names the field."""


# -- up ------------------------------------------------------------------------------------------------------------


def report_to_proto(report: m.Report) -> ControlUp:
    match report:
        case m.Hello():
            return ControlUp(hello=_hello(report))
        case m.Beat():
            return ControlUp(beat=_beat(report))
        case m.TaskCall():
            return ControlUp(task_call=_task_call(report))
        case m.DropDone():
            return ControlUp(drop_done=node_pb2.DropDone(job=report.job, checkpoint=report.checkpoint))


def bulk_hello_to_proto(incarnation: Incarnation) -> BulkUp:
    return BulkUp(hello=node_pb2.BulkHello(incarnation=_incarnation(incarnation)))


def inventory_to_proto(seq: int, inventory: m.Inventory) -> BulkUp:
    return BulkUp(inventory=node_pb2.InventoryReport(seq=seq, inventory=_inventory(inventory)))


def log_chunk_to_proto(request_id: int, data: bytes, next_offset: int, *, end: bool, error: str = "") -> BulkUp:
    chunk = node_pb2.LogChunk(request_id=request_id, data=data, next_offset=next_offset, end=end, error=error)
    return BulkUp(log_chunk=chunk)


def _hello(hello: m.Hello) -> node_pb2.Hello:
    facts = hello.facts
    return node_pb2.Hello(
        incarnation=_incarnation(hello.incarnation),
        name=facts.name,
        advertise_address=facts.advertise_address,
        fencing=hello.fencing,
        cpu_millis=facts.cpu_millis,
        memory_bytes=facts.memory_bytes,
        labels=dict(facts.labels),
        leader_epoch_seen=_epoch(hello.leader_epoch_seen),
        version=facts.version,
        beat=_beat(hello.beat),
        gone_slots=hello.gone_slots,
    )


def _beat(beat: m.Beat) -> node_pb2.Beat:
    return node_pb2.Beat(
        seq=beat.seq,
        slots=[_slot(slot) for slot in beat.slots],
        readings=[_sample(sample) for sample in beat.readings],
        guardian_ok=beat.guardian_ok,
    )


def _slot(status: m.SlotStatus) -> node_pb2.SlotStatus:
    return node_pb2.SlotStatus(
        slot=status.slot,
        token=_token(status.token),
        state=node_pb2.SlotStatus.State.Value(status.state),
        port=status.port,
        exit=None if status.exit is None else _exit(status.exit),
        progress_step=status.progress_step,
        metrics=dict(status.metrics),
        failure=status.failure or "",
        failure_detail=status.failure_detail,
        progress_age_ms=status.progress_age_ms,
        prepared_bytes=status.prepared_bytes,
    )


def _exit(task_exit: m.TaskExit) -> job_pb2.TaskExit:
    return job_pb2.TaskExit(
        reason=task_exit.reason, code=task_exit.code, signal=task_exit.signal, stderr_tail=task_exit.stderr_tail
    )


def _sample(sample: m.Sample) -> rdl_pb2.Sample:
    return rdl_pb2.Sample(
        name=sample.name, value=sample.value, unit=sample.unit, quality=sample.quality, age_ms=sample.age_ms
    )


def _task_call(call: m.TaskCall) -> node_pb2.TaskCall:
    message = node_pb2.TaskCall(call_id=call.call_id, slot=call.slot, token=_token(call.token))
    match call.call:
        case m.CheckpointBeginCall(step):
            message.checkpoint_begin.CopyFrom(node_pb2.CheckpointBegin(step=step))
        case m.CheckpointPreparedCall(checkpoint, step, size_bytes, digest, file):
            message.checkpoint_prepared.CopyFrom(
                node_pb2.CheckpointPrepared(
                    checkpoint=checkpoint, step=step, size_bytes=size_bytes, digest=digest, file=file
                )
            )
        case m.CheckpointWaitCall(checkpoint):
            message.checkpoint_wait.CopyFrom(node_pb2.CheckpointWait(checkpoint=checkpoint))
        case m.CheckpointFailedCall(checkpoint, reason, text):
            failed = node_pb2.CheckpointFailed(checkpoint=checkpoint, reason=reason, message=text)
            message.checkpoint_failed.CopyFrom(failed)
    return message


def _incarnation(incarnation: Incarnation) -> common_pb2.Incarnation:
    return common_pb2.Incarnation(
        node_uid=incarnation.node_uid, boot_id=incarnation.boot_id, guardian_nonce=incarnation.guardian_nonce
    )


def _epoch(epoch: Epoch) -> common_pb2.Epoch:
    return common_pb2.Epoch(history=epoch.history, revision=epoch.revision)


def _token(token: Token) -> common_pb2.Token:
    return common_pb2.Token(job=token.job, generation=token.generation, epoch=_epoch(token.epoch))


def _inventory(inventory: m.Inventory) -> rdl_pb2.Inventory:
    return rdl_pb2.Inventory(
        devices=[_device(device) for device in inventory.devices],
        links=[_link(link) for link in inventory.links],
        domains=[rdl_pb2.Domain(kind=one.kind, name=one.name, parent=one.parent) for one in inventory.domains],
        attributes=_attributes(inventory.attributes),
    )


def _device(device: m.Device) -> rdl_pb2.Device:
    message = rdl_pb2.Device(
        key=device.key,
        kind=device.kind,
        name=device.name,
        attributes=_attributes(device.attributes),
        capacity=dict(device.capacity),
        vendor_id=device.vendor_id,
    )
    if device.interconnect_protocol:
        message.interconnect.CopyFrom(
            rdl_pb2.Interconnect(
                protocol=device.interconnect_protocol,
                max_latency_ns=device.interconnect_max_latency_ns,
                bandwidth_bytes_per_second=device.interconnect_bandwidth_bytes_per_second,
            )
        )
    return message


def _link(link: m.Link) -> rdl_pb2.Link:
    return rdl_pb2.Link(
        key=link.key,
        kind=link.kind,
        end_a=link.end_a,
        end_b=link.end_b,
        rail=link.rail,
        expected_bytes_per_second=link.expected_bytes_per_second,
        current_bytes_per_second=link.current_bytes_per_second,
        expected_width_lanes=link.expected_width_lanes,
        current_width_lanes=link.current_width_lanes,
        state=link.state,
    )


def _attributes(attributes: tuple[tuple[str, m.AttributeValue], ...]) -> dict[str, common_pb2.AttributeValue]:
    return {name: _attribute(value) for name, value in attributes}


def _attribute(value: m.AttributeValue) -> common_pb2.AttributeValue:
    if isinstance(value, bool):
        return common_pb2.AttributeValue(flag=value)
    if isinstance(value, int):
        return common_pb2.AttributeValue(integer=value)
    return common_pb2.AttributeValue(text=value)


# -- down ----------------------------------------------------------------------------------------------------------


def epoch_of(message: ControlDown | BulkDown) -> Epoch:
    return _epoch_from(message.leader_epoch)


def order_from_proto(message: ControlDown) -> m.Order | None:
    """None for an order of a newer controller that this agent does not know. Raises BadOrder."""
    match message.WhichOneof("message"):
        case "welcome":
            return m.Welcome(message.welcome.renew_interval_ms, message.welcome.cluster_uid)
        case "beat_ack":
            return m.BeatAck(message.beat_ack.seq)
        case "prepare":
            return _prepare(message.prepare)
        case "go":
            go = message.go
            if not 0 <= go.master_port <= 65_535:
                raise BadOrder(f"go.master_port: {go.master_port}")
            return m.Go(*_owner(go), go.world_size, go.master_address, go.master_port, restart_count=go.restart_count)
        case "stop":
            reason = _member(StopReason, message.stop.reason, "stop.reason")
            return m.Stop(*_owner(message.stop), message.stop.grace_ms, reason)
        case "release":
            return m.Release(*_owner(message.release))
        case "task_reply":
            return _task_reply(message.task_reply)
        case "save_now":
            return m.SaveNow(*_owner(message.save_now), message.save_now.step, message.save_now.reason)
        case "drop_checkpoint":
            drop = message.drop_checkpoint
            job, checkpoint = _job(drop.job), _checkpoint(drop.checkpoint)
            return m.DropCheckpoint(
                job, checkpoint, _directory(drop.directory, drop.tier), _member(m.Tier, drop.tier, "tier")
            )
        case "checkpoint_outcome":
            outcome = message.checkpoint_outcome
            return m.CheckpointOutcome(*_owner(outcome), _checkpoint(outcome.checkpoint), outcome.state)
        case "session_refused":
            refused = message.session_refused
            reason = _member(Reason, refused.reason, "session_refused.reason")
            return m.SessionRefused(reason, refused.message, refused.leader)
        case _:
            return None


def _prepare(prepare: node_pb2.Prepare) -> m.Prepare:
    slot, token = _owner(prepare)
    task = prepare.task
    if not task.command or not task.command[0]:
        raise BadOrder(f"{slot}: prepare.task.command is empty")
    if not all(_ENV_NAME.fullmatch(name) for name in task.env):
        raise BadOrder(f"{slot}: prepare.task.env has a name with '=' or none at all")
    restore = _restore(prepare.restore) if prepare.HasField("restore") else None
    return m.Prepare(
        slot=slot,
        token=token,
        rank=None if prepare.rank < 0 else prepare.rank,
        world_size=prepare.world_size,
        task=m.TaskSpec(
            command=tuple(task.command),
            env=tuple(sorted(task.env.items())),
            working_directory=task.working_directory,
            user=task.user,
            group=task.group,
            grace_ms=task.grace_ms,
            log_bytes_max=task.log_bytes_max,
            log_files_max=task.log_files_max,
            runtime=task.runtime,
        ),
        fence_after_ms=prepare.fence_after_ms,
        cpu_millis=prepare.cpu_millis,
        memory_bytes=prepare.memory_bytes,
        devices=tuple(m.DeviceGrant(one.device_key, one.share_thousandths) for one in prepare.devices),
        hold_port=prepare.hold_port,
        restore=restore,
        cause_id=prepare.cause_id,
    )


def _restore(restore: node_pb2.Restore) -> m.Restore:
    if not _FILE.fullmatch(restore.file):
        raise BadOrder(f"restore.file: {restore.file[:80]!r} is not the name of a shard")
    return m.Restore(
        checkpoint=_checkpoint(restore.checkpoint),
        step=restore.step,
        directory=_directory(restore.directory, restore.tier),
        tier=_member(m.Tier, restore.tier, "restore.tier"),
        file=restore.file,
        digest=restore.digest,
        size_bytes=restore.size_bytes,
    )


def _task_reply(reply: node_pb2.TaskReply) -> m.TaskReply:
    return m.TaskReply(
        call_id=reply.call_id,
        slot=_slot_id(reply.slot),
        error=_member(Reason, reply.error, "task_reply.error") if reply.error else None,
        error_message=reply.error_message,
        checkpoint=_checkpoint(reply.checkpoint) if reply.checkpoint else "",
        directory=_directory(reply.directory, reply.tier),
        tier=reply.tier,
        state=reply.state,
    )


def _owner(
    order: node_pb2.Prepare
    | node_pb2.Go
    | node_pb2.Stop
    | node_pb2.Release
    | node_pb2.SaveNow
    | node_pb2.CheckpointOutcome,
) -> tuple[SlotId, Token]:
    token = Token(_job(order.token.job), order.token.generation, _epoch_from(order.token.epoch))
    return _slot_id(order.slot), token


def _epoch_from(epoch: common_pb2.Epoch) -> Epoch:
    return Epoch(epoch.history, epoch.revision)


def _slot_id(text: str) -> SlotId:
    if not _SLOT.fullmatch(text):
        raise BadOrder(f"slot: {text[:80]!r} is not the id of a slot")
    return SlotId(text)


def _job(text: str) -> JobId:
    if not valid_id(text):
        raise BadOrder(f"job: {text[:80]!r} is not the id of a job")
    return JobId(text)


def _checkpoint(text: str) -> CheckpointId:
    if not valid_id(text):
        raise BadOrder(f"checkpoint: {text[:80]!r} is not the id of a checkpoint")
    return CheckpointId(text)


def _directory(text: str, tier: str) -> str:
    """Absolute, or in the local tier relative to it and never out of it. Empty: named by nothing but the checkpoint."""
    parts = text.split("/")
    absolute = text.startswith("/")
    inside = tier == m.Tier.LOCAL and {"", "."}.isdisjoint(parts)
    if text and ("\0" in text or ".." in parts or not (absolute or inside)):
        raise BadOrder(f"directory: {text[:80]!r} is neither a plain absolute path nor one below the local tier")
    return text


def _member(kind: type[E], text: str, field: str) -> E:
    try:
        return kind(text)
    except ValueError:
        raise BadOrder(f"{field}: {text[:80]!r} is not known to this agent") from None
