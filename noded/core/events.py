"""What happens to an agent. The shell makes these; `AgentCore.handle` answers each with instructions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from noded.core.messages import Inventory, Order, Sample, SlotRecord, TaskExit
from virialpb.ids import CheckpointId, Epoch, JobId, SlotId, Token
from virialpb.reasons import PrepareFailure

ArgumentValue = str | int | float | bool | None


class GuardianState(StrEnum):
    """A slot as its guardian shows it."""

    PREPARED = "PREPARED"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    EXITED = "EXITED"
    STUCK = "STUCK"


@dataclass(frozen=True, slots=True)
class Progress:
    step: int
    metrics: tuple[tuple[str, float], ...]
    at_ns: int


@dataclass(frozen=True, slots=True)
class GuardianSlot:
    slot: SlotId
    token: Token
    rank: int | None
    state: GuardianState
    deadline_ns: int
    port: int = 0
    device_keys: tuple[str, ...] = ()
    pid: int = 0
    init_pid: int = 0
    start_ticks: int = 0
    """Of `pid`: tells the process from a later one with the same number."""
    exit: TaskExit | None = None
    progress: Progress | None = None


# -- the controller ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """A control stream is open and nothing has been sent on it."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    pass


@dataclass(frozen=True, slots=True)
class OrderReceived:
    leader_epoch: Epoch
    order: Order


# -- the guardian --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GuardianHello:
    """A connection to a guardian. `records`: what this agent wrote down of slots earlier, by any life of it."""

    nonce: str
    boot_id: str
    fencing: str
    slots: tuple[GuardianSlot, ...] = ()
    leftovers: tuple[GuardianSlot, ...] = ()
    records: tuple[SlotRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class GuardianLost:
    """The connection to the guardian ended, or it did not answer in time."""


@dataclass(frozen=True, slots=True)
class GuardianAnswered:
    """It answered a `list`: it lives, and this is what it has."""

    slots: tuple[GuardianSlot, ...]


@dataclass(frozen=True, slots=True)
class TaskExited:
    """`empty` False: killed, but something of it is still there."""

    slot: SlotId
    token: Token
    exit: TaskExit
    empty: bool = True


@dataclass(frozen=True, slots=True)
class TaskProgressed:
    slot: SlotId
    token: Token
    progress: Progress


@dataclass(frozen=True, slots=True)
class TaskCalled:
    """A call from inside a task. `call_id` is the guardian's, unique in its life."""

    slot: SlotId
    token: Token
    call_id: str
    call: str
    arguments: tuple[tuple[str, ArgumentValue], ...] = ()


# -- outcomes of instructions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrepareDone:
    slot: SlotId
    token: Token
    port: int = 0


@dataclass(frozen=True, slots=True)
class PrepareFailed:
    slot: SlotId
    token: Token
    failure: PrepareFailure
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ShardRead:
    """So much of the shard was read to verify it, and is right so far."""

    slot: SlotId
    token: Token
    read_bytes: int


@dataclass(frozen=True, slots=True)
class ShardVerified:
    slot: SlotId
    token: Token


@dataclass(frozen=True, slots=True)
class StartDone:
    slot: SlotId
    token: Token
    pid: int = 0
    init_pid: int = 0
    start_ticks: int = 0


@dataclass(frozen=True, slots=True)
class StartFailed:
    """`retry`: the guardian was not ready for it; the next Go may try again."""

    slot: SlotId
    token: Token
    detail: str = ""
    retry: bool = False


@dataclass(frozen=True, slots=True)
class StopFailed:
    """The guardian does not know the slot that it was to stop."""

    slot: SlotId
    token: Token


@dataclass(frozen=True, slots=True)
class ReleaseDone:
    slot: SlotId
    token: Token


@dataclass(frozen=True, slots=True)
class ReleaseFailed:
    """The obligation stays: it is tried again with back-off until it is confirmed."""

    slot: SlotId
    token: Token


@dataclass(frozen=True, slots=True)
class DirectoryMade:
    call_id: int


@dataclass(frozen=True, slots=True)
class DirectoryFailed:
    call_id: int
    full: bool
    detail: str


@dataclass(frozen=True, slots=True)
class FilesDropped:
    job: JobId
    checkpoint: CheckpointId


# -- the rest ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InventoryRead:
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class ReadingsTaken:
    readings: tuple[Sample, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Tick:
    pass


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """The operator ends this node's work: every task is stopped."""

    grace_ms: int


Event = (
    Connected
    | Disconnected
    | OrderReceived
    | GuardianHello
    | GuardianLost
    | GuardianAnswered
    | TaskExited
    | TaskProgressed
    | TaskCalled
    | PrepareDone
    | PrepareFailed
    | ShardRead
    | ShardVerified
    | StartDone
    | StartFailed
    | StopFailed
    | ReleaseDone
    | ReleaseFailed
    | DirectoryMade
    | DirectoryFailed
    | FilesDropped
    | InventoryRead
    | ReadingsTaken
    | Tick
    | ShutdownRequested
)
