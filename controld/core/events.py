"""Registered event kinds (noun.verb) and how transitions make events. Adding one here is all it takes."""

from __future__ import annotations

from typing import Final

from controld.core.model import Event, Generation, Job, Node

KINDS: Final = frozenset(
    {
        "job.submitted",
        "job.cancelling",
        "job.cancelled",
        "job.succeeded",
        "job.failed",
        "generation.started",
        "generation.went",
        "generation.active",
        "generation.stopping",
        "generation.ended",
        "lease.released",
        "lease.expired",
        "task.exited",
        "node.admitted",
        "node.returned",
        "node.suspect",
        "node.live",
        "node.expired",
        "node.replaced",
        "node.removed",
        "node.duplicate",
        "node.draining",
        "node.certified",
        "token.created",
        "inventory.changed",
        "hold.placed",
        "hold.released",
        "checkpoint.begun",
        "checkpoint.committed",
        "checkpoint.aborted",
        "checkpoint.bad",
        "checkpoint.dropped",
        "shard.quarantined",
    }
)


def event(
    kind: str,
    *,
    job: str = "",
    node: str = "",
    generation: int = 0,
    reason: str = "",
    cause_id: str = "",
    numbers: dict[str, int] | None = None,
    details: dict[str, str] | None = None,
) -> Event:
    """An event of a registered kind. Raises ValueError on any other: a typo must not reach the log."""
    if kind not in KINDS:
        raise ValueError(f"event kind {kind!r} is not registered")
    return Event(
        kind=kind,
        job=job,
        node=node,
        generation=generation,
        reason=reason,
        cause_id=cause_id,
        numbers=tuple(sorted((numbers or {}).items())),
        details=tuple(sorted((details or {}).items())),
    )


def of_job(
    kind: str,
    job: Job,
    *,
    reason: str = "",
    numbers: dict[str, int] | None = None,
    details: dict[str, str] | None = None,
) -> Event:
    return event(kind, job=job.id, generation=job.generation, reason=reason, numbers=numbers, details=details)


def of_generation(
    kind: str,
    generation: Generation,
    *,
    node: str = "",
    reason: str = "",
    numbers: dict[str, int] | None = None,
    details: dict[str, str] | None = None,
) -> Event:
    return event(
        kind,
        job=generation.job,
        node=node,
        generation=generation.number,
        reason=reason,
        cause_id=generation.cause_id,
        numbers=numbers,
        details=details,
    )


def of_node(kind: str, node: Node, *, reason: str = "", details: dict[str, str] | None = None) -> Event:
    return event(kind, node=node.name, reason=reason, details=details)
