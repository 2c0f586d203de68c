"""Idempotency: a request id is answered once, ever. Its record is written in the same commit as the change."""

from __future__ import annotations

import hashlib
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import cast

from controld.core.commands import CancelJob, DrainNode, Now, PlaceHold, ReleaseHold, RemoveNode, SubmitJob
from controld.core.draft import Draft
from controld.core.model import Request
from controld.core.outcome import FieldViolation, Refused, Reply, Transition
from controld.core.state import State
from virialpb.reasons import Reason

FromOutside = SubmitJob | CancelJob | PlaceHold | ReleaseHold | DrainNode | RemoveNode
_Shape = tuple[tuple[str, object], ...]
_PLAIN = frozenset({str, int, bool, type(None)})


def fingerprint(command: FromOutside) -> str:
    """Hex sha256 of everything but the request id: tells a retry from another call under the same key."""
    # As text of a command with an empty request id: what is stored was made so, and must stay comparable.
    told = _told(command, _shape(type(command)) or (), "request_id")
    return hashlib.sha256(f"{type(command).__name__}(request_id='',{told})".encode()).hexdigest()


def _canonical(value: object) -> str:
    """Text of a value without fields that have their default, so that a field added later changes no fingerprint."""
    if isinstance(value, tuple):
        return f"({','.join([_canonical(item) for item in cast('tuple[object, ...]', value)])})"
    kind = type(value)
    shape = _shape(kind)
    return repr(value) if shape is None else f"{kind.__name__}({_told(value, shape)})"


def _told(value: object, shape: _Shape, but: str = "") -> str:
    return ",".join(
        [
            f"{name}={content!r}" if type(content) in _PLAIN else f"{name}={_canonical(content)}"
            for name, default in shape
            if name != but and (content := getattr(value, name)) != default
        ]
    )


@cache
def _shape(kind: type) -> _Shape | None:
    """The fields of a record with their defaults, looked up once; None of anything else. Defaults are immutable."""
    if not is_dataclass(kind):
        return None
    return tuple((f.name, f.default_factory() if f.default_factory is not MISSING else f.default) for f in fields(kind))


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
