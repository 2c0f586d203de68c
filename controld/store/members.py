"""The members of a replicated store, seen and judged: what is known of each, what is wrong, what is to be done.

Pure but for the port at the end: pictures come in, findings and steps go out as data; words are made at the edge.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

# Behind by more entries than an etcd under full load sends in some tens of milliseconds: a member lags.
LAG_ENTRIES_MAX: Final = 2_000
# A file of which less is in use is worth writing anew; its member answers nothing meanwhile.
WORTHWHILE: Final = 0.9
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Listed:
    """One member as the membership has it. `name` is empty until it has started."""

    id: int
    name: str
    peer_url: str
    learner: bool = False

    @property
    def label(self) -> str:
        return self.name or self.peer_url


@dataclass(frozen=True, slots=True)
class Look:
    """What a member says of itself. `leader_id` 0: it knows none. `full_ids`, `corrupt_ids`: alarms it knows of.
    `defragmenting`: its controller has it write its file anew just now, for this leader or for one before it."""

    id: int
    version: str
    leader_id: int
    applied_index: int
    size_bytes: int
    used_bytes: int
    full_ids: tuple[int, ...] = ()
    corrupt_ids: tuple[int, ...] = ()
    defragmenting: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """A member, and what was heard of it: `look` is None where no controller could ask it, `controller` is empty where
    none says that it stands beside it. `lag_entries`: applied by others, and not by it, before it was asked."""

    listed: Listed
    look: Look | None = None
    controller: str = ""
    lag_entries: int = 0

    @property
    def in_step(self) -> bool:
        return self.look is not None and bool(self.look.leader_id) and self.lag_entries <= LAG_ENTRIES_MAX


class Ailment(StrEnum):
    NO_MAJORITY = "NO_MAJORITY"
    SILENT = "SILENT"
    NOT_STARTED = "NOT_STARTED"
    BLIND = "BLIND"
    LAGS = "LAGS"
    LEARNS = "LEARNS"
    EVEN = "EVEN"
    SPACE_ALARM = "SPACE_ALARM"
    SPACE_SHORT = "SPACE_SHORT"
    CORRUPT = "CORRUPT"
    OLD_VERSION = "OLD_VERSION"
    MIXED_VERSIONS = "MIXED_VERSIONS"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong. `members`: labels of those it is about; `numbers` belong to the ailment."""

    ailment: Ailment
    members: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    details: tuple[str, ...] = ()


def assess(members: Sequence[Seen], limit_bytes: int) -> tuple[Finding, ...]:
    """What is wrong with the members, the worst first. `limit_bytes`: of pages in use, as the store has it."""
    found: list[Finding] = []
    voters = [m for m in members if not m.listed.learner]
    needed = len(voters) // 2 + 1
    answering = [m for m in voters if m.look is not None]
    sighted = [m for m in answering if m.look is not None and m.look.leader_id]
    if voters and not sighted:
        found.append(Finding(Ailment.NO_MAJORITY, _labels(answering), (len(answering), len(voters), needed)))
    corrupt = {i for m in members if m.look is not None for i in m.look.corrupt_ids}
    if corrupt:
        found.append(Finding(Ailment.CORRUPT, _labels(m for m in members if m.listed.id in corrupt)))
    full = {i for m in members if m.look is not None for i in m.look.full_ids}
    blocking = [m for m in members if not m.in_step]
    if full:
        alarmed = _labels(m for m in members if m.listed.id in full)
        found.append(Finding(Ailment.SPACE_ALARM, alarmed, details=_labels(blocking)))
    elif used := [m for m in answering if m.look is not None and m.look.used_bytes > limit_bytes * WORTHWHILE]:
        most = max(m.look.used_bytes for m in used if m.look is not None)
        found.append(Finding(Ailment.SPACE_SHORT, _labels(used), (most, limit_bytes)))
    _add(found, Ailment.SILENT, [m for m in voters if m.look is None and m.listed.name])
    _add(found, Ailment.NOT_STARTED, [m for m in members if m.look is None and not m.listed.name])
    if sighted:
        _add(found, Ailment.BLIND, [m for m in answering if m.look is not None and not m.look.leader_id])
    for member in members:
        if member.look is not None and member.lag_entries > LAG_ENTRIES_MAX:
            found.append(Finding(Ailment.LAGS, (member.listed.label,), (member.lag_entries,)))
    _add(found, Ailment.LEARNS, [m for m in members if m.listed.learner and m.listed.name])
    if voters and len(voters) % 2 == 0:
        found.append(Finding(Ailment.EVEN, _labels(voters), (len(voters), len(voters) - needed)))
    return (*found, *_versions(members))


def _versions(members: Sequence[Seen]) -> list[Finding]:
    found: list[Finding] = []
    versions = sorted({m.look.version for m in members if m.look is not None})
    for version in versions:
        if old_version(version):
            of = _labels(m for m in members if m.look is not None and m.look.version == version)
            found.append(Finding(Ailment.OLD_VERSION, of, details=(version,)))
    if len({version.rpartition(".")[0] for version in versions}) > 1:
        found.append(Finding(Ailment.MIXED_VERSIONS, details=tuple(versions)))
    return found


