"""Which leader may give orders: the highest epoch seen is kept, a lower one is refused."""

from __future__ import annotations

from enum import Enum, auto

from virialpb.ids import Epoch


class Admission(Enum):
    REFUSED = auto()
    CURRENT = auto()
    NEWER = auto()
    """A later leader of the same history."""
    NEW_HISTORY = auto()
    """The store was restored or imported: what was granted before has no standing any more."""


class LeaderEpoch:
    """Invariant: `seen` never falls, except by `adopt` when this node joins another cluster."""

    def __init__(self, seen: Epoch) -> None:
        self.seen = seen

    def admit(self, epoch: Epoch) -> Admission:
        if epoch < self.seen:
            return Admission.REFUSED
        if epoch == self.seen:
            return Admission.CURRENT
        new_history = epoch.history > self.seen.history
        self.seen = epoch
        return Admission.NEW_HISTORY if new_history else Admission.NEWER

    def adopt(self, epoch: Epoch) -> None:
        self.seen = epoch
