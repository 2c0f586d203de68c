"""When a member that ended is started again, and when it must not be. Pure: times come in, a decision goes out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# Up so long, it counts as having started well.
SETTLED_SECONDS: Final = 30.0
DELAY_SECONDS: Final = 0.2
DELAY_MAX_SECONDS: Final = 30.0
# So many ends in a row, none of them after settling: it will not come up by trying again.
FAST_ENDS_MAX: Final = 10

# What etcd and bbolt say of bytes that are not as they were written. Exact: a quarantined member waits for a human.
_DAMAGE = re.compile(
    r"crc mismatch|page \d+ already freed|(invalid|unexpected) page type|invalid freelist page|checksum error"
    r"|freepages: failed to get all reachable pages|failed to recover v3 backend from snapshot|invalid database"
    r"|etcdserver: corrupt cluster|found data inconsistency"
)
# What etcd says of a member that the others do not take (any more): once wiped, or removed.
_BOOTSTRAPPED = re.compile(r"has already been bootstrapped")
_REMOVED = re.compile(r"permanently removed|member not found|the member has been removed")
_FULL = re.compile(r"no space left on device")


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after so long."""

    delay_seconds: float


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Leave its data alone and do not start it: `why` is etcd's own line."""

    why: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It ends at once each time, without a sign of damage: a setting, a port, a binary."""

    why: str


@dataclass(frozen=True, slots=True)
class Outcast:
    """The others do not take it: it has lost its data (`wiped`), or was removed. Started again it would be refused
    again; an operator replaces it."""

    wiped: bool


@dataclass(frozen=True, slots=True)
class Started:
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """`status` as of waitpid: negative is a signal. `said`: its last words. It is started again after the delay."""

    status: int
    delay_seconds: float
    said: str


@dataclass(frozen=True, slots=True)
class Damaged:
    why: str


MemberEvent = Started | Ended | Damaged
Decision = Restart | Quarantine | GiveUp | Outcast


def assess(*, fast_ends: int, up_seconds: float, tail: str) -> tuple[Decision, int]:
    """What to do about a member that ended by itself, and the new count of fast ends.

    `tail`: the end of what it wrote. A full disk is no damage: what etcd could not write it has not acknowledged, and
    it is started again for when there is room.
    """
    fast_ends = 0 if up_seconds >= SETTLED_SECONDS else fast_ends + 1
    lines = [line for line in tail.splitlines() if line.strip()]
    if not _FULL.search(tail):
        damage = next((line for line in reversed(lines) if _DAMAGE.search(line)), None)
        if damage is not None:
            return Quarantine(damage[:500]), fast_ends
        if _REMOVED.search(tail) or _BOOTSTRAPPED.search(tail):
            return Outcast(wiped=not _REMOVED.search(tail)), fast_ends
        if fast_ends >= FAST_ENDS_MAX:
            return GiveUp(lines[-1][:500] if lines else "it said nothing"), fast_ends
    return Restart(min(DELAY_MAX_SECONDS, DELAY_SECONDS * 2 ** max(0, fast_ends - 1))), fast_ends
