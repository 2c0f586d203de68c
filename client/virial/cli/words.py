"""Reasons and events as sentences. Controllers send data; this is where it becomes English, and nowhere else.

What a newer controller sends and this table does not know is shown by its own name, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from virial.cli.human import clean, clock, cpu, moment, named, plural, size

if TYPE_CHECKING:
    from virial.models import Event, Explanation, JobError, TaskExit, UnfitCount

# A line of a log should stay one; `virial job` shows every seat.
_SEATS_MAX: Final = 16

# After "N nodes": {numbers} is replaced by what is needed and what is free, where the planner says it.
_UNFIT_OF_NODES: Final[Mapping[str, str]] = {
    "NOT_LIVE": "not heard from; see whether noded runs there",
    "NOT_REPORTED": "connected, but no inventory or guardian yet",
    "HELD": "held from new work; `virial node` shows by whom",
    "CPU": "without enough free CPU",
    "MEMORY": "without enough free memory",
    "DEVICES": "without the free devices asked for",
    "SLOTS": "with as many tasks as a node takes",
    "CONSTRAINT": "not meeting the job's node_constraints",
    "FENCING_WEAK": "with weak fencing, and the job asks for strong",
    "EXCLUDED": "left out for a while: a rank could not be started there",
    "TOO_FEW_NODES": "with room for a rank, too few for the whole gang",
    "WAITS_FOR_EXPIRY": "lost, and not yet proven stopped: their leases must run out first",
    "WAITS_FOR_RELEASE": "still stopping ranks of the last generation",
}
_UNFIT_OF_JOB: Final[Mapping[str, str]] = {
    "WAITS_FOR_PLANNER": "the planner has not looked at it yet; ask again in a second",
    "BACK_OFF": "waiting before the next try, since the last ones made no progress",
    "NO_RESTORABLE_CHECKPOINT": "its checkpoints lie on nodes that are not here: it waits for them rather than "
    "start from zero",
    "SPARE_MISSING": "runs without all its spares: no node had room for them when it was placed; the next restart "
    "looks again",
    "TOO_FEW_NODES": "no node has joined the cluster; start noded on at least one host",
}
_STOPS: Final[Mapping[str, str]] = {
    "RANK_FAILED": "a rank failed",
    "NODE_LOST": "a node was lost",
    "NODE_SUSPECT": "a node went silent",
    "PREPARE_FAILED": "a rank could not be prepared",
    "PREPARE_DEADLINE": "a rank was not ready in time",
    "START_DEADLINE": "a rank made no first step in time",
    "GO_DEADLINE": "a rank was ready and was not started in time",
    "NO_PROGRESS": "it made no progress",
    "DRAIN": "a node is being drained",
    "CANCELLED": "it was cancelled",
    "FINISHED": "every rank finished",
    "SUPERSEDED": "a newer generation took its place",
    "HISTORY_CHANGED": "the controller's data was restored from a backup",
}
_JOB_ENDS: Final[Mapping[str, str]] = {
    "RESTART_BUDGET": "it may not restart again (`restart` in its spec)",
    "NO_PROGRESS": "several generations in a row made no progress",
    "CANNOT_PREPARE": "several generations in a row could not be prepared on the nodes that were tried",
    "NO_CHECKPOINT_VERIFIES": "none of its checkpoints can be loaded, and starting from zero would lose saved work",
}
_EXITS: Final[Mapping[str, str]] = {
    "STOPPED": "stopped by order",
    "LEASE_EXPIRED": "stopped by its own node: its lease had run out",
    "OOM": "killed for using more memory than it asked for",
    "START_FAILED": "could not be started",
    "GUARDIAN_LOST": "lost with its node's guardian",
}
_PREPARES: Final[Mapping[str, str]] = {
    "DEVICE_BUSY": "a device is still in use",
    "USER_REQUIRED": "noded runs as root and the spec names no task.user",
    "USER_UNKNOWN": "the spec's task.user does not exist there",
    "DEADLINE_PASSED": "its lease ended before it was ready",
    "STALE_GENERATION": "a newer generation is known there",
    "COMMAND_NOT_FOUND": "the spec's command does not exist there",
    "WORKING_DIRECTORY_MISSING": "the spec's working_directory does not exist there",
    "INVENTORY_MISSING": "the node has not found its devices yet",
    "SHARD_MISSING": "its part of the checkpoint is not there",
    "SHARD_CORRUPT": "its part of the checkpoint does not verify",
    "CHECKPOINT_DIRECTORY": "the checkpoint directory cannot be reached there",
    "KIND_UNSUPPORTED": "that kind of task is not supported there",
}
_DETAILS: Final[Mapping[str, str]] = {
    "unheard": "its node did not take the order",
    "stalled": "reading its part of the checkpoint got no further",
}
_ABORTS: Final[Mapping[str, str]] = {
    "STORAGE_FULL": "no room left where checkpoints are written",
    "IO_ERROR": "writing them failed; the rank's log (`virial logs`) says where",
    "DEADLINE": "not every rank had saved within checkpoint.timeout",
    "OVERTAKEN": "a later one was complete before it",
}
_RELAXED: Final[Mapping[str, tuple[str, Callable[[int], str]]]] = {
    "ranks": ("gang.ranks", str),
    "cpu_millis": ("resources.cpu", cpu),
    "memory_bytes": ("resources.memory", size),
}


def unfit_line(count: UnfitCount) -> str:
    """One reason why a job waits, with its count and its numbers."""
    numbers = ", ".join(named(name, value) for name, value in count.numbers)
    details = ", ".join(value for _, value in count.details)
    extra = "; ".join(part for part in (numbers, details) if part)
    tail = f" ({extra})" if extra else ""
    if count.nodes == 0 or count.reason not in _UNFIT_OF_NODES:
        what = _UNFIT_OF_JOB.get(count.reason) or _UNFIT_OF_NODES.get(count.reason)
        if what is not None:
            return clean(what + tail)
        return clean(f"{plural(count.nodes, 'node')}: {_spoken(count.reason)}{tail}")
    return clean(f"{plural(count.nodes, 'node')} {_UNFIT_OF_NODES[count.reason]}{tail}")


def relaxation_line(explanation: Explanation) -> str:
    """The smallest change that would fit, as fields of the spec; empty when none was found."""
    parts: list[str] = []
    for part in filter(None, explanation.relaxation.split(", ")):
        name, _, text = part.partition("=")
        field, show = _RELAXED.get(name, (name, str))
        parts.append(f"{field}: {show(int(text)) if text.isdigit() else text}")
    return clean(f"it would fit with {' and '.join(parts)}") if parts else ""


def exit_words(exit_: TaskExit) -> str:
    return _exit(exit_.reason, exit_.code, exit_.signal)


def abort_words(reason: str) -> str:
    """Why a checkpoint was given up."""
    return _ABORTS.get(reason) or _spoken(reason)


def stop_words(reason: str) -> str:
    return _STOPS.get(reason) or _spoken(reason)


def error_line(error: JobError) -> str:
    """A job's first error on one line: which rank, where, what."""
    what = stop_words(error.stop_reason)
    if error.exit is not None:
        what = f"{what}: {exit_words(error.exit)}"
    detail = f" ({_detail(error.detail)})" if error.detail else ""
    node = f" on {error.node.rsplit('/', 1)[-1]}" if error.node else ""
    return clean(f"generation {error.generation}, rank {error.rank}{node}: {what}{detail}")


