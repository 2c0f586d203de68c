"""What our API promises of one hold and of one job, as if a single client used it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

OK: Final = "OK"
NOT_FOUND: Final = "NOT_FOUND"
ALREADY_EXISTS: Final = "ALREADY_EXISTS"
PENDING: Final = "PENDING"
CANCELLED: Final = "CANCELLED"
NEVER_SEEN: Final = "*"


@dataclass(frozen=True, slots=True)
class Place:
    """`reason` is like no other's, so that a read tells whose hold it saw."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    key: str


@dataclass(frozen=True, slots=True)
class ReadHold:
    key: str


HoldCall = Place | Release | ReadHold


class Holds:
    """One owner's hold on one node: its reason, None while there is none."""

    def initial(self) -> str | None:
        return None

    def apply(self, state: str | None, call: HoldCall) -> tuple[str | None, Hashable]:
        match call:
            case Place():
                return call.reason, OK
            case Release():
                return None, NOT_FOUND if state is None else OK
            case ReadHold():
                return state, state

    def pure(self, call: HoldCall, reply: Hashable) -> bool:
        return isinstance(call, ReadHold) or reply == NOT_FOUND

    def effects(self, call: HoldCall) -> bool:
        return not isinstance(call, ReadHold)

    def blur(self, call: HoldCall, replies: frozenset[Hashable]) -> HoldCall:
        return Place(call.key, NEVER_SEEN) if isinstance(call, Place) and call.reason not in replies else call


@dataclass(frozen=True, slots=True)
class Submit:
    """Under an id that others want too; `author` is like no other's."""

    key: str
    author: str


@dataclass(frozen=True, slots=True)
class Cancel:
    key: str


@dataclass(frozen=True, slots=True)
class ReadJob:
    key: str


JobCall = Submit | Cancel | ReadJob
JobSeen = tuple[str, str]
"""(author, state)"""


class Jobs:
    """One job that no node can take: whose it is, and whether it was cancelled; None before it is submitted."""

    def initial(self) -> JobSeen | None:
        return None

    def apply(self, state: JobSeen | None, call: JobCall) -> tuple[JobSeen | None, Hashable]:
        match call:
            case Submit():
                return ((call.author, PENDING), OK) if state is None else (state, ALREADY_EXISTS)
            case Cancel():
                return (None, NOT_FOUND) if state is None else ((state[0], CANCELLED), OK)
            case ReadJob():
                return state, state

    def pure(self, call: JobCall, reply: Hashable) -> bool:
        return isinstance(call, ReadJob) or reply in (NOT_FOUND, ALREADY_EXISTS)

    def effects(self, call: JobCall) -> bool:
        return not isinstance(call, ReadJob)

    def blur(self, call: JobCall, replies: frozenset[Hashable]) -> JobCall:
        if isinstance(call, Submit) and not {(call.author, PENDING), (call.author, CANCELLED)} & replies:
            return Submit(call.key, NEVER_SEEN)
        return call
