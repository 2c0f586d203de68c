"""What the shell has to do. Carried out in order; each may fail or be lost, and the core will ask again."""

from __future__ import annotations

from dataclasses import dataclass

from noded.core.messages import Beat, DropDone, Hello, Restore, SlotRecord, TaskCall, TaskSpec
from virialpb.ids import CheckpointId, Epoch, JobId, SlotId, Token

ResultValue = str | int | None


# -- to the controller ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendHello:
    hello: Hello


@dataclass(frozen=True, slots=True)
class SendBeat:
    beat: Beat


@dataclass(frozen=True, slots=True)
class SendTaskCall:
    call: TaskCall


@dataclass(frozen=True, slots=True)
class SendDropDone:
    done: DropDone


@dataclass(frozen=True, slots=True)
class Redial:
    """Nothing comes back on this connection: dial another one. Slots are left alone."""


@dataclass(frozen=True, slots=True)
class NewSession:
    """This node has a new incarnation: close the stream, so that the next one starts with its Hello."""


# -- to the guardian -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GuardianPrepare:
    slot: SlotId
    token: Token
    rank: int | None
    deadline_ns: int
    task: TaskSpec
    cpu_millis: int = 0
    memory_bytes: int = 0
    device_keys: tuple[str, ...] = ()
    hold_port: bool = False


@dataclass(frozen=True, slots=True)
class GuardianStart:
    slot: SlotId
    token: Token
    env: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class GuardianExtend:
    deadlines_ns: tuple[tuple[SlotId, int], ...]


@dataclass(frozen=True, slots=True)
class GuardianStop:
    slot: SlotId
    token: Token
    grace_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class GuardianRelease:
    slot: SlotId
    token: Token


@dataclass(frozen=True, slots=True)
class GuardianReply:
    """Answers a task's call; `call_id` is the guardian's. `error` empty: `result` is the answer."""

    slot: SlotId
    call_id: str
    result: tuple[tuple[str, ResultValue], ...] = ()
    error: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class GuardianPush:
    slot: SlotId
    message: tuple[tuple[str, ResultValue], ...]


# -- on this machine -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KillSlot:
    """The slot's deadline has passed and its guardian does not answer: kill it, if it is still that process."""

    slot: SlotId
    pid: int
    init_pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class ReplaceGuardian:
    """It has been silent past every deadline, so nothing of its slots may run any more: end it, for a new one."""


@dataclass(frozen=True, slots=True)
class VerifyShard:
    slot: SlotId
    token: Token
    rank: int
    directory: str
    restore: Restore


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    """For shards of a task: created if missing, owned by the task's user, mode 0700."""

    call_id: int
    directory: str
    user: str
    group: str


@dataclass(frozen=True, slots=True)
class DropFiles:
    job: JobId
    checkpoint: CheckpointId
    directory: str


@dataclass(frozen=True, slots=True)
class Remember:
    """Write down a slot before the guardian hears of it."""

    record: SlotRecord


@dataclass(frozen=True, slots=True)
class Forget:
    slot: SlotId


@dataclass(frozen=True, slots=True)
class SaveLeader:
    """Keep the highest leader epoch over a restart of this agent."""

    leader_epoch: Epoch
    cluster_uid: str


GuardianInstruction = (
    GuardianPrepare | GuardianStart | GuardianExtend | GuardianStop | GuardianRelease | GuardianReply | GuardianPush
)
Instruction = (
    SendHello
    | SendBeat
    | SendTaskCall
    | SendDropDone
    | Redial
    | NewSession
    | GuardianInstruction
    | KillSlot
    | ReplaceGuardian
    | VerifyShard
    | MakeDirectory
    | DropFiles
    | Remember
    | Forget
    | SaveLeader
)
