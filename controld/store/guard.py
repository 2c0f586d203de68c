"""The two guards of every write, decided once for the stores that decide themselves (memory and sqlite).

The leadership must still be the one that campaigned last, and the head must be `seq - 1` of it. The epoch is
compared beside the token: a restore moves revisions back, so a token alone could come up a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from controld.core.ids import NO_EPOCH, Epoch
from controld.store.port import DeposedError, Leadership, SequenceError, StoredChange

KEY_LENGTH_MAX = 512  # ids are at most 63 characters; the longest key of controld.core.keys stays far below


@dataclass(frozen=True, slots=True)
class Head:
    """Who leads and what was written last by it. `revision` is that of commit `seq` (0 before the first)."""

    token: int = 0
    epoch: Epoch = NO_EPOCH
    seq: int = 0
    revision: int = 0

    def after(self, seq: int, revision: int) -> Head:
        return replace(self, seq=seq, revision=revision)


def require_leadership(head: Head, leadership: Leadership) -> None:
    """Raises DeposedError."""
    if (leadership.token, leadership.epoch) != (head.token, head.epoch):
        raise DeposedError(f"{leadership.identity} led at epoch {leadership.epoch}; the store is now at {head.epoch}")


def already_applied(head: Head, leadership: Leadership, seq: int) -> bool:
    """Whether commit `seq` is the one applied last (a retry after an unknown outcome), rather than the next.

    Raises DeposedError, or SequenceError where it is neither.
    """
    require_leadership(head, leadership)
    if seq == head.seq and seq > 0:
        return True
    if seq != head.seq + 1:
        raise SequenceError(f"commit {seq} of epoch {head.epoch} out of turn: the last one was {head.seq}")
    return False


def another_applied(head: Head) -> SequenceError:
    return SequenceError(f"commit {head.seq} of epoch {head.epoch}: another one was applied under this number")


def require_valid(changes: Sequence[StoredChange]) -> None:
    """Raises SequenceError: a key twice, or one no store would take."""
    seen: set[str] = set()
    for change in changes:
        if change.key in seen:
            raise SequenceError(f"{change.key}: twice in one commit")
        if not 0 < len(change.key) <= KEY_LENGTH_MAX:
            raise SequenceError(f"{change.key[:80]!r}: a key has 1 to {KEY_LENGTH_MAX} characters")
        seen.add(change.key)
