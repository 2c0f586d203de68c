"""What can go wrong in a store, as data: the simulation and tests inject it into `MemoryStore`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Operation(StrEnum):
    LOAD = "LOAD"
    CAMPAIGN = "CAMPAIGN"
    COMMIT = "COMMIT"
    BARRIER = "BARRIER"


class FaultKind(StrEnum):
    NONE = "NONE"
    LOST_BEFORE = "LOST_BEFORE"
    """The request never arrived: OutcomeUnknownError, nothing applied."""
    LOST_AFTER = "LOST_AFTER"
    """The answer never arrived: OutcomeUnknownError, applied."""
    LATE = "LATE"
    """OutcomeUnknownError now; the request is still under way and arrives `late_s` later, guards and all."""
    STORAGE_FULL = "STORAGE_FULL"
    """StorageFullError, nothing applied. A barrier needs no space and passes."""
    DEPOSED = "DEPOSED"
    """Another controller campaigns just before: DeposedError, for good. A load is not affected."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`before_s` passes before the request arrives, `after_s` between its effect and the answer."""

    kind: FaultKind = FaultKind.NONE
    before_s: float = 0.0
    after_s: float = 0.0
    late_s: float = 0.0


class Faults(Protocol):
    def next(self, operation: Operation) -> Fault:
        """Asked once for every operation, in the order in which they are called."""
        ...


class NoFaults:
    def next(self, operation: Operation) -> Fault:
        return Fault()