def event_line(event: Event, *, dated: bool = False) -> str:
    """An event as one line of a log: local time (with `dated` the day too), job and generation, what happened."""
    when = moment if dated else clock
    return f"{when(event.create_time_unix_ns)}  {event_text(event)}"


def event_text(event: Event) -> str:
    """What happened, in words, on one line."""
    say = _EVENTS.get(event.kind)
    about = _about(event)
    return clean(f"{about}: {say(event) if say is not None else _raw(event)}" if about else _raw(event))


def _about(event: Event) -> str:
    if event.job:
        of_generation = event.generation and not event.kind.startswith("job.")
        return f"job {event.job}" + (f" generation {event.generation}" if of_generation else "")
    return f"node {event.node}" if event.node else ""


def _raw(event: Event) -> str:
    """An event this version has no words for, complete."""
    parts = [event.kind, event.reason, *(named(k, v) for k, v in event.numbers)]
    return " ".join(filter(None, [*parts, *(f"{k}={v}" for k, v in event.details)]))


def _exit(reason: str, code: int, signal_number: int) -> str:
    if reason == "EXITED":
        return f"exited with code {code}"
    if reason == "SIGNALED":
        return f"killed by {_signal_name(signal_number)}"
    words = _EXITS.get(reason) or _spoken(reason)
    return f"{words} ({_signal_name(signal_number)})" if signal_number else words


def _signal_name(number: int) -> str:
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _spoken(reason: str) -> str:
    return reason.replace("_", " ").lower()


def _detail(text: str) -> str:
    """A detail is a reason's name, or a name and facts after it."""
    head, colon, rest = text.partition(":")
    words = _PREPARES.get(head.strip()) or _DETAILS.get(head.strip(), head)
    return words + colon + rest


def _number(event: Event, name: str, default: int = 0) -> int:
    return dict(event.numbers).get(name, default)


def _where(event: Event) -> str:
    """The rank and node an event is about."""
    numbers = dict(event.numbers)
    rank = f"rank {numbers['rank']}" if "rank" in numbers else "spare"
    return f"{rank} on {event.node}" if event.node else rank


