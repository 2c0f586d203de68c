"""Commands: every way the state can be asked to change. Data only; `controld.core.transitions` decides.

Commands from outside carry a `request_id`; those of the leader's own loops carry guards (incarnation,
generation, epoch) instead, so that a stale one is refused by what it saw.
"""

from __future__ import annotations

from dataclasses import dataclass

from controld.core.ids import CheckpointId, Epoch, Incarnation, JobId, NodeUid, SlotId
from controld.core.model import Hold, Inventory, Member, TaskError, TaskExit
from controld.core.spec import JobSpec
from virialpb.reasons import StopReason


@dataclass(frozen=True, slots=True)
class Now:
    """The time of a decision. `boottime_ns` times leases; `unix_ns` is for display and for windows of hours."""

    boottime_ns: int
    unix_ns: int


@dataclass(frozen=True, slots=True)
class SubmitJob:
    request_id: str
    spec: JobSpec
    job_id: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class CancelJob:
    """`only_of`: refused for a job of another owner than this one; None: whoever owns it."""

    request_id: str
    job: JobId
    only_of: str | None = None


@dataclass(frozen=True, slots=True)
class PlaceHold:
    """`expire_after_ns` 0: as the hold says. A span, not a time: a retry must read as the same request."""

    request_id: str
    node: NodeUid
    hold: Hold
    expire_after_ns: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseHold:
    request_id: str
    node: NodeUid
    owner: str
    device_key: str = ""


@dataclass(frozen=True, slots=True)
class DrainNode:
    request_id: str
    node: NodeUid
    reason: str


@dataclass(frozen=True, slots=True)
class RemoveNode:
    """By name: a retry finds no node any more, and is answered all the same."""

    request_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CreateJoinToken:
    """The hash of its secret names it, so it needs no request id."""

    secret_sha256: str
    node: str
    ttl_ns: int


@dataclass(frozen=True, slots=True)
class UseJoinToken:
    """`key_sha256`: of the public key that is to be certified; the same one may ask again."""

    secret_sha256: str
    node: str
    key_sha256: str


@dataclass(frozen=True, slots=True)
class AdmitNode:
    """A hello: a new node, a new incarnation of a known one, or the same one again (then nothing changes).

    `gone_slots`: slots of an earlier guardian whose processes the new one saw gone. `certified`: the name was proven
    by a certificate, which is good for the one node of that name and for no other.
    """

    incarnation: Incarnation
    name: str
    advertise_address: str
    fencing: str
    cpu_millis: int
    memory_bytes: int
    labels: tuple[tuple[str, str], ...] = ()
    version: str = ""
    gone_slots: tuple[SlotId, ...] = ()
    certified: bool = False


@dataclass(frozen=True, slots=True)
class ReportInventory:
    incarnation: Incarnation
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class MarkSuspect:
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class MarkLive:
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class MarkExpired:
    """The session's own deadline passed: expires every lease it still holds."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class ExpireLeases:
    """Leases whose fence_after is shorter than the session's."""

    incarnation: Incarnation
    slots: tuple[SlotId, ...]


@dataclass(frozen=True, slots=True)
class StartGeneration:
    """What a plan grants; verified again against the head state, since the plan saw a snapshot."""

    job: JobId
    number: int
    members: tuple[Member, ...]
    checkpoint: CheckpointId | None = None
    cause_id: str = ""


@dataclass(frozen=True, slots=True)
class CommitGo:
    job: JobId
    generation: int
    master_address: str
    master_port: int


@dataclass(frozen=True, slots=True)
class MarkActive:
    """Every rank runs: the leases are ACTIVE and the job RUNNING."""

    job: JobId
    generation: int


@dataclass(frozen=True, slots=True)
class MarkProgress:
    """Some rank went beyond the step it was restored from: this generation was not fruitless."""

    job: JobId
    generation: int


@dataclass(frozen=True, slots=True)
class StopGeneration:
    job: JobId
    generation: int
    reason: StopReason
    error: TaskError | None = None
    highest_step: int = -1


@dataclass(frozen=True, slots=True)
class ReleaseMember:
    """The agent saw the slot's processes gone (or it never started): its devices are free.

    `epoch` is the token's: a late report of another generation or of a rerun is refused (H7).
    """

    job: JobId
    generation: int
    epoch: Epoch
    slot: SlotId
    incarnation: Incarnation
    exit: TaskExit | None = None
    # The highest step the rank reported; -1: none.
    progress_step: int = -1


@dataclass(frozen=True, slots=True)
class EndGeneration:
    """Every member is released, expired or may be left behind: the job ends or waits for its next placement."""

    job: JobId
    generation: int


@dataclass(frozen=True, slots=True)
class BeginCheckpoint:
    job: JobId
    generation: int
    epoch: Epoch
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class PrepareShard:
    job: JobId
    generation: int
    epoch: Epoch
    rank: int
    node: NodeUid
    checkpoint: CheckpointId
    step: int
    size_bytes: int
    digest: str
    file: str


@dataclass(frozen=True, slots=True)
class AbortCheckpoint:
    job: JobId
    generation: int
    checkpoint: CheckpointId
    reason: str


@dataclass(frozen=True, slots=True)
class ReportBadShard:
    """An agent found a copy missing or its digest wrong while preparing rank `rank` from it."""

    job: JobId
    generation: int
    checkpoint: CheckpointId
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class CollectCheckpoints:
    """Mark these DROPPING: superseded or aborted, and read by nobody."""

    job: JobId
    checkpoints: tuple[CheckpointId, ...]


@dataclass(frozen=True, slots=True)
class ForgetCheckpoint:
    """The files are gone; so is the record."""

    job: JobId
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Prune:
    """Bound the state: old idempotency keys, events past the limit, jobs that ended long ago."""

    requests_before_unix_ns: int
    events_max: int
    ended_jobs_max: int


Command = (
    SubmitJob
    | CancelJob
    | PlaceHold
    | ReleaseHold
    | DrainNode
    | RemoveNode
    | CreateJoinToken
    | UseJoinToken
    | AdmitNode
    | ReportInventory
    | MarkSuspect
    | MarkLive
    | MarkExpired
    | ExpireLeases
    | StartGeneration
    | CommitGo
    | MarkActive
    | MarkProgress
    | StopGeneration
    | ReleaseMember
    | EndGeneration
    | BeginCheckpoint
    | PrepareShard
    | AbortCheckpoint
    | ReportBadShard
    | CollectCheckpoints
    | ForgetCheckpoint
    | Prune
)
