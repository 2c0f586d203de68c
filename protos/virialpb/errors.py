"""The one error table: Reason <-> gRPC status, what it says, and what the caller does about it.

The server builds a `google.rpc.Status` from `ErrorDetails` (aip.dev/193: ErrorInfo always, BadRequest for fields,
RetryInfo where waiting helps); clients read the same `ErrorDetails` back out of the failed call. Decisions carry a
Reason and facts; the words are made here, and each of them says what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol, cast

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from virialpb.reasons import Reason

DOMAIN: Final = "virial"
STATUS_METADATA_KEY: Final = "grpc-status-details-bin"

# gRPC refuses trailing metadata over 8 KiB: a longer error would arrive as another one. The status travels in base64
# (4/3) and the message beside it percent-encoded (up to 3 times); these sizes together stay below.
STATUS_BYTES_MAX: Final = 3_000
MESSAGE_BYTES_MAX: Final = 800
TEXT_BYTES_MAX: Final = 300
_METADATA_BYTES_MAX: Final = 1_200


class Action(StrEnum):
    """What the client does. SDKs act on the first five by themselves; the rest reaches the user."""

    REDIAL = "REDIAL"
    RETRY_SAME_REQUEST = "RETRY_SAME_REQUEST"
    READ_AGAIN = "READ_AGAIN"
    LIST_THEN_WATCH = "LIST_THEN_WATCH"
    BACK_OFF = "BACK_OFF"
    FIX = "FIX"
    GIVE_UP = "GIVE_UP"
    STOP_TASK = "STOP_TASK"
    ALARM = "ALARM"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `what` may use {subject}; a detail, where there is one, stands between it and `todo`.

    `retryable`: the same call, with the same request_id, may be sent again unchanged. `retry_after_ms` is a first
    delay, to be spread and grown by the caller.
    """

    code: grpc.StatusCode
    action: Action
    what: str
    todo: str
    retryable: bool = False
    retry_after_ms: int | None = None


