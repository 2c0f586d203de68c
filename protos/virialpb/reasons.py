"""Reasons: why something was refused, why a job waits, why a task ended.

Decisions carry these and numbers; words are made at the edge (`virialpb.errors`, `virial.cli`).
Standard library only; pure rooms may import this module. Values are stored and sent: only ever add.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a request failed. One row of the table in `virialpb.errors` each."""

    INVALID_SPEC = "INVALID_SPEC"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    STALE = "STALE"
    FENCED = "FENCED"
    NOT_LEADER = "NOT_LEADER"
    NO_LEADER = "NO_LEADER"
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
    COMPACTED = "COMPACTED"
    QUOTA = "QUOTA"
    OVERLOADED = "OVERLOADED"
    STORAGE_FULL = "STORAGE_FULL"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    NODE_UNREACHABLE = "NODE_UNREACHABLE"
    DUPLICATE_NODE = "DUPLICATE_NODE"
    NOT_NOW = "NOT_NOW"
    INVARIANT_BROKEN = "INVARIANT_BROKEN"


class Unfit(StrEnum):
    """Why a node (or the whole cluster) cannot take a rank; counted for each pending job."""

    NOT_LIVE = "NOT_LIVE"
    NOT_REPORTED = "NOT_REPORTED"
    HELD = "HELD"
    CPU = "CPU"
    MEMORY = "MEMORY"
    DEVICES = "DEVICES"
    SLOTS = "SLOTS"
    CONSTRAINT = "CONSTRAINT"
    FENCING_WEAK = "FENCING_WEAK"
    EXCLUDED = "EXCLUDED"
    TOO_FEW_NODES = "TOO_FEW_NODES"
    WAITS_FOR_EXPIRY = "WAITS_FOR_EXPIRY"
    WAITS_FOR_RELEASE = "WAITS_FOR_RELEASE"
    WAITS_FOR_PLANNER = "WAITS_FOR_PLANNER"
    BACK_OFF = "BACK_OFF"
    NO_RESTORABLE_CHECKPOINT = "NO_RESTORABLE_CHECKPOINT"
    SPARE_MISSING = "SPARE_MISSING"


class ExitReason(StrEnum):
    """Why a task is not running any more."""

    EXITED = "EXITED"
    SIGNALED = "SIGNALED"
    STOPPED = "STOPPED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    OOM = "OOM"
    START_FAILED = "START_FAILED"
    GUARDIAN_LOST = "GUARDIAN_LOST"


class StopReason(StrEnum):
    """Why a generation was ended, or a slot was told to stop."""

    RANK_FAILED = "RANK_FAILED"
    NODE_LOST = "NODE_LOST"
    NODE_SUSPECT = "NODE_SUSPECT"
    PREPARE_FAILED = "PREPARE_FAILED"
    PREPARE_DEADLINE = "PREPARE_DEADLINE"
    START_DEADLINE = "START_DEADLINE"
    GO_DEADLINE = "GO_DEADLINE"
    NO_PROGRESS = "NO_PROGRESS"
    DRAIN = "DRAIN"
    CANCELLED = "CANCELLED"
    FINISHED = "FINISHED"
    SUPERSEDED = "SUPERSEDED"
    HISTORY_CHANGED = "HISTORY_CHANGED"


class PrepareFailure(StrEnum):
    """Why an agent could not get a rank ready."""

    DEVICE_BUSY = "DEVICE_BUSY"
    USER_REQUIRED = "USER_REQUIRED"
    USER_UNKNOWN = "USER_UNKNOWN"
    DEADLINE_PASSED = "DEADLINE_PASSED"
    STALE_GENERATION = "STALE_GENERATION"
    COMMAND_NOT_FOUND = "COMMAND_NOT_FOUND"
    WORKING_DIRECTORY_MISSING = "WORKING_DIRECTORY_MISSING"
    INVENTORY_MISSING = "INVENTORY_MISSING"
    SHARD_MISSING = "SHARD_MISSING"
    SHARD_CORRUPT = "SHARD_CORRUPT"
    CHECKPOINT_DIRECTORY = "CHECKPOINT_DIRECTORY"
    KIND_UNSUPPORTED = "KIND_UNSUPPORTED"
    GUARDIAN_LOST = "GUARDIAN_LOST"
