"""Store keys: `kind/id...`. The order of keys is the order in which equal choices are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from controld.core.ids import CheckpointId, JobId, NodeUid
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

CLUSTER = "cluster"


def node(uid: NodeUid) -> str:
    return f"nodes/{uid}"


def job(id_: JobId) -> str:
    return f"jobs/{id_}"


def generation(job_: JobId, number: int) -> str:
    return f"generations/{job_}/{number:08d}"


def checkpoint(job_: JobId, id_: CheckpointId) -> str:
    return f"checkpoints/{job_}/{id_}"


def request(request_id: str) -> str:
    return f"requests/{request_id}"


def event(sequence: int) -> str:
    return f"events/{sequence:016d}"


def event_pack(number: int) -> str:
    return f"told/{number:016d}"


def request_pack(number: int) -> str:
    return f"answered/{number:016d}"


def join_token(secret_sha256: str) -> str:
    return f"joins/{secret_sha256}"


def of(record: Record) -> str:
    """The key a record belongs under."""
    return _OF[type(record)](record)


_OF: Final[dict[type[Record], Callable[[Any], str]]] = {
    Cluster: lambda record: CLUSTER,
    Node: lambda record: node(record.uid),
    Job: lambda record: job(record.id),
    Generation: lambda record: generation(record.job, record.number),
    Checkpoint: lambda record: checkpoint(record.job, record.id),
    Request: lambda record: request(record.request_id),
    Event: lambda record: event(record.sequence),
    EventPack: lambda record: event_pack(record.number),
    RequestPack: lambda record: request_pack(record.number),
    JoinToken: lambda record: join_token(record.secret_sha256),
}
