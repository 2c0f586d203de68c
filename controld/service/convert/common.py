"""What several messages share: tokens, cursors, constraints, events, and the strings callers send as names."""

from __future__ import annotations

from controld.core.ids import Epoch, Incarnation, JobId, NodeUid, Token, valid_id, valid_request_id
from controld.core.model import AttributeValue, DeviceGrant, Event, TaskExit
from controld.core.outcome import FieldViolation
from controld.core.spec import Constraint, Operator
from controld.core.state import State
from controld.service.failures import invalid_field
from virialpb.v1 import common_pb2, job_pb2

JOBS = "jobs/"
NODES = "nodes/"
CHECKPOINTS = "checkpoints/"


def epoch_to_proto(epoch: Epoch) -> common_pb2.Epoch:
    return common_pb2.Epoch(history=epoch.history, revision=epoch.revision)


def epoch_from_proto(message: common_pb2.Epoch) -> Epoch:
    return Epoch(message.history, message.revision)


def token_to_proto(token: Token) -> common_pb2.Token:
    return common_pb2.Token(job=token.job, generation=token.generation, epoch=epoch_to_proto(token.epoch))


def token_from_proto(message: common_pb2.Token) -> Token:
    return Token(JobId(message.job), message.generation, epoch_from_proto(message.epoch))


def incarnation_to_proto(incarnation: Incarnation) -> common_pb2.Incarnation:
    return common_pb2.Incarnation(
        node_uid=incarnation.node_uid, boot_id=incarnation.boot_id, guardian_nonce=incarnation.guardian_nonce
    )


def incarnation_from_proto(message: common_pb2.Incarnation) -> Incarnation:
    return Incarnation(NodeUid(message.node_uid), message.boot_id, message.guardian_nonce)


def cursor_to_proto(history: int, revision: int) -> common_pb2.Cursor:
    return common_pb2.Cursor(history=history, revision=revision)


def constraint_to_proto(constraint: Constraint) -> common_pb2.Constraint:
    return common_pb2.Constraint(
        attribute=constraint.attribute,
        operator=common_pb2.Constraint.Operator.Value(constraint.operator.value),
        values=constraint.values,
    )


def constraint_from_proto(
    message: common_pb2.Constraint, path: str, violations: list[FieldViolation]
) -> Constraint | None:
    """None, and a violation, where the operator is none that this controller knows."""
    try:
        operator = Operator(common_pb2.Constraint.Operator.Name(message.operator))
    except ValueError:
        known = ", ".join(Operator)
        violations.append(FieldViolation(f"{path}.operator", f"no known operator; use one of {known}"))
        return None
    return Constraint(message.attribute, operator, tuple(message.values))


def grant_to_proto(grant: DeviceGrant) -> common_pb2.DeviceGrant:
    return common_pb2.DeviceGrant(device_key=grant.device_key, share_thousandths=grant.share_thousandths)


def attribute_to_proto(value: AttributeValue) -> common_pb2.AttributeValue:
    if isinstance(value, bool):  # before int: True is one
        return common_pb2.AttributeValue(flag=value)
    if isinstance(value, int):
        return common_pb2.AttributeValue(integer=value)
    return common_pb2.AttributeValue(text=value)


def attribute_from_proto(message: common_pb2.AttributeValue) -> AttributeValue | None:
    """None for a kind of value that this controller does not know."""
    match message.WhichOneof("value"):
        case "text":
            return message.text
        case "integer":
            return message.integer
        case "flag":
            return message.flag
        case _:
            return None


def exit_to_proto(exit_: TaskExit, *, with_tail: bool) -> job_pb2.TaskExit:
    return job_pb2.TaskExit(
        reason=exit_.reason.value,
        code=exit_.code,
        signal=exit_.signal,
        stderr_tail=exit_.stderr_tail if with_tail else "",
    )


def job_name(id_: str) -> str:
    return f"{JOBS}{id_}" if id_ else ""


def node_name(uid: str, state: State) -> str:
    """The resource name of a node; by its uid where no record of it remains."""
    if not uid:
        return ""
    record = state.nodes.get(NodeUid(uid))
    return f"{NODES}{record.name if record is not None else uid}"


def event_to_proto(event: Event, revision: int, state: State) -> common_pb2.Event:
    return common_pb2.Event(
        sequence=event.sequence,
        kind=event.kind,
        job=job_name(event.job),
        node=node_name(event.node, state),
        generation=event.generation,
        reason=event.reason,
        numbers=dict(event.numbers),
        details=dict(event.details),
        create_time_unix_ns=event.create_time_unix_ns,
        cause_id=event.cause_id,
        revision=revision,
    )


def job_id_from_name(name: str, field: str = "name") -> JobId:
    """Raises CallError unless `name` is "jobs/{job}"."""
    id_ = name.removeprefix(JOBS)
    if not name.startswith(JOBS) or not valid_id(id_):
        raise invalid_field(field, f"'{name[:80]}' is not a job's name; write jobs/JOB, such as jobs/train-1")
    return JobId(id_)


def node_from_name(name: str, field: str = "name") -> str:
    """The display name in "nodes/{node}". Raises CallError unless it is one."""
    display = name.removeprefix(NODES)
    if not name.startswith(NODES) or not display or "/" in display or len(display) > 253:
        raise invalid_field(field, f"'{name[:80]}' is not a node's name; write nodes/NODE, such as nodes/host-1")
    return display


def request_id_from(text: str, made: str) -> str:
    """The caller's idempotency key, or `made` where it sent none (aip.dev/155). Raises CallError on a malformed one."""
    if not text:
        return made
    if not valid_request_id(text):
        raise invalid_field("request_id", "must be 1 to 64 letters, digits, '.', '_', ':' or '-'; a UUID is right")
    return text
