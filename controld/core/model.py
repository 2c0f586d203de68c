"""Records: what is stored. Frozen; a change is a new record under the same key.

A record never contains its own epoch: a generation's key is written new each time, and the revision at
which the store created it is the epoch of its leases (`State.epoch_of`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from controld.core.ids import CheckpointId, Incarnation, JobId, NodeUid, SlotId
from controld.core.spec import JobSpec
from virialpb.reasons import ExitReason, StopReason

AttributeValue = str | int | bool


class Liveness(StrEnum):
    LIVE = "LIVE"
    SUSPECT = "SUSPECT"
    EXPIRED = "EXPIRED"


class LeaseState(StrEnum):
    RESERVED = "RESERVED"
    GRANTED = "GRANTED"
    ACTIVE = "ACTIVE"
    REVOKING = "REVOKING"
    RELEASED = "RELEASED"
    EXPIRED = "EXPIRED"

    @property
    def holds(self) -> bool:
        """Whether the devices under such a lease are taken (promise 1: only these two ends free them)."""
        return self is not LeaseState.RELEASED and self is not LeaseState.EXPIRED


class Phase(StrEnum):
    PREPARING = "PREPARING"
    GO = "GO"
    ACTIVE = "ACTIVE"
    STOPPING = "STOPPING"
    ENDED = "ENDED"

    @property
    def under_way(self) -> bool:
        """Whether the generation is still meant to run: nothing has stopped it yet."""
        return self in (Phase.PREPARING, Phase.GO, Phase.ACTIVE)


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


class CheckpointState(StrEnum):
    BEGUN = "BEGUN"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"
    BAD = "BAD"
    DROPPING = "DROPPING"


class Tier(StrEnum):
    LOCAL = "local"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Device:
    """A thing in a node that can be allotted. `key` is a stable identity, never an index."""

    key: str
    kind: str
    name: str = ""
    vendor_id: str = ""
    attributes: tuple[tuple[str, AttributeValue], ...] = ()
    capacity: tuple[tuple[str, int], ...] = ()
    interconnect_protocol: str = ""
    interconnect_max_latency_ns: int = 0
    interconnect_bandwidth_bytes_per_second: int = 0


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


@dataclass(frozen=True, slots=True)
class Hold:
    """Keeps a node, or one device of it, from new work. A node is schedulable when it has none."""

    owner: str
    reason: str
    expire_time_unix_ns: int = 0
    device_key: str = ""

    def active(self, unix_ns: int) -> bool:
        """Whether it still holds: an expired one needs no commit to end."""
        return not self.expire_time_unix_ns or self.expire_time_unix_ns > unix_ns


@dataclass(frozen=True, slots=True)
class Cluster:
    """One per store: who this cluster is, and the counter that makes job ids (an id is never used twice)."""

    uid: str
    job_counter: int = 0
    event_sequence: int = 0
    request_sequence: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    uid: NodeUid
    name: str
    incarnation: Incarnation
    liveness: Liveness
    advertise_address: str
    fencing: str
    cpu_millis: int
    memory_bytes: int
    labels: tuple[tuple[str, str], ...] = ()
    inventory: Inventory = field(default_factory=Inventory)
    holds: tuple[Hold, ...] = ()
    draining: bool = False
    version: str = ""


@dataclass(frozen=True, slots=True)
class DeviceGrant:
    device_key: str
    share_thousandths: int = 1000


@dataclass(frozen=True, slots=True)
class TaskExit:
    reason: ExitReason
    code: int = 0
    signal: int = 0
    stderr_tail: str = ""

    @property
    def succeeded(self) -> bool:
        return self.reason is ExitReason.EXITED and self.code == 0


@dataclass(frozen=True, slots=True)
class Member:
    """One slot of a generation: a rank, or a spare (rank None) whose lease is held and which runs nothing."""

    slot: SlotId
    rank: int | None
    node: NodeUid
    incarnation: Incarnation
    cpu_millis: int
    memory_bytes: int
    devices: tuple[DeviceGrant, ...] = ()
    lease: LeaseState = LeaseState.GRANTED
    exit: TaskExit | None = None

    @property
    def done(self) -> bool:
        return self.exit is not None and self.exit.succeeded


@dataclass(frozen=True, slots=True)
class TaskError:
    generation: int
    rank: int
    node: NodeUid
    stop_reason: StopReason
    detail: str = ""
    exit: TaskExit | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One incarnation of a gang; also the packed record of its leases."""

    job: JobId
    number: int
    phase: Phase
    members: tuple[Member, ...]
    restored_checkpoint: CheckpointId | None = None
    restored_step: int = 0
    master_address: str = ""
    master_port: int = 0
    stop_reason: StopReason | None = None
    progressed: bool = False
    cause_id: str = ""

    @property
    def ranks(self) -> tuple[Member, ...]:
        return tuple(m for m in self.members if m.rank is not None)

    @property
    def leased(self) -> bool:
        """Whether any of its leases takes something."""
        return any(m.lease.holds for m in self.members)

    def place_of(self, slot: SlotId) -> int | None:
        """The index of a slot among the members."""
        # Ranks come first, in order, and a slot's name ends with its rank: of thousands, that is where it is.
        end = slot.rpartition(".")[2]
        if end.isdecimal() and (place := int(end)) < len(self.members) and self.members[place].slot == slot:
            return place
        return next((place for place, m in enumerate(self.members) if m.slot == slot), None)

    def member(self, slot: SlotId) -> Member | None:
        place = self.place_of(slot)
        return None if place is None else self.members[place]

    def of_rank(self, rank: int) -> Member | None:
        if 0 <= rank < len(self.members) and (member := self.members[rank]).rank == rank:
            return member
        return next((m for m in self.members if m.rank == rank), None)

    @property
    def all_done(self) -> bool:
        """Whether every rank has succeeded."""
        return all(m.done for m in self.members if m.rank is not None)


