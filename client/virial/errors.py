"""What can go wrong, as exceptions. Each says what to do; `reason` is for programs."""

from __future__ import annotations

from virialpb.errors import ErrorDetails, Violation
from virialpb.reasons import Reason


class VirialError(Exception):
    """Base of all. `reason` is None when no controller answered."""

    def __init__(self, message: str, details: ErrorDetails | None = None) -> None:
        super().__init__(message)
        self.details = details

    @property
    def reason(self) -> Reason | None:
        return self.details.reason if self.details is not None else None

    @property
    def violations(self) -> tuple[Violation, ...]:
        return self.details.violations if self.details is not None else ()


class InvalidRequestError(VirialError):
    """A field is wrong; `violations` names each."""


class NotFoundError(VirialError):
    """There is no such job, node, hold or checkpoint."""


class AlreadyExistsError(VirialError):
    """The name is taken."""


class ConflictError(VirialError):
    """What was read has changed, or the caller's right to act has ended: read again."""


class CompactedError(VirialError):
    """The cursor is older than what is kept: list, then watch."""


class ExhaustedError(VirialError):
    """Quota, queue or store is full: wait."""


class DeniedError(VirialError):
    """Not known, or not allowed."""


class UnavailableError(VirialError):
    """No controller (or not the node asked for) answered in time, after every retry."""


class InternalError(VirialError):
    """A broken invariant or an answer that makes no sense."""


class ForkedClientError(VirialError):
    """This client was made before a fork: make a new one in the child."""


_BY_REASON: dict[Reason, type[VirialError]] = {
    Reason.INVALID_SPEC: InvalidRequestError,
    Reason.NOT_FOUND: NotFoundError,
    Reason.ALREADY_EXISTS: AlreadyExistsError,
    Reason.DUPLICATE_NODE: AlreadyExistsError,
    Reason.STALE: ConflictError,
    Reason.FENCED: ConflictError,
    Reason.NOT_LEADER: UnavailableError,
    Reason.NO_LEADER: UnavailableError,
    Reason.OUTCOME_UNKNOWN: UnavailableError,
    Reason.NODE_UNREACHABLE: UnavailableError,
    Reason.COMPACTED: CompactedError,
    Reason.QUOTA: ExhaustedError,
    Reason.OVERLOADED: ExhaustedError,
    Reason.STORAGE_FULL: ExhaustedError,
    Reason.UNAUTHENTICATED: DeniedError,
    Reason.PERMISSION_DENIED: DeniedError,
    Reason.NOT_NOW: ConflictError,
    Reason.INVARIANT_BROKEN: InternalError,
}

# From a transport or a peer that gives no Reason.
_BY_CODE: dict[str, type[VirialError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "NOT_FOUND": NotFoundError,
    "ALREADY_EXISTS": AlreadyExistsError,
    "ABORTED": ConflictError,
    "FAILED_PRECONDITION": ConflictError,
    "OUT_OF_RANGE": CompactedError,
    "RESOURCE_EXHAUSTED": ExhaustedError,
    "UNAUTHENTICATED": DeniedError,
    "PERMISSION_DENIED": DeniedError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": UnavailableError,
    "CANCELLED": UnavailableError,
}


def error_for(details: ErrorDetails) -> VirialError:
    if details.reason is not None:
        return _BY_REASON[details.reason](details.message, details)
    return _BY_CODE.get(details.code.name, InternalError)(details.message, details)