def _submitted(event: Event) -> str:
    spares = _number(event, "spares")
    return f"submitted, {plural(_number(event, 'ranks'), 'rank')}" + (f", {plural(spares, 'spare')}" if spares else "")


def _job_failed(event: Event) -> str:
    first = dict(event.details).get("error", "")
    why = _JOB_ENDS.get(event.reason) or _spoken(event.reason)
    return f"failed: {why}" + (f"; the first error was: {stop_words(first)}" if first else "")


def _placed(event: Event) -> str:
    details = dict(event.details)
    ranks = sorted(int(name[4:]) for name in details if name.startswith("rank") and name[4:].isdecimal())
    spares = sorted(name for name in details if name.startswith("spare"))
    seats = [f"rank {rank} on {details[f'rank{rank}']}" for rank in ranks]
    seats += [f"spare on {details[name]}" for name in spares]
    if len(seats) > _SEATS_MAX:
        seats[_SEATS_MAX:] = [f"and {len(seats) - _SEATS_MAX} more"]
    source = (
        f"; from checkpoint step {_number(event, 'restored_step')}" if "restored_step" in dict(event.numbers) else ""
    )
    return f"placed: {', '.join(seats)}{source}"


def _stopping(event: Event) -> str:
    rank = f" (rank {_number(event, 'rank')})" if "rank" in dict(event.numbers) else ""
    detail = dict(event.details).get("detail", "")
    return f"stopping: {stop_words(event.reason)}{rank}" + (f": {_detail(detail)}" if detail else "")


def _task_exited(event: Event) -> str:
    return f"{_where(event)} {_exit(event.reason, _number(event, 'code'), _number(event, 'signal'))}"


def _lease_released(event: Event) -> str:
    lost = " (its guardian died; its processes are proven gone)" if event.reason == "GUARDIAN_LOST" else ""
    return f"{_where(event)}: lease released{lost}"


def _checkpoint(what: str) -> Callable[[Event], str]:
    def say(event: Event) -> str:
        rank = f", rank {_number(event, 'rank')}" if "rank" in dict(event.numbers) else ""
        bytes_ = f", {size(_number(event, 'size_bytes'))}" if "size_bytes" in dict(event.numbers) else ""
        words = _ABORTS.get(event.reason) or _PREPARES.get(event.reason) or _STOPS.get(event.reason)
        why = words or _spoken(event.reason)
        reason = f": {why}" if event.reason else ""
        return f"checkpoint of step {_number(event, 'step')} {what}{rank}{bytes_}{reason}"

    return say


def _hold_placed(event: Event) -> str:
    return f"held from new work by {dict(event.details).get('owner', '?')}: {event.reason}"


def _node_expired(_: Event) -> str:
    return "given up: it was silent until its leases ended"


_EVENTS: Final[Mapping[str, Callable[[Event], str]]] = {
    "job.submitted": _submitted,
    "job.cancelling": lambda _: "being cancelled",
    "job.cancelled": lambda _: "cancelled; every rank is gone",
    "job.succeeded": lambda _: "succeeded",
    "job.failed": _job_failed,
    "generation.started": _placed,
    "generation.went": lambda _: "every rank is ready: go",
    "generation.active": lambda _: "every rank runs",
    "generation.stopping": _stopping,
    "generation.ended": lambda e: f"ended: {stop_words(e.reason)}" if e.reason else "ended",
    "lease.released": _lease_released,
    "lease.expired": lambda e: f"lease on {e.node} ran out",
    "task.exited": _task_exited,
    "node.admitted": lambda e: f"joined (fencing {dict(e.details).get('fencing', 'unknown')})",
    "node.returned": lambda _: "came back with a new guardian or after a reboot",
    "node.suspect": lambda _: "silent: no new work goes there",
    "node.live": lambda _: "heard from again",
    "node.expired": _node_expired,
    "node.replaced": lambda _: "replaced by another host of the same name",
    "node.removed": lambda _: "removed from the cluster for good",
    "node.duplicate": lambda _: "a second agent with its identity was turned away",
    "node.draining": lambda e: f"being drained: {e.reason}",
    "node.certified": lambda _: "given its first certificate, for a join token",
    "token.created": lambda _: "a join token for it was made",
    "inventory.changed": lambda _: "inventory changed",
    "hold.placed": _hold_placed,
    "hold.released": lambda e: f"hold of {dict(e.details).get('owner', '?')} released",
    "checkpoint.begun": _checkpoint("begun"),
    "checkpoint.committed": _checkpoint("committed"),
    "checkpoint.aborted": _checkpoint("aborted"),
    "checkpoint.bad": _checkpoint("is bad"),
    "checkpoint.dropped": _checkpoint("deleted"),
    "shard.quarantined": _checkpoint("has a bad part"),
}