TABLE: Final[Mapping[Reason, Row]] = {
    Reason.INVALID_SPEC: Row(
        grpc.StatusCode.INVALID_ARGUMENT, Action.FIX, "the request is not valid", "correct the named fields"
    ),
    Reason.NOT_FOUND: Row(
        grpc.StatusCode.NOT_FOUND, Action.GIVE_UP, "{subject} does not exist", "list what exists and check the name"
    ),
    Reason.ALREADY_EXISTS: Row(
        grpc.StatusCode.ALREADY_EXISTS,
        Action.GIVE_UP,
        "{subject} already exists",
        "choose another name, or use the one that exists",
    ),
    Reason.STALE: Row(
        grpc.StatusCode.ABORTED, Action.READ_AGAIN, "{subject} has changed in the meantime", "read it again and retry"
    ),
    Reason.FENCED: Row(
        grpc.StatusCode.FAILED_PRECONDITION,
        Action.STOP_TASK,
        "{subject} is fenced: its right to act has ended",
        "stop the task; its successor holds the token",
    ),
    Reason.NOT_LEADER: Row(
        grpc.StatusCode.UNAVAILABLE,
        Action.REDIAL,
        "this controller does not lead",
        "send the call to the leader",
        retryable=True,
        retry_after_ms=100,
    ),
    Reason.NO_LEADER: Row(
        grpc.StatusCode.UNAVAILABLE,
        Action.REDIAL,
        "no controller leads at the moment",
        "retry; an election takes about a second",
        retryable=True,
        retry_after_ms=250,
    ),
    Reason.OUTCOME_UNKNOWN: Row(
        grpc.StatusCode.UNAVAILABLE,
        Action.RETRY_SAME_REQUEST,
        "it is not known whether the change was made",
        "retry with the same request_id: it is answered once, ever",
        retryable=True,
        retry_after_ms=250,
    ),
    Reason.COMPACTED: Row(
        grpc.StatusCode.OUT_OF_RANGE,
        Action.LIST_THEN_WATCH,
        "the history after this cursor is no longer kept",
        "list, then watch from the list's cursor",
    ),
    Reason.QUOTA: Row(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        Action.BACK_OFF,
        "{subject} is over its quota",
        "wait until some of it is free, or ask for more",
        retryable=True,
        retry_after_ms=5_000,
    ),
    Reason.OVERLOADED: Row(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        Action.BACK_OFF,
        "the controller has too much to do",
        "retry later",
        retryable=True,
        retry_after_ms=500,
    ),
    Reason.STORAGE_FULL: Row(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        Action.BACK_OFF,
        "the controller's store is full; nothing was changed",
        "free space in its data directory, then retry",
        retryable=True,
        retry_after_ms=5_000,
    ),
    Reason.UNAUTHENTICATED: Row(
        grpc.StatusCode.UNAUTHENTICATED,
        Action.GIVE_UP,
        "the caller is not known",
        "connect with a certificate that the controller's authority signed",
    ),
    Reason.PERMISSION_DENIED: Row(
        grpc.StatusCode.PERMISSION_DENIED,
        Action.GIVE_UP,
        "the caller may not do this to {subject}",
        "ask an operator of the cluster",
    ),
    Reason.NODE_UNREACHABLE: Row(
        grpc.StatusCode.UNAVAILABLE,
        Action.BACK_OFF,
        "{subject} cannot be reached",
        "see whether its agent (noded) runs, then retry",
        retryable=True,
        retry_after_ms=1_000,
    ),
    Reason.DUPLICATE_NODE: Row(
        grpc.StatusCode.ALREADY_EXISTS,
        Action.FIX,
        "{subject} is connected from another place, which keeps its session",
        "two agents share one identity: stop one, and delete the data directory that was copied",
    ),
    Reason.NOT_NOW: Row(
        grpc.StatusCode.FAILED_PRECONDITION,
        Action.FIX,
        "{subject} cannot be done as things are",
        "change that first, then ask again",
    ),
    Reason.INVARIANT_BROKEN: Row(
        grpc.StatusCode.INTERNAL,
        Action.ALARM,
        "the controller met a state that must not be",
        "report it with the controller's log around this cause_id",
    ),
}


@dataclass(frozen=True, slots=True)
class Violation:
    """A field path as in the request ("spec.gang.ranks") and what is wrong with it."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """A failed call. `reason` is None when the failure came from the transport, not from a controller.

    `metadata` has "subject", "detail" and "cause_id" where they are known, and numbers such as "revision" as text.
    """

    reason: Reason | None
    message: str
    violations: tuple[Violation, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    retry_after_ms: int | None = None
    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN


class FailedCall(Protocol):
    """What `grpc.aio.AioRpcError` and the synchronous `grpc.RpcError` of a call have in common."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    # Pairs of (key, value); stubs of the two clients differ in how they spell it.
    def trailing_metadata(self) -> object: ...


def describe(
    reason: Reason, subject: str = "", detail: str = "", violations: tuple[Violation, ...] = (), todo: str = ""
) -> str:
    """The sentence for a refusal: what is wrong, the facts, what to do. `todo` replaces the table's where it fits."""
    row = TABLE[reason]
    text = row.what.format(subject=subject or "it")
    if violations:
        first = violations[0]
        text += f": {first.field}: {first.description}" if first.field else f": {first.description}"
        if len(violations) > 1:
            text += f" (and {len(violations) - 1} more)"
    elif detail:
        text += f": {detail}"
    return _cut(f"{text}; {todo or row.todo}", MESSAGE_BYTES_MAX)


