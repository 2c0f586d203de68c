"""What a user asks for: the job specification as the controller holds it. Durations in ns, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

SECOND_NS = 1_000_000_000


class Operator(StrEnum):
    EQ = "EQ"
    NE = "NE"
    LT = "LT"
    LE = "LE"
    GT = "GT"
    GE = "GE"
    IN = "IN"
    EXISTS = "EXISTS"


class Writes(StrEnum):
    SHARED = "SHARED"
    TOKEN = "TOKEN"  # noqa: S105 - a fencing token, no secret


class Durability(StrEnum):
    LOCAL_DISK = "LOCAL_DISK"
    SHARED_DIRECTORY = "SHARED_DIRECTORY"


class RestartWay(StrEnum):
    IN_PLACE = "in_place"
    SPARE = "spare"
    REQUEUE = "requeue"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A comparison on an attribute; ordered operators compare decimal integers in base units."""

    attribute: str
    operator: Operator
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    kind: str
    count: int = 1
    share_thousandths: int = 1000
    constraints: tuple[Constraint, ...] = ()


@dataclass(frozen=True, slots=True)
class Resources:
    cpu_millis: int
    memory_bytes: int
    devices: tuple[DeviceRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class GangSpec:
    ranks: int
    spares: int = 0
    spread: str = "node"


@dataclass(frozen=True, slots=True)
class TaskSpec:
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
class CheckpointSpec:
    durability: Durability = Durability.LOCAL_DISK
    directory: str = ""
    keep: int = 2
    timeout_ns: int = 600 * SECOND_NS


@dataclass(frozen=True, slots=True)
class RestartSpec:
    max: int = 3
    window_ns: int = 3600 * SECOND_NS
    allow: tuple[RestartWay, ...] = (RestartWay.IN_PLACE, RestartWay.SPARE, RestartWay.REQUEUE)


@dataclass(frozen=True, slots=True)
class JobSpec:
    name: str
    gang: GangSpec
    resources: Resources
    task: TaskSpec
    kind: str = ""
    fence_after_ns: int = 60 * SECOND_NS
    writes: Writes = Writes.SHARED
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    restart: RestartSpec = field(default_factory=RestartSpec)
    node_constraints: tuple[Constraint, ...] = ()
    priority: int = 0
    fencing: str = "any"
    start_timeout_ns: int = 0
