"""The agent's log: one line an event, JSON unless a terminal reads it. Events are dotted noun.verb, all listed here.

Units stand in key names; `cause_id` follows a change from the call that asked for it. Never in a log: environments,
arguments and output of tasks.
"""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from typing import Any

import structlog

from noded.core import messages as m
from virialpb.ids import Epoch


class LogName(StrEnum):
    """Every event there is."""

    NODED_STARTED = "noded.started"
    NODED_STOPPED = "noded.stopped"
    GUARDIAN_CONNECTED = "guardian.connected"
    GUARDIAN_LOST = "guardian.lost"
    GUARDIAN_REFUSED = "guardian.refused"
    GUARDIAN_REPLACED = "guardian.replaced"
    SESSION_OPENED = "session.opened"
    SESSION_CLOSED = "session.closed"
    CONTROLLER_SILENT = "controller.silent"
    ORDER_RECEIVED = "order.received"
    ORDER_DROPPED = "order.dropped"
    INSTRUCTION_FAILED = "instruction.failed"
    SLOT_PREPARE_FAILED = "slot.prepare_failed"
    SLOT_RELEASE_FAILED = "slot.release_failed"
    SLOT_KILLED = "slot.killed"
    TASK_STARTED = "task.started"
    TASK_EXITED = "task.exited"
    CHECKPOINT_DROPPED = "checkpoint.dropped"
    CHECKPOINT_DROP_FAILED = "checkpoint.drop_failed"
    FILE_FAILED = "file.failed"
    COLLECTOR_FAILED = "collector.failed"
    TLS_LOADED = "tls.loaded"
    TLS_REFUSED = "tls.refused"
    NODE_JOINED = "node.joined"
    JOIN_FAILED = "join.failed"
    CERTIFICATE_RENEWED = "certificate.renewed"
    CERTIFICATE_NOT_RENEWED = "certificate.not_renewed"


class NodeLog:
    """What rooms log with. Also fits `noded.link.control.LinkLog`."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def info(self, event: str, **fields: object) -> None:
        self._logger.info(str(event), **fields)

    def warning(self, event: str, **fields: object) -> None:
        self._logger.warning(str(event), **fields)

    def error(self, event: str, **fields: object) -> None:
        self._logger.error(str(event), **fields)

    def order(self, leader_epoch: Epoch, order: m.Order) -> None:
        """An order about a slot. Acks and answers to tasks are too many, and say nothing by themselves."""
        fields: dict[str, object] = {}
        match order:
            case m.Prepare():
                fields = {"rank": order.rank, "cause_id": order.cause_id}
            case m.Stop():
                fields = {"reason": order.reason, "grace_ms": order.grace_ms}
            case m.Go() | m.Release() | m.SaveNow():
                pass
            case _:
                return
        self.info(
            LogName.ORDER_RECEIVED,
            order=type(order).__name__.lower(),
            slot=order.slot,
            leader_epoch=str(leader_epoch),
            **fields,
        )


def setup_log(log_format: str, level: str, node: str) -> NodeLog:
    """To stderr. `log_format`: auto, json or text, for which console is another word."""
    text = log_format in ("text", "console") or (log_format == "auto" and sys.stderr.isatty())
    renderer: Any = structlog.dev.ConsoleRenderer() if text else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    return NodeLog(structlog.get_logger().bind(node=node))
