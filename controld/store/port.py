"""The store port: durable, ordered, guarded commits of bytes under keys.

Rules every implementation keeps (the conformance suite runs on all of them):

- `commit` is one atomic transaction. Both guards are checked in it: the leadership token is still the one
  that campaigned, and the head is `seq - 1` of this leadership. It writes the head as `seq`.
- After `OutcomeUnknownError` the SAME `seq` and changes may be given again: they are applied once.
- `barrier` returns only when this leadership was still in force at a moment after the call began.
- `watch` gives commits in order and without gaps, or raises `CompactedError`: also for a position the store has not
  reached, which only a client from before a restore can have. A change that changes nothing (deleting a key that is
  not there) is not seen, and a commit of only such changes is not either.
- A value's `create_revision` is the revision that made the key anew after a deletion or at first.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from virialpb.ids import Epoch
from virialpb.reasons import Reason

EVIDENCE_SECONDS: Final = 3.0
"""A leader of a shared store that completes no barrier for so long is shown as not alive (design: store, rule 7)."""


@dataclass(frozen=True, slots=True)
class StoredChange:
    """Put `value` under `key`, or delete the key when it is None. A key stands once in a commit."""

    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class StoredRecord:
    key: str
    value: bytes
    create_revision: int
    modify_revision: int


@dataclass(frozen=True, slots=True)
class Commit:
    revision: int
    changes: tuple[StoredChange, ...]


@dataclass(frozen=True, slots=True)
class Leadership:
    """`token` is what writes are guarded by; `epoch` goes out in every message to an agent."""

    identity: str
    token: int
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Incumbent:
    """Who leads a shared store. `address`: HOST:PORT where its peers, agents and clients reach it.

    `alive` is the store's own evidence: False when the leader has completed no barrier for EVIDENCE_SECONDS.
    """

    leadership: Leadership
    address: str
    alive: bool = True


@dataclass(frozen=True, slots=True)
class LeaderSeen:
    """As of `revision` this one leads, or is alive or not by the store's evidence; None: nobody leads."""

    revision: int
    incumbent: Incumbent | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """`incumbent` is who led at `revision`; None where nobody did, or where the store is not shared."""

    history: int
    revision: int
    records: tuple[StoredRecord, ...]
    incumbent: Incumbent | None = None


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """`commit_*_max`: what one commit may hold, None where nothing but space bounds it. `problems`: in words."""

    kind: str
    history: int
    revision: int
    compacted_revision: int
    size_bytes: int
    commit_operations_max: int | None = None
    commit_bytes_max: int | None = None
    problems: tuple[str, ...] = ()


class StoreError(Exception):
    """Base. `reason` is what the caller is told."""

    reason: Reason = Reason.INVARIANT_BROKEN


class DeposedError(StoreError):
    """Another leadership holds the store: nothing was written, and nothing ever will be by this one."""

    reason = Reason.NOT_LEADER


class OutcomeUnknownError(StoreError):
    """The commit may or may not have happened: give the same one again, or drop the head state and reload."""

    reason = Reason.OUTCOME_UNKNOWN


class MemberLostError(OutcomeUnknownError):
    """Nobody listens where the store's own end beside this controller should be: another has to lead."""


class StorageFullError(StoreError):
    """Nothing was written: no space."""

    reason = Reason.STORAGE_FULL


class CommitTooLargeError(StorageFullError):
    """Nothing was written: more than one transaction of this store may hold (`StoreStatus.commit_*_max`)."""


class StoreUnavailableError(StoreError):
    """The store does not answer, or has no majority; nothing was asked of it that could have had an effect."""

    reason = Reason.NO_LEADER


class CompactedError(StoreError):
    """The watch asked for revisions that are gone; `revision` is the oldest that remains."""

    reason = Reason.COMPACTED

    def __init__(self, revision: int) -> None:
        super().__init__(f"compacted up to revision {revision}")
        self.revision = revision


class StoreLockedError(StoreError):
    """Another process has this data directory open."""

    reason = Reason.ALREADY_EXISTS


class StoreCorruptError(StoreError):
    """The stored bytes are damaged; the message names the file and what to do. Nothing was changed."""

    reason = Reason.INVARIANT_BROKEN


class StoreRestoringError(StoreCorruptError):
    """A restore is under way or was cut short: run to its end, it makes the store whole."""


class StoreClosedError(StoreError):
    """The handle was closed, by its owner; whoever still waits on it is told."""

    reason = Reason.NOT_LEADER


class SequenceError(StoreError):
    """A mistake of the caller: a commit out of turn, another one under a number already used, a key twice in one."""


class RecordError(StoreError):
    """One record cannot be written as it is, or its stored bytes cannot be read; the message names its key."""


class Store(Protocol):
    async def open(self) -> None:
        """Raises StoreLockedError, StoreCorruptError, OSError."""
        ...

    async def close(self) -> None: ...

    async def load(self) -> Loaded: ...

    async def campaign(self, identity: str) -> Leadership:
        """Become leader (deposing an earlier leadership of this store) and learn the epoch."""
        ...

    async def commit(self, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
        """Returns the revision. `seq` counts 1, 2, 3... within a leadership.

        Raises DeposedError, OutcomeUnknownError, StorageFullError.
        """
        ...

    async def barrier(self, leadership: Leadership) -> None:
        """Raises DeposedError, OutcomeUnknownError, MemberLostError."""
        ...

    def watch(self, after_revision: int) -> AsyncIterator[Commit]:
        """Commits with a greater revision, for ever. Raises CompactedError."""
        ...

    async def compact(self, revision: int) -> None: ...

    async def status(self) -> StoreStatus: ...

    async def backup(self, path: str) -> None: ...

    async def restore(self, path: str) -> None:
        """Replace everything by a backup and raise the history counter. Only on a closed-for-writing store."""
        ...


class SharedStore(Store, Protocol):
    """A store that several controllers share, each through a handle of its own.

    - `take_over` campaigns only while the leadership seen last is in force, so of several at once one wins.
    - `follow` gives commits and changes of leadership in ONE order, by revision: whoever has seen its own takeover
      there has seen every commit of every leader before it.
    - A completed `barrier` is also the evidence that the leader is alive; one that completes later makes it so again.
    """

    async def take_over(self, identity: str, address: str, token: int) -> Leadership:
        """Become leader in place of the leadership of `token`; 0: while nobody leads.

        Raises DeposedError where another leadership is in force by now: nothing was changed. OutcomeUnknownError:
        `follow` will tell.
        """
        ...

    def follow(self, after_revision: int) -> AsyncGenerator[Commit | LeaderSeen]:
        """As `watch`, with every change of leadership after the revision; to be closed. Raises CompactedError, or
        another StoreError when the store cannot be reached any more: go on after the last revision seen.
        """
        ...

    async def resign(self, leadership: Leadership) -> None:
        """Lead no more: nothing of this leadership is committed from now on, and whoever follows is told.

        Raises DeposedError where another leads already.
        """
        ...
