"""Idempotency: a request id is answered once, ever. Its record is written in the same commit as the change."""

from __future__ import annotations

import hashlib
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import cast

from controld.core.commands import CancelJob, DrainNode, Now, PlaceHold, ReleaseHold, SubmitJob
from controld.core.draft import Draft
from controld.core.model import Request
from controld.core.outcome import FieldViolation, Refused, Reply, Transition
from controld.core.state import State
from virialpb.reasons import Reason

FromOutside = SubmitJob | CancelJob | PlaceHold | ReleaseHold | DrainNode


def fingerprint(command: FromOutside) -> str:
    """Hex sha256 of everything but the request id: tells a retry from another call under the same key."""
    return hashlib.sha256(_canonical(replace(command, request_id="")).encode()).hexdigest()


def _canonical(value: object) -> str:
    """Text of a value without fields that have their default, so that a field added later changes no fingerprint."""
    if isinstance(value, tuple):
        return f"({','.join(_canonical(item) for item in cast('tuple[object, ...]', value))})"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    told = [
        f"{f.name}={_canonical(content)}"
        for f in fields(value)
        if (content := getattr(value, f.name))
        != (f.default_factory() if f.default_factory is not MISSING else f.default)
    ]
    return f"{type(value).__name__}({','.join(told)})"


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
