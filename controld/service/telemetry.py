"""Log entries: registered dotted names, JSON unless standard error is a terminal, a cause_id through every call."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from enum import StrEnum
from typing import TextIO

import structlog

from controld.core.model import Event
from controld.replica.observe import LogName as ReplicaLogName
from controld.replica.observe import LogValue


class LogName(StrEnum):
    """Every log entry of the process and its service (noun.verb); those of the replica room are its own."""

    CONTROLD_STARTED = "controld.started"
    CONTROLD_STOPPING = "controld.stopping"
    CONTROLD_STOPPED = "controld.stopped"
    CONTROLD_INSECURE = "controld.insecure"
    TLS_LOADED = "tls.loaded"
    TLS_REFUSED = "tls.refused"
    MEMBER_STARTED = "member.started"
    MEMBER_ENDED = "member.ended"
    MEMBER_DAMAGED = "member.damaged"
    MEMBER_STOPPED = "member.stopped"
    CALL_SERVED = "call.served"
    CALL_REFUSED = "call.refused"
    CALL_BROKEN = "call.broken"


_WARNINGS = frozenset(
    {
        LogName.CONTROLD_INSECURE,
        LogName.TLS_REFUSED,
        LogName.MEMBER_ENDED,
        ReplicaLogName.LEADER_LOST,
        ReplicaLogName.LEADER_STALLED,
        ReplicaLogName.LEADER_DOUBTED,
        ReplicaLogName.STORE_DOUBTED,
        ReplicaLogName.COMMIT_RETRIED,
        ReplicaLogName.BARRIER_FAILED,
        ReplicaLogName.PLANNER_LOST,
        ReplicaLogName.SESSION_REFUSED,
        ReplicaLogName.COMPACTION_FAILED,
        ReplicaLogName.CARE_FAILED,
    }
)
_ERRORS = frozenset(
    {
        LogName.CALL_BROKEN,
        LogName.MEMBER_DAMAGED,
        ReplicaLogName.COMMIT_FAILED,
        ReplicaLogName.COMMAND_BROKEN,
        ReplicaLogName.TICK_BROKEN,
        ReplicaLogName.TASK_BROKEN,
    }
)
_DEBUGS = frozenset({LogName.CALL_SERVED, ReplicaLogName.PLAN_MADE})


def level_of(name: LogName | ReplicaLogName) -> int:
    if name in _ERRORS:
        return logging.ERROR
    if name in _WARNINGS:
        return logging.WARNING
    return logging.DEBUG if name in _DEBUGS else logging.INFO


class StructLog:
    """The log of a process. Also the replica room's `Log` port."""

    def __init__(self, logger: structlog.typing.FilteringBoundLogger) -> None:
        self._logger = logger

    def __call__(self, name: LogName | ReplicaLogName, /, **fields: LogValue) -> None:
        with suppress(OSError, ValueError):  # a full disk or a closed pipe costs log entries, not the leadership
            self._logger.log(level_of(name), name.value, **fields)

    def committed(self, event: Event, revision: int) -> None:
        """A committed event; its kind, registered in `controld.core.events`, names the entry."""
        facts = {"job": event.job, "node": event.node, "generation": event.generation, "reason": event.reason}
        fields = {name: value for name, value in facts.items() if value} | dict(event.numbers) | dict(event.details)
        if event.cause_id:
            fields["cause_id"] = event.cause_id
        with suppress(OSError, ValueError):
            self._logger.info(event.kind, revision=revision, sequence=event.sequence, **fields)

    def broken(self, name: LogName, error: BaseException, /, **fields: LogValue) -> None:
        """With the traceback: what nobody expected."""
        with suppress(OSError, ValueError):
            self._logger.log(level_of(name), name.value, exc_info=error, **fields)


def make_log(stream: TextIO | None = None, *, level: str = "info", format_: str = "auto") -> StructLog:
    """`format_`: json, text (console is another word for it), or auto (text where the stream is a terminal)."""
    out = stream if stream is not None else sys.stderr
    console = format_ in ("text", "console") or (format_ == "auto" and out.isatty())
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="timestamp"),
    ]
    if console:
        processors.append(structlog.dev.ConsoleRenderer(colors=out.isatty()))
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    logger = structlog.wrap_logger(
        structlog.PrintLogger(out),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        context_class=dict,
    )
    return StructLog(logger)
