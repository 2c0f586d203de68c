"""What agents report and what they are told, as data. The wire form is in `controld.service.convert`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controld.core.ids import CheckpointId, Incarnation, JobId, NodeUid, SlotId, Token
from controld.core.model import DeviceGrant, TaskExit, Tier
from controld.core.spec import CheckpointSpec, TaskSpec
from virialpb.ids import NO_EPOCH, Epoch
from virialpb.reasons import PrepareFailure, Reason, StopReason


class SlotState(StrEnum):
    PREPARING = "PREPARING"
    READY = "READY"
    PREPARE_FAILED = "PREPARE_FAILED"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    EXITED = "EXITED"
    STUCK = "STUCK"


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """One slot as the agent sees it. EXITED means its cgroup or namespace was seen empty."""

    slot: SlotId
    token: Token
    state: SlotState
    port: int = 0
    exit: TaskExit | None = None
    progress_step: int = -1
    metrics: tuple[tuple[str, float], ...] = ()
    failure: PrepareFailure | None = None
    failure_detail: str = ""
    # Of its shard, so far; 0 before that, and from an agent that does not tell.
    prepared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A reading. `value` None is unknown: never healthy, never 0 degrees. `quality` as in the proto."""

    name: str
    value: int | None
    unit: str
    quality: str
    age_ms: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A renewal. `slots` is complete: a slot that is not in it does not exist on the node."""

    seq: int
    slots: tuple[SlotStatus, ...] = ()
    readings: tuple[Sample, ...] = ()
    guardian_ok: bool = True


@dataclass(frozen=True, slots=True)
class Hello:
    incarnation: Incarnation
    name: str
    advertise_address: str
    fencing: str
    cpu_millis: int
    memory_bytes: int
    beat: Beat
    labels: tuple[tuple[str, str], ...] = ()
    leader_epoch_seen: Epoch = NO_EPOCH
    version: str = ""
    gone_slots: tuple[SlotId, ...] = ()
    certified: bool = False
    """Whether a certificate proves the name."""


@dataclass(frozen=True, slots=True)
class CheckpointBeginCall:
    step: int


@dataclass(frozen=True, slots=True)
class CheckpointPreparedCall:
    checkpoint: CheckpointId
    step: int
    size_bytes: int
    digest: str
    file: str


@dataclass(frozen=True, slots=True)
class CheckpointWaitCall:
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class CheckpointFailedCall:
    checkpoint: CheckpointId
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A call from inside a task, passed on by its agent. Answered by a TaskReply with the same id."""

    call_id: int
    slot: SlotId
    token: Token
    call: CheckpointBeginCall | CheckpointPreparedCall | CheckpointWaitCall | CheckpointFailedCall


@dataclass(frozen=True, slots=True)
class DropDone:
    job: JobId
    checkpoint: CheckpointId


Report = Hello | Beat | TaskCall | DropDone


@dataclass(frozen=True, slots=True)
class Welcome:
    renew_interval_ms: int
    cluster_uid: str


@dataclass(frozen=True, slots=True)
class BeatAck:
    seq: int


@dataclass(frozen=True, slots=True)
class Restore:
    """The shard a rank starts from. `directory` is relative to the node's own for the local tier."""

    checkpoint: CheckpointId
    step: int
    directory: str
    tier: Tier
    file: str
    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Prepare:
    slot: SlotId
    token: Token
    rank: int | None
    world_size: int
    cpu_millis: int
    memory_bytes: int
    devices: tuple[DeviceGrant, ...]
    task: TaskSpec
    checkpoint: CheckpointSpec
    fence_after_ms: int
    hold_port: bool
    restore: Restore | None = None
    cause_id: str = ""


@dataclass(frozen=True, slots=True)
class Go:
    slot: SlotId
    token: Token
    world_size: int
    master_address: str
    master_port: int
    restart_count: int


@dataclass(frozen=True, slots=True)
class Stop:
    slot: SlotId
    token: Token
    grace_ms: int
    reason: StopReason


@dataclass(frozen=True, slots=True)
class Release:
    slot: SlotId
    token: Token


@dataclass(frozen=True, slots=True)
class TaskReply:
    call_id: int
    slot: SlotId
    error: Reason | None = None
    error_message: str = ""
    checkpoint: str = ""
    directory: str = ""
    tier: str = ""
    state: str = ""


@dataclass(frozen=True, slots=True)
class SaveNow:
    slot: SlotId
    token: Token
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class DropCheckpoint:
    job: JobId
    checkpoint: CheckpointId
    directory: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class SessionRefused:
    """`leader`: HOST:PORT of the controller that leads, where it is another one and known."""

    reason: Reason
    message: str
    leader: str = ""


Order = Welcome | BeatAck | Prepare | Go | Stop | Release | TaskReply | SaveNow | DropCheckpoint | SessionRefused


@dataclass(frozen=True, slots=True)
class OrderTo:
    """An order and the node it goes to. Orders are level-triggered: a lost one is given again by a later tick."""

    node: NodeUid
    order: Order
