"""What a transition answers."""

from __future__ import annotations

from dataclasses import dataclass

from controld.core.model import Event
from controld.core.state import Change
from virialpb.reasons import Reason


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field path as in the request ("gang.ranks"), and what is wrong, as words for the user."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing changes. `subject` is the resource it is about; `detail` holds facts as text, no sentence."""

    reason: Reason
    subject: str = ""
    detail: str = ""
    violations: tuple[FieldViolation, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What a command that was carried out answers: the id it made or touched, and a state where one matters."""

    subject: str = ""
    state: str = ""
    directory: str = ""
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Transition:
    """What to commit and what to answer once it is. No changes and no events: nothing needs a commit."""

    changes: tuple[Change, ...] = ()
    events: tuple[Event, ...] = ()
    reply: Reply = Reply()


Outcome = Refused | Transition