def old_version(version: str) -> bool:
    """Releases in which a watch goes back in time or loses events after a compaction, or a snapshot is corrupted; and
    whatever does not say what it is."""
    match = _VERSION.match(version)
    if match is None:
        return True
    number = tuple(map(int, match.groups()))
    return number < (3, 4, 38) or (3, 5, 0) <= number < (3, 5, 23)


def _labels(members: Iterable[Seen]) -> tuple[str, ...]:
    return tuple(member.listed.label for member in members)


def _add(found: list[Finding], ailment: Ailment, members: Sequence[Seen]) -> None:
    if members:
        found.append(Finding(ailment, _labels(members)))


# -- what the leader does about it, one step at a time


@dataclass(frozen=True, slots=True)
class Compact:
    """All history: somebody has no space."""


@dataclass(frozen=True, slots=True)
class Defragment:
    """This member alone; what else is to be done is seen afterwards."""

    member: Seen


@dataclass(frozen=True, slots=True)
class Disarm:
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Promote:
    """Give this learner its vote, if it has caught up."""

    id: int


Step = Compact | Defragment | Disarm | Promote


def plan(
    members: Sequence[Seen],
    *,
    limit_bytes: int,
    quota_bytes: int,
    compacted: bool = False,
    defragmented: Mapping[int, int] | None = None,
    learning: Container[int] = (),
) -> Step | None:
    """The next step of the care for the members; None: nothing is to be done, or nothing may be.

    A member that writes its file anew answers nothing meanwhile, and a snapshot that is sent to one that lags while
    another is defragmented was seen to corrupt it: so one at a time, and only while every member is in step. The
    leading member comes last, since its pause is a pause of all writes. An alarm is taken off once no file is near
    `quota_bytes`, which would set it off again. `compacted`, `defragmented` (id -> size of the file afterwards): what
    was done for this shortage already. `learning`: learners that were not in step just now; etcd itself tells, since
    a learner answers nobody who stands beside it.
    """
    learner = next((m.listed.id for m in members if m.listed.learner and m.listed.id not in learning), None)
    if learner is not None and _majority_in_step(members):
        return Promote(learner)
    looks = [m.look for m in members if m.look is not None]
    full = {i for look in looks for i in look.full_ids}
    if full and not compacted:
        return Compact()
    if any(look.defragmenting for look in looks):
        return None
    if all(m.in_step for m in members):
        bloated = [look for look in looks if _bloated(look, limit_bytes, look.id in full, defragmented or {})]
        chosen = min(bloated, key=lambda look: look.id == look.leader_id, default=None)
        if chosen is not None:
            return Defragment(next(m for m in members if m.look is chosen))
    near = {m.listed.id for m in members if m.look is None or m.look.size_bytes > quota_bytes * WORTHWHILE}
    return Disarm(tuple(sorted(full))) if full and not full & near else None


def _majority_in_step(members: Sequence[Seen]) -> bool:
    voters = [m for m in members if not m.listed.learner]
    return sum(m.in_step for m in voters) > len(voters) // 2


def _bloated(look: Look, limit_bytes: int, full: bool, defragmented: Mapping[int, int]) -> bool:
    """Under an alarm nothing is written, and pages freed by a compaction do not count as free until something is: the
    file is then written anew whatever it says, once."""
    if full:
        return defragmented.get(look.id, 0) < look.size_bytes * WORTHWHILE
    return look.size_bytes > limit_bytes and look.used_bytes < look.size_bytes * WORTHWHILE


class MembersPort(Protocol):
    """The members, through the one beside this controller. Raises StoreUnavailableError where that does not answer."""

    @property
    def limit_bytes(self) -> int:
        """Of pages in use, as the store has it."""
        ...

    @property
    def quota_bytes(self) -> int:
        """Of the file: what sets off etcd's alarm."""
        ...

    async def look(self) -> Look:
        """The member beside this controller, also without a majority."""
        ...

    async def listed(self) -> tuple[Listed, ...]:
        """As the member beside this controller has them, also without a majority."""
        ...

    async def add(self, peer_url: str) -> Listed:
        """A learner. Waits while etcd calls the members unhealthy, as it does right after a change.

        Raises MembersRefusedError.
        """
        ...

    async def remove(self, id_: int) -> None:
        """Raises MembersRefusedError. One that is gone already is no error."""
        ...

    async def promote(self, id_: int) -> bool:
        """False: it is not in step yet, or another change is too near; try again later."""
        ...

    async def compact(self) -> None: ...

    async def defragment(self) -> int:
        """The member beside this controller. The size of its file afterwards."""
        ...

    async def disarm(self, ids: Sequence[int]) -> None: ...


class MembersRefusedError(Exception):
    """What an operator asked for is not done; the message says why. `missing`: what does not exist."""

    def __init__(self, message: str, *, missing: str = "") -> None:
        super().__init__(message)
        self.missing = missing
