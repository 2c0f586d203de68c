"""What the replica room raises, beside the store's own errors (`controld.store.port`)."""

from __future__ import annotations

from controld.core.outcome import Refused
from controld.store.port import DeposedError
from virialpb.reasons import Reason


class RefusedError(Exception):
    """The command was decided against. `refused` says why; nothing changed."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(f"{refused.reason} {refused.subject} {refused.detail}".rstrip())
        self.refused = refused
        self.reason = refused.reason


class OverloadedError(Exception):
    """A bounded queue is full: nothing was decided, try again later."""

    reason = Reason.OVERLOADED


class SessionRefusedError(Exception):
    """This agent may not have a session now. `message` tells its operator what to do."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class NotLeaderError(DeposedError):
    """Another replica leads: `leader` is its address, HOST:PORT; empty where none is known to lead (NO_LEADER)."""

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader
        self.reason = Reason.NOT_LEADER if leader else Reason.NO_LEADER


class SessionClosedError(Exception):
    """The session is over: replaced by a newer connection, or the leadership ended. The agent says hello anew.

    `leader`: where to, if another controller leads and its address is known.
    """

    def __init__(self, reason: Reason, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.leader = leader
