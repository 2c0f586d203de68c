"""Records to bytes and back: the only reader and writer of `virialpb.store.v1`.

The rules of the stored format stand in `records.proto`. A reader keeps working on everything ever written: absent
fields read as the model's defaults. What it cannot know (a name out of a closed set that a newer controller wrote)
it refuses loudly, naming the key, rather than guess who holds a device.
"""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.message import DecodeError, Message

from controld.core import keys
from controld.core.model import (
    Checkpoint,
    Cluster,
    Event,
    EventPack,
    Generation,
    Job,
    JoinToken,
    Node,
    Record,
    Request,
    RequestPack,
)
from controld.core.state import Change
from controld.store import codec_gang, codec_joins, codec_node
from controld.store import codec_values as values
from controld.store.port import RecordError, StoredChange
from virialpb.store.v1 import records_pb2 as pb


def encode_change(change: Change) -> StoredChange:
    """Raises RecordError where the record cannot be stored (an integer beyond 64 bits, a lone surrogate)."""
    return StoredChange(change.key, None if change.record is None else encode(change.record))


def decode_change(change: StoredChange) -> Change:
    """Inverse of `encode_change`. Raises RecordError."""
    return Change(change.key, None if change.value is None else decode(change.key, change.value))


def encode(record: Record) -> bytes:
    """The stored bytes of a record: the same for equal records. Raises RecordError."""
    try:
        return _message(record).SerializeToString(deterministic=True)
    except (ValueError, TypeError) as error:
        raise RecordError(f"{keys.of(record)}: cannot be stored: {error}") from error


def decode(key: str, value: bytes) -> Record:
    """The record stored under `key`. Raises RecordError: damaged, misplaced, or from a newer version."""
    kind = key.partition("/")[0]
    reader = _READERS.get(kind)
    if reader is None:
        raise RecordError(f"{key}: unknown kind of key {kind!r}: written by a newer controld?")
    try:
        record = reader(value)
    except DecodeError as error:
        raise RecordError(f"{key}: the stored bytes are damaged ({len(value)} bytes): {error}") from error
    except values.FieldError as error:
        raise RecordError(f"{key}: {error}: written by a newer controld?") from error
    if (belongs := keys.of(record)) != key:
        raise RecordError(f"{key}: holds the record of {belongs}")
    return record


def _message(record: Record) -> Message:
    match record:
        case Cluster():
            return pb.Cluster(
                uid=record.uid,
                job_counter=record.job_counter,
                event_sequence=record.event_sequence,
                request_sequence=record.request_sequence,
            )
        case Node():
            return codec_node.node(record)
        case Job():
            return codec_gang.job(record)
        case Generation():
            return codec_gang.generation(record)
        case Checkpoint():
            return codec_gang.checkpoint(record)
        case JoinToken():
            return codec_joins.join_token(record)
        case EventPack():
            return pb.EventPack(number=record.number, events=[_event(event) for event in record.events])
        case RequestPack():
            return pb.RequestPack(number=record.number, requests=[_request(request) for request in record.requests])
        case Request():
            return _request(record)
        case Event():
            return _event(record)


def _request(value: Request) -> pb.Request:
    return pb.Request(
        request_id=value.request_id,
        fingerprint=value.fingerprint,
        subject=value.subject,
        time_unix_ns=value.time_unix_ns,
    )


def _event(value: Event) -> pb.Event:
    return pb.Event(
        kind=value.kind,
        job=value.job,
        node=value.node,
        generation=value.generation,
        reason=value.reason,
        numbers=values.numbers(value.numbers),
        details=values.texts(value.details),
        cause_id=value.cause_id,
        sequence=value.sequence,
        create_time_unix_ns=value.create_time_unix_ns,
    )


def _from_event(value: pb.Event) -> Event:
    return Event(
        kind=value.kind,
        job=value.job,
        node=value.node,
        generation=value.generation,
        reason=value.reason,
        numbers=values.from_numbers(value.numbers),
        details=values.from_texts(value.details),
        cause_id=value.cause_id,
        sequence=value.sequence,
        create_time_unix_ns=value.create_time_unix_ns,
    )


def _read_cluster(data: bytes) -> Cluster:
    value = pb.Cluster.FromString(data)
    return Cluster(
        uid=value.uid,
        job_counter=value.job_counter,
        event_sequence=value.event_sequence,
        request_sequence=value.request_sequence,
    )


def _read_event_pack(data: bytes) -> EventPack:
    value = pb.EventPack.FromString(data)
    return EventPack(value.number, tuple(_from_event(event) for event in value.events))


def _read_request_pack(data: bytes) -> RequestPack:
    value = pb.RequestPack.FromString(data)
    return RequestPack(value.number, tuple(_from_request(request) for request in value.requests))


def _from_request(value: pb.Request) -> Request:
    return Request(
        request_id=value.request_id,
        fingerprint=value.fingerprint,
        subject=value.subject,
        time_unix_ns=value.time_unix_ns,
    )


_READERS: dict[str, Callable[[bytes], Record]] = {
    "cluster": _read_cluster,
    "nodes": lambda data: codec_node.from_node(pb.Node.FromString(data)),
    "jobs": lambda data: codec_gang.from_job(pb.Job.FromString(data)),
    "generations": lambda data: codec_gang.from_generation(pb.Generation.FromString(data)),
    "checkpoints": lambda data: codec_gang.from_checkpoint(pb.Checkpoint.FromString(data)),
    "requests": lambda data: _from_request(pb.Request.FromString(data)),
    "events": lambda data: _from_event(pb.Event.FromString(data)),
    "joins": codec_joins.read_join_token,
    "answered": _read_request_pack,
    "told": _read_event_pack,
}
