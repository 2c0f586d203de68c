"""What the SDK speaks in: frozen values, no protobuf. Sizes in bytes, durations in ns, CPU in thousandths of a core."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

SECOND_NS = 1_000_000_000


class JobState(StrEnum):
    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RESTARTING = "RESTARTING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def ended(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Writes(StrEnum):
    """Where a job's outputs go: `token` when all of them pass through checkpoints and results under its token."""

    SHARED = "shared"
    TOKEN = "token"  # noqa: S105 - a fencing token, no secret


class Durability(StrEnum):
    LOCAL = "local"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Constraint:
    """`operator`: EQ NE LT LE GT GE IN EXISTS; numbers in `values` are decimal integers in base units."""

    attribute: str
    operator: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    kind: str
    count: int = 1
    share_thousandths: int = 1000
    constraints: tuple[Constraint, ...] = ()


@dataclass(frozen=True, slots=True)
class Resources:
    """Of each rank."""

    cpu_millis: int
    memory_bytes: int
    devices: tuple[DeviceRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class Gang:
    """`spread` node: one rank a node; none: ranks may share one. Spares are nodes held by a lease and kept empty."""

    ranks: int = 1
    spares: int = 0
    spread: str = "node"


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """`command` is an argv, never a shell line."""

    command: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    working_directory: str = ""
    user: str = ""
    group: str = ""
    grace_ns: int = 5 * SECOND_NS
    log_bytes_max: int = 16 << 20
    log_files_max: int = 4
    runtime: str = "process"


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    durability: Durability = Durability.LOCAL
    directory: str = ""
    keep: int = 2
    timeout_ns: int = 600 * SECOND_NS


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    max: int = 3
    window_ns: int = 3600 * SECOND_NS
    allow: tuple[str, ...] = ("in_place", "spare", "requeue")


@dataclass(frozen=True, slots=True)
class JobSpec:
    name: str
    task: TaskSpec
    resources: Resources
    gang: Gang = field(default_factory=Gang)
    kind: str = ""
    fence_after_ns: int = 60 * SECOND_NS
    writes: Writes = Writes.SHARED
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    node_constraints: tuple[Constraint, ...] = ()
    priority: int = 0
    fencing: str = "any"
    start_timeout_ns: int = 0


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a list or a watch stands; a watch resumes after it."""

    history: int
    revision: int


@dataclass(frozen=True, slots=True)
class TaskExit:
    """`reason`: EXITED, SIGNALED, STOPPED, LEASE_EXPIRED, OOM, START_FAILED, GUARDIAN_LOST."""

    reason: str
    code: int
    signal: int
    stderr_tail: str


@dataclass(frozen=True, slots=True)
class DeviceGrant:
    device_key: str
    share_thousandths: int


@dataclass(frozen=True, slots=True)
class Member:
    """One slot of a generation. `rank` None is a spare; `progress_step` None: nothing reported yet."""

    slot: str
    rank: int | None
    node: str
    node_uid: str
    lease: str
    task_state: str
    progress_step: int | None
    exit: TaskExit | None
    cpu_millis: int
    memory_bytes: int
    devices: tuple[DeviceGrant, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """`epoch` is the fencing token's: (history counter, revision)."""

    number: int
    epoch: tuple[int, int]
    phase: str
    members: tuple[Member, ...]
    restored_checkpoint: str
    restored_step: int
    stop_reason: str


@dataclass(frozen=True, slots=True)
class JobError:
    """The first error of a job, kept whatever comes after it."""

    generation: int
    rank: int
    node: str
    stop_reason: str
    detail: str
    exit: TaskExit | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    id: str
    generation: int
    step: int
    state: str
    parts: int
    world_size: int
    size_bytes: int
    tier: str


@dataclass(frozen=True, slots=True)
class Job:
    """`aborted_saves`: checkpoints aborted since one was last committed; `last_abort_reason`: the last one's."""

    id: str
    spec: JobSpec
    state: JobState
    generation: int
    restarts: int
    current: Generation | None
    first_error: JobError | None
    checkpoints: tuple[Checkpoint, ...]
    create_time_unix_ns: int
    end_time_unix_ns: int
    revision: int
    progress_step: int | None
    aborted_saves: int = 0
    last_abort_reason: str = ""


@dataclass(frozen=True, slots=True)
class JobChange:
    """One message of a watch. `synced`: all that existed at the start has been given; `job` is then None."""

    cursor: Cursor
    job: Job | None
    deleted_id: str = ""
    synced: bool = False


@dataclass(frozen=True, slots=True)
class UnfitCount:
    """So many nodes cannot take a rank, for this reason."""

    reason: str
    nodes: int
    numbers: tuple[tuple[str, int], ...] = ()
    details: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    job: str
    state: JobState
    reasons: tuple[UnfitCount, ...]
    nodes_considered: int
    relaxation: str


@dataclass(frozen=True, slots=True)
class Hold:
    """`expire_time_unix_ns` 0: until released. `device_key` empty: the whole node."""

    owner: str
    reason: str
    expire_time_unix_ns: int = 0
    device_key: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    key: str
    kind: str
    name: str
    vendor_id: str
    attributes: tuple[tuple[str, str | int | bool], ...] = ()
    capacity: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """A current value of None is unknown."""

    key: str
    kind: str
    end_a: str
    end_b: str
    state: str
    rail: str = ""
    expected_bytes_per_second: int = 0
    current_bytes_per_second: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """`value` None is unknown (see `quality`): never 0."""

    name: str
    value: int | None
    unit: str
    quality: str
    age_ms: int


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    uid: str
    liveness: str
    connected: bool
    schedulable: bool
    draining: bool
    holds: tuple[Hold, ...]
    advertise_address: str
    fencing: str
    cpu_millis: int
    memory_bytes: int
    cpu_free_millis: int
    memory_free_bytes: int
    labels: tuple[tuple[str, str], ...] = ()
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    readings: tuple[Reading, ...] = ()
    slots: tuple[str, ...] = ()
    beat_age_ms: int | None = None
    version: str = ""
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """`kind` is a registered noun.verb; numbers carry their unit in the name."""

    sequence: int
    kind: str
    job: str
    node: str
    generation: int
    reason: str
    numbers: tuple[tuple[str, int], ...]
    details: tuple[tuple[str, str], ...]
    create_time_unix_ns: int
    cause_id: str
    revision: int


@dataclass(frozen=True, slots=True)
class Status:
    cluster_uid: str
    cursor: Cursor
    leader: str
    leader_epoch: tuple[int, int]
    nodes_live: int
    nodes_suspect: int
    nodes_expired: int
    jobs_by_state: tuple[tuple[str, int], ...]
    store_kind: str
    version: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LogChunk:
    data: bytes
    generation: int
    rank: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Controller:
    """One `controld`. `role`: LEADS, FOLLOWS, LOADING (it has no copy yet), SILENT (it does not answer)."""

    address: str
    identity: str
    role: str
    version: str
    member_id: str


@dataclass(frozen=True, slots=True)
class StoreMember:
    """One member of the replicated store. `name` is empty until it has started.

    `role`: LEADS, VOTES, LEARNS (no vote until it is in step), SILENT. `lag_entries`: how far it is behind others.
    """

    id: str
    name: str
    peer_url: str
    role: str
    controller: str
    version: str
    lag_entries: int
    size_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Controllers:
    """All controllers and store members as one controller found them. `problems`: in words, empty when all is well."""

    controllers: tuple[Controller, ...]
    members: tuple[StoreMember, ...]
    problems: tuple[str, ...]
    store_kind: str


@dataclass(frozen=True, slots=True)
class JoinToken:
    """Lets one new node join. `text` is the whole of the file that the node is given; it is secret."""

    cluster: str
    node: str
    expire_time_unix_ns: int
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class MembersChange:
    """The members afterwards. `peers`: NAME=URL of each, as `controld member --peer` takes them. `added_id`: of the
    member that was added; empty where none was."""

    members: tuple[StoreMember, ...]
    peers: tuple[str, ...]
    added_id: str
