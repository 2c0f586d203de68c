"""Whose log is meant: rank and generation to the slot and node that have it. The log of an older try stays readable."""

from __future__ import annotations

from controld.core.model import Generation, Job, Member, Phase
from controld.core.state import State
from controld.service.convert.common import job_name, node_name
from controld.service.failures import CallError, invalid_field, not_found
from virialpb.errors import details_for

STREAMS = ("stdout", "stderr")


def stream_from(text: str) -> str:
    """Raises CallError for anything but stdout, stderr or nothing (stdout)."""
    stream = text or STREAMS[0]
    if stream not in STREAMS:
        raise invalid_field("stream", f"unknown value '{text[:40]}'; use stdout or stderr")
    return stream


def find(job: Job, state: State, rank: int, number: int) -> tuple[Generation, Member]:
    """The generation asked for, 0 being the newest that ran, and its member. Raises CallError."""
    subject = job_name(job.id)
    if not 0 <= rank < job.spec.gang.ranks:
        raise invalid_field("rank", f"{rank} is not a rank of {subject}: it has 0 to {job.spec.gang.ranks - 1}")
    table = state.generations.get(job.id, {})
    if number:
        generation = table.get(number)
        if generation is None:
            kept = ", ".join(str(known) for known in sorted(table)) or "none"
            raise not_found(f"generation {number} of {subject}", f"generations kept: {kept}")
    else:
        ran = [table[known] for known in sorted(table) if _ran(table[known])]
        if not ran:
            if job.state.ended:
                raise not_found(
                    f"a log of {subject}", f"no task of it ever ran; it is {job.state.value}", "read the job's events"
                )
            raise not_found(
                f"a log of {subject}", f"no task of it has run yet; it is {job.state.value}", "retry once it runs"
            )
        generation = ran[-1]
    member = next((one for one in generation.ranks if one.rank == rank), None)
    if member is None:
        raise not_found(f"rank {rank} of generation {generation.number} of {subject}")
    return generation, member


def _ran(generation: Generation) -> bool:
    """Whether GO was committed for it: before that nothing ran that could have written a log."""
    return (
        generation.phase in (Phase.GO, Phase.ACTIVE)
        or bool(generation.master_address)
        or generation.progressed
        or any(member.exit is not None for member in generation.ranks)
    )


def node_subject(member: Member, state: State) -> str:
    return node_name(member.node, state)


def stored_tail(job: Job, generation: Generation, rank: int, stream: str) -> str:
    """The last words that were committed with the job's first error, where they are of this log; else empty."""
    error = job.first_error
    if stream != "stderr" or error is None or error.exit is None:
        return ""
    return error.exit.stderr_tail if (error.generation, error.rank) == (generation.number, rank) else ""


def with_hint(error: CallError, job: Job, generation: Generation, rank: int, stream: str) -> CallError:
    """`error`, and where the stored last words can be had instead."""
    details = error.details
    if stream == "stderr" or not stored_tail(job, generation, rank, "stderr") or details.reason is None:
        return error
    return CallError(
        details_for(
            details.reason,
            subject=details.metadata.get("subject", ""),
            detail=details.metadata.get("detail", ""),
            metadata=details.metadata,
            todo="read stream stderr: its end was kept with the job's first error",
        )
    )
