"""How a call fails: one exception for what the service itself finds, and the map from every domain exception."""

from __future__ import annotations

from collections.abc import Iterable

from controld.core.outcome import FieldViolation, Refused
from controld.matching.port import PlannerLostError
from controld.replica.errors import (
    NotLeaderError,
    OverloadedError,
    RefusedError,
    SessionClosedError,
    SessionRefusedError,
)
from controld.store.members import MembersRefusedError
from controld.store.port import CompactedError, StoreError
from virialpb.errors import ErrorDetails, Violation, details_for
from virialpb.reasons import Reason


class CallError(Exception):
    """A call that is answered with an error. Raised in convert and servicers, turned into a status in one place."""

    def __init__(self, details: ErrorDetails) -> None:
        super().__init__(details.message)
        self.details = details


def invalid(*violations: FieldViolation) -> CallError:
    """INVALID_SPEC naming each wrong field of the request."""
    return CallError(details_for(Reason.INVALID_SPEC, violations=_violations(violations)))


def invalid_field(field: str, description: str) -> CallError:
    return invalid(FieldViolation(field, description))


def not_found(subject: str, detail: str = "", todo: str = "") -> CallError:
    return CallError(details_for(Reason.NOT_FOUND, subject=subject, detail=detail, todo=todo))


def refused(refusal: Refused) -> ErrorDetails:
    """The words for what a transition refused."""
    return details_for(
        refusal.reason,
        subject=refusal.subject,
        detail=refusal.detail,
        violations=_violations(refusal.violations),
    )


def removal_refused(refusal: Refused) -> CallError:
    """Why a node is not removed, in words."""
    why, _, what = refusal.detail.partition(" ")
    details = {
        "LIVENESS": (f"it is {what}, not lost", "stop noded there, and wait until the node is lost"),
        "LEASES": (f"{what} may still run there", "wait until their leases have ended (`virial node`)"),
        "CHECKPOINTS": (
            f"shards of checkpoints of {what} are on its disk and nowhere else",
            "bring the node back, or cancel those jobs first",
        ),
    }
    if refusal.reason is not Reason.NOT_NOW or why not in details:
        return CallError(refused(refusal))
    detail, todo = details[why]
    subject = f"removing {refusal.subject}"
    return CallError(details_for(refusal.reason, subject=subject, detail=detail, todo=todo))


def _violations(violations: Iterable[FieldViolation]) -> tuple[Violation, ...]:
    return tuple(Violation(one.field, one.description) for one in violations)


def _leader(address: str) -> dict[str, str]:
    """What clients and agents look for to find the leader."""
    return {"leader": address} if address else {}


def details_of(error: Exception) -> ErrorDetails | None:
    """What a domain exception is answered with; None for one that nobody expected."""
    match error:
        case CallError():
            return error.details
        case RefusedError():
            return refused(error.refused)
        case CompactedError():
            return details_for(error.reason, metadata={"revision": str(error.revision)})
        case NotLeaderError():
            return details_for(error.reason, detail=str(error), metadata=_leader(error.leader))
        case SessionClosedError():
            subject = "the agent's session"
            return details_for(error.reason, subject=subject, detail=error.message, metadata=_leader(error.leader))
        case SessionRefusedError():
            return details_for(error.reason, subject="the agent's session", detail=error.message)
        case MembersRefusedError():
            reason = Reason.NOT_FOUND if error.missing else Reason.NOT_NOW
            return details_for(reason, subject=error.missing, detail=str(error))
        case StoreError() | OverloadedError():
            return details_for(error.reason, detail=str(error))
        case PlannerLostError():
            return details_for(Reason.OVERLOADED, detail="the planner is being restarted")
        case _:
            return None
