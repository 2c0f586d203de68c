"""What the replica room raises, beside the store's own errors (`controld.store.port`)."""

from __future__ import annotations

from controld.core.outcome import Refused
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


class SessionClosedError(Exception):
    """The session is over: replaced by a newer connection, or the leadership ended. The agent says hello anew."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
