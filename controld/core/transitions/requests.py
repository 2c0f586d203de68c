"""Idempotency: a request id is answered once, ever. Its record is written in the same commit as the change."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from controld.core.commands import CancelJob, DrainNode, Now, PlaceHold, ReleaseHold, SubmitJob
from controld.core.draft import Draft
from controld.core.model import Request
from controld.core.outcome import FieldViolation, Refused, Reply, Transition
from controld.core.state import State
from virialpb.reasons import Reason

FromOutside = SubmitJob | CancelJob | PlaceHold | ReleaseHold | DrainNode


def fingerprint(command: FromOutside) -> str:
    """Hex sha256 of everything but the request id: tells a retry from another call under the same key."""
    return hashlib.sha256(repr(replace(command, request_id="")).encode()).hexdigest()


def replay(state: State, command: FromOutside) -> Transition | Refused | None:
    """The first answer when this request id was seen; None when it is new."""
    seen = state.requests.get(command.request_id)
    if seen is None:
        return None
    if seen.fingerprint != fingerprint(command):
        return Refused(
            Reason.INVALID_SPEC,
            command.request_id,
            violations=(FieldViolation("request_id", "was used for a different request; use a new one"),),
        )
    return Transition(reply=Reply(seen.subject))


def remember(draft: Draft, command: FromOutside, subject: str, now: Now) -> None:
    draft.put(Request(command.request_id, fingerprint(command), subject, now.unix_ns))
