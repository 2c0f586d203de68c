"""What is said to a controller and heard from it, as data. The wire form is in `noded.link.convert`.

The agent's own view of `virialpb/v1/node.proto`; times are durations or CLOCK_BOOTTIME, never wall clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from virialpb.ids import NO_EPOCH, CheckpointId, Epoch, Incarnation, JobId, SlotId, Token
from virialpb.reasons import ExitReason, PrepareFailure, Reason, StopReason

AttributeValue = str | int | bool
WHOLE_THOUSANDTHS: Final = 1000


class SlotState(StrEnum):
    PREPARING = "PREPARING"
    READY = "READY"
    PREPARE_FAILED = "PREPARE_FAILED"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    EXITED = "EXITED"
    """Ended, and its cgroup or namespace was seen empty."""
    STUCK = "STUCK"


class Tier(StrEnum):
    LOCAL = "local"
    SHARED = "shared"


# -- inventory -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Device:
    """A thing in this node that can be allotted. `key` is stable within the node, never an index."""

    key: str
    kind: str
    name: str = ""
    vendor_id: str = ""
    attributes: tuple[tuple[str, AttributeValue], ...] = ()
    capacity: tuple[tuple[str, int], ...] = ()
    interconnect_protocol: str = ""
    interconnect_max_latency_ns: int = 0
    interconnect_bandwidth_bytes_per_second: int = 0

    def attribute(self, name: str) -> AttributeValue | None:
        return next((value for key, value in self.attributes if key == name), None)


@dataclass(frozen=True, slots=True)
class Link:
    """A connection with two ends. A current value of None is unknown, never 0."""

    key: str
    kind: str
    end_a: str
    end_b: str
    rail: str = ""
    expected_bytes_per_second: int = 0
    current_bytes_per_second: int | None = None
    expected_width_lanes: int = 0
    current_width_lanes: int | None = None
    state: str = "unknown"


@dataclass(frozen=True, slots=True)
class Domain:
    kind: str
    name: str
    parent: str = ""


@dataclass(frozen=True, slots=True)
class Inventory:
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    domains: tuple[Domain, ...] = ()
    attributes: tuple[tuple[str, AttributeValue], ...] = ()


# -- said to the controller ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskExit:
    reason: ExitReason
    code: int = 0
    signal: int = 0
    stderr_tail: str = ""


@dataclass(frozen=True, slots=True)
class SlotStatus:
    slot: SlotId
    token: Token
    state: SlotState
    port: int = 0
    exit: TaskExit | None = None
    progress_step: int = -1
    metrics: tuple[tuple[str, float], ...] = ()
    failure: PrepareFailure | None = None
    failure_detail: str = ""
    progress_age_ms: int = 0
    prepared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A reading. `value` None is unknown. `quality` as in the proto."""

    name: str
    value: int | None
    unit: str
    quality: str
    age_ms: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A renewal. `slots` is complete: a slot that is not in it does not exist on this node."""

    seq: int
    slots: tuple[SlotStatus, ...] = ()
    readings: tuple[Sample, ...] = ()
    guardian_ok: bool = True


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What an agent says of its node that does not change while it runs."""

    name: str
    advertise_address: str
    cpu_millis: int
    memory_bytes: int
    labels: tuple[tuple[str, str], ...] = ()
    version: str = ""


@dataclass(frozen=True, slots=True)
class Hello:
    incarnation: Incarnation
    facts: NodeFacts
    fencing: str
    beat: Beat
    leader_epoch_seen: Epoch = NO_EPOCH
    gone_slots: tuple[SlotId, ...] = ()


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


CallBody = CheckpointBeginCall | CheckpointPreparedCall | CheckpointWaitCall | CheckpointFailedCall


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A call from inside a task. Sent again with the same id until a TaskReply answers it."""

    call_id: int
    slot: SlotId
    token: Token
    call: CallBody


@dataclass(frozen=True, slots=True)
class DropDone:
    job: JobId
    checkpoint: CheckpointId


Report = Hello | Beat | TaskCall | DropDone


# -- heard from the controller -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    renew_interval_ms: int
    cluster_uid: str


@dataclass(frozen=True, slots=True)
class BeatAck:
    """Every beat up to this one counts as renewed, from its own send time."""

    seq: int


@dataclass(frozen=True, slots=True)
class DeviceGrant:
    device_key: str
    share_thousandths: int = WHOLE_THOUSANDTHS


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """`user` empty: the agent's own, where that is allowed. No shell: `command` is an argument list."""

    command: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    working_directory: str = ""
    user: str = ""
    group: str = ""
    grace_ms: int = 5_000
    log_bytes_max: int = 16 << 20
    log_files_max: int = 4
    runtime: str = "process"


@dataclass(frozen=True, slots=True)
class Restore:
    """The shard this rank starts from. `directory` empty: this node's own local tier."""

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
    task: TaskSpec
    fence_after_ms: int
    cpu_millis: int = 0
    memory_bytes: int = 0
    devices: tuple[DeviceGrant, ...] = ()
    hold_port: bool = False
    restore: Restore | None = None
    cause_id: str = ""


@dataclass(frozen=True, slots=True)
class Go:
    slot: SlotId
    token: Token
    world_size: int
    master_address: str
    master_port: int
    restart_count: int = 0


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
    """`step` -1: at the next step."""

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
class CheckpointOutcome:
    slot: SlotId
    token: Token
    checkpoint: CheckpointId
    state: str


@dataclass(frozen=True, slots=True)
class SessionRefused:
    """`leader`: HOST:PORT of the controller that leads, where it is another one and known."""

    reason: Reason
    message: str
    leader: str = ""


SlotOrder = Prepare | Go | Stop | Release | SaveNow | CheckpointOutcome
Order = Welcome | BeatAck | SlotOrder | TaskReply | DropCheckpoint | SessionRefused


# -- remembered ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What a restarted agent must know of a slot that its guardian kept: the rest of its Prepare, without the task.

    Only ever used for a slot that the guardian has under the same token: nothing is run from local state.
    """

    slot: SlotId
    token: Token
    rank: int | None
    fence_after_ms: int
    cpu_millis: int = 0
    devices: tuple[DeviceGrant, ...] = ()
    user: str = ""
    group: str = ""
    restore: Restore | None = None
    cause_id: str = ""
    user_env: tuple[str, ...] = field(default=())
    """Names that the user set; the environment of a rank leaves them alone."""

    @property
    def device_keys(self) -> tuple[str, ...]:
        return tuple(grant.device_key for grant in self.devices)

    @property
    def whole_devices(self) -> tuple[str, ...]:
        """Those that nobody else may hold a part of."""
        return tuple(grant.device_key for grant in self.devices if grant.share_thousandths >= WHOLE_THOUSANDTHS)
