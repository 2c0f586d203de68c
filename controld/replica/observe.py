"""What the replica room tells about itself: log entries of registered names, and measurements.

Both are ports. The service room gives them structlog and prometheus; a simulation counts.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

LogValue = str | int | float | bool


class LogName(StrEnum):
    """Every log entry of this room (noun.verb)."""

    LEADER_STARTED = "leader.started"
    LEADER_STOPPED = "leader.stopped"
    LEADER_LOST = "leader.lost"
    LEADER_STALLED = "leader.stalled"
    LEADER_DOUBTED = "leader.doubted"
    COMMIT_RETRIED = "commit.retried"
    COMMIT_FAILED = "commit.failed"
    BARRIER_FAILED = "barrier.failed"
    COMMAND_REFUSED = "command.refused"
    COMMAND_BROKEN = "command.broken"
    TICK_BROKEN = "tick.broken"
    PLAN_MADE = "plan.made"
    PLANNER_LOST = "planner.lost"
    GRANT_REFUSED = "grant.refused"
    SESSION_OPENED = "session.opened"
    SESSION_REFUSED = "session.refused"
    SESSION_CLOSED = "session.closed"
    COMPACTION_FAILED = "compaction.failed"
    STANDBY_LOADED = "standby.loaded"
    STANDBY_DROPPED = "standby.dropped"
    STANDBY_CUT = "standby.cut"
    LEADER_SEEN = "leader.seen"
    LEADER_SILENT = "leader.silent"
    STORE_DOUBTED = "store.doubted"
    TAKEOVER_BEGAN = "takeover.began"
    TAKEOVER_FAILED = "takeover.failed"
    HANDOVER_BEGAN = "handover.began"
    HANDOVER_REFUSED = "handover.refused"
    HANDOVER_DONE = "handover.done"
    LEADER_RESIGNED = "leader.resigned"
    MEMBER_ADDED = "member.added"
    MEMBER_REMOVED = "member.removed"
    MEMBER_PROMOTED = "member.promoted"
    MEMBER_DEFRAGMENTED = "member.defragmented"
    ALARM_DISARMED = "alarm.disarmed"
    CARE_FAILED = "care.failed"
    TASK_BROKEN = "task.broken"


class Log(Protocol):
    def __call__(self, name: LogName, /, **fields: LogValue) -> None: ...


class Observer(Protocol):
    """Measurements. Called on the leader's loop: must not block."""

    def committed(self, commands: int, operations: int, seconds: float) -> None:
        """One batch, with the time from giving it to the store until its outcome was known."""
        ...

    def queued(self, commands: int) -> None:
        """Commands that wait to be decided, each time a batch was taken."""
        ...

    def stalled(self, seconds: float) -> None:
        """By how much a timer of the leader's loop was late."""
        ...

    def refused(self, command: str, reason: str) -> None: ...

    def planned(self, grants: int, unplaced: int, seconds: float) -> None: ...

    def ticked(self, seconds: float) -> None: ...


class _Unobserved:
    def committed(self, commands: int, operations: int, seconds: float) -> None:
        del commands, operations, seconds

    def queued(self, commands: int) -> None:
        del commands

    def stalled(self, seconds: float) -> None:
        del seconds

    def refused(self, command: str, reason: str) -> None:
        del command, reason

    def planned(self, grants: int, unplaced: int, seconds: float) -> None:
        del grants, unplaced, seconds

    def ticked(self, seconds: float) -> None:
        del seconds


def silent(name: LogName, /, **fields: LogValue) -> None:
    """A log that keeps nothing."""
    del name, fields


UNOBSERVED: Observer = _Unobserved()