def details_for(
    reason: Reason,
    *,
    subject: str = "",
    detail: str = "",
    violations: Iterable[Violation] = (),
    metadata: Mapping[str, str] | None = None,
    todo: str = "",
) -> ErrorDetails:
    """The details of an error as a server gives them."""
    row = TABLE[reason]
    found = tuple(violations)
    facts = {"subject": subject, "detail": detail} | dict(metadata or {})
    return ErrorDetails(
        reason=reason,
        message=describe(reason, subject, detail, found, todo),
        violations=found,
        metadata={key: value for key, value in facts.items() if value},
        retry_after_ms=row.retry_after_ms,
        code=row.code,
    )


def status_of(details: ErrorDetails) -> status_pb2.Status:
    """The status to send: never larger than STATUS_BYTES_MAX, whatever the fields hold. Needs a reason."""
    if details.reason is None:
        raise ValueError("only an error with a Reason can be sent")
    code = cast("tuple[int, str]", TABLE[details.reason].code.value)[0]
    status = status_pb2.Status(code=code, message=_cut(details.message, MESSAGE_BYTES_MAX))
    info = error_details_pb2.ErrorInfo(reason=details.reason.value, domain=DOMAIN)
    for key, value in details.metadata.items():
        entry_bytes = len(key.encode()) + min(len(value.encode()), TEXT_BYTES_MAX)
        if info.ByteSize() + entry_bytes <= _METADATA_BYTES_MAX:
            info.metadata[key] = _cut(value, TEXT_BYTES_MAX)
    _pack(status, info)
    if details.retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(details.retry_after_ms)
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    if details.violations:
        room = STATUS_BYTES_MAX - status.ByteSize() - 128  # the type's name, and the last line of what is left out
        _pack(status, _bad_request(details.violations, room))
    return status


def trailing_metadata(details: ErrorDetails) -> tuple[tuple[str, bytes], ...]:
    """What a server attaches to the failed call."""
    return ((STATUS_METADATA_KEY, status_of(details).SerializeToString()),)


def details_from(call: FailedCall) -> ErrorDetails:
    """What a failed call said. Never raises: a peer that speaks otherwise gives a reason of None and its own words."""
    code, message = call.code(), call.details() or ""
    plain = ErrorDetails(reason=None, message=message or code.name, code=code)
    pairs = cast("Iterable[tuple[str, str | bytes]]", call.trailing_metadata() or ())
    raw = next((value for key, value in pairs if key == STATUS_METADATA_KEY), None)
    if not isinstance(raw, bytes):
        return plain
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    delay_ms: int | None = None
    try:
        for packed in status_pb2.Status.FromString(raw).details:
            if packed.Unpack(info) or packed.Unpack(bad_request):
                continue
            if packed.Unpack(retry):
                delay_ms = retry.retry_delay.ToMilliseconds()
    except DecodeError:
        return plain
    known = info.domain == DOMAIN and info.reason in set(Reason)
    return ErrorDetails(
        reason=Reason(info.reason) if known else None,
        message=plain.message,
        violations=tuple(Violation(one.field, one.description) for one in bad_request.field_violations),
        metadata=dict(info.metadata),
        retry_after_ms=delay_ms,
        code=code,
    )


def _pack(
    status: status_pb2.Status,
    message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo | error_details_pb2.BadRequest,
) -> None:
    status.details.add().Pack(message)


def _bad_request(violations: tuple[Violation, ...], room_bytes: int) -> error_details_pb2.BadRequest:
    """As many violations as fit; a last one says how many were left out."""
    bad_request = error_details_pb2.BadRequest()
    for index, violation in enumerate(violations):
        bad_request.field_violations.add(
            field=_cut(violation.field, TEXT_BYTES_MAX), description=_cut(violation.description, TEXT_BYTES_MAX)
        )
        if bad_request.ByteSize() > room_bytes:
            del bad_request.field_violations[-1]
            left_out = len(violations) - index
            bad_request.field_violations.add(field="", description=f"and {left_out} more")
            break
    return bad_request


def _cut(text: str, bytes_max: int) -> str:
    data = text.encode(errors="replace")
    return data.decode() if len(data) <= bytes_max else data[: bytes_max - 3].decode(errors="ignore") + "..."