@dataclass(frozen=True, slots=True)
class Job:
    id: JobId
    spec: JobSpec
    state: JobState
    create_time_unix_ns: int
    owner: str = ""
    generation: int = 0
    restart_times_unix_ns: tuple[int, ...] = ()
    restarts: int = 0
    fruitless_generations: int = 0
    checkpoint_counter: int = 0
    first_error: TaskError | None = None
    end_time_unix_ns: int = 0
    highest_step: int = -1
    # From the cluster's counter: orders equal jobs, and names directories, since an id may be chosen by its user.
    number: int = 0
    # Since a checkpoint was last committed; the reason is the last one's.
    aborted_saves: int = 0
    last_abort_reason: str = ""
    # Generations in a row that no fault of the job kept from starting.
    prepare_failures: int = 0


@dataclass(frozen=True, slots=True)
class ShardPart:
    """One rank's part of a checkpoint. `digest` is defined by `virialpb.shardfile`."""

    rank: int
    node: NodeUid
    size_bytes: int
    digest: str
    file: str
    quarantined: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`directory` is absolute for the shared tier and relative to each node's own for the local one."""

    job: JobId
    id: CheckpointId
    generation: int
    step: int
    world_size: int
    tier: Tier
    directory: str
    state: CheckpointState = CheckpointState.BEGUN
    parts: tuple[ShardPart, ...] = ()
    begin_time_unix_ns: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """An idempotency key and what was answered. `fingerprint` tells a retry from another call under the same key."""

    request_id: str
    fingerprint: str
    subject: str
    time_unix_ns: int


@dataclass(frozen=True, slots=True)
class Event:
    """What happened, as data; `kind` is a registered noun.verb (`controld.core.events`)."""

    kind: str
    job: str = ""
    node: str = ""
    generation: int = 0
    reason: str = ""
    numbers: tuple[tuple[str, int], ...] = ()
    details: tuple[tuple[str, str], ...] = ()
    cause_id: str = ""
    sequence: int = 0
    create_time_unix_ns: int = 0


@dataclass(frozen=True, slots=True)
class EventPack:
    """The events of one commit, one record of them; `number` is the sequence of the first."""

    number: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class RequestPack:
    """The requests that one commit answered; `number` is that of the first (`Cluster.request_sequence`)."""

    number: int
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class JoinToken:
    """Lets one new node ask for its first certificate. Known by the hash of a secret that is nowhere stored; `used_by`:
    the public key it was used for (hexadecimal sha256), empty before."""

    secret_sha256: str
    node: str
    expire_time_unix_ns: int
    used_by: str = ""


Record = Cluster | Node | Job | Generation | Checkpoint | Request | Event | EventPack | RequestPack | JoinToken
