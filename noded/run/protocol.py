"""The words noded and its guardian exchange: newline-delimited JSON over a unix socket.

Everything here is plain data. Times are CLOCK_BOOTTIME in nanoseconds. Decoding checks every field, because the
other end may be a task: a message that does not fit raises BadMessage, which names the field.
Standard library only: the guardian outlives noded and must not depend on an installed environment.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, cast

from noded.run.fields import (
    BadMessage,
    JsonObject,
    as_object,
    get_bool,
    get_env,
    get_int,
    get_int_or_none,
    get_member,
    get_metrics,
    get_object,
    get_slot,
    get_text,
    get_text_or_none,
    get_texts,
)

LINE_BYTES_MAX: Final = 1 << 20
"""What anyone may send to the guardian, and what a task is sent."""
REPLY_BYTES_MAX: Final = 16 << 20
"""What noded may be sent: `list` of many slots with long log tails must never lock it out."""
STDERR_TAIL_BYTES: Final = 4096


class SlotState(StrEnum):
    PREPARED = "PREPARED"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    EXITED = "EXITED"
    """Ended, and its cgroup or namespace was seen empty."""
    STUCK = "STUCK"
    """Killed, but something of it is still there; its devices stay taken."""
    RELEASED = "RELEASED"
    """Only in status.json: noded has acknowledged the exit."""


class ExitReason(StrEnum):
    EXITED = "EXITED"
    SIGNALED = "SIGNALED"
    STOPPED = "STOPPED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    OOM = "OOM"
    START_FAILED = "START_FAILED"
    GUARDIAN_LOST = "GUARDIAN_LOST"


class Refusal(StrEnum):
    DEVICE_BUSY = "DEVICE_BUSY"
    USER_REQUIRED = "USER_REQUIRED"
    USER_UNKNOWN = "USER_UNKNOWN"
    DEADLINE_PASSED = "DEADLINE_PASSED"
    STALE_GENERATION = "STALE_GENERATION"
    COMMAND_NOT_FOUND = "COMMAND_NOT_FOUND"
    CWD_MISSING = "CWD_MISSING"
    SLOT_EXISTS = "SLOT_EXISTS"
    """The slot id is in use under another token; release it first."""
    NOT_FOUND = "NOT_FOUND"
    NOT_READY = "NOT_READY"
    """start came while prepare had not been answered yet."""
    ALREADY_ENDED = "ALREADY_ENDED"
    NOT_EMPTY = "NOT_EMPTY"
    START_FAILED = "START_FAILED"
    PREPARE_FAILED = "PREPARE_FAILED"
    """The node could not reserve what the slot needs (port, socket, helper process, slow file system)."""
    OVERLOADED = "OVERLOADED"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    BAD_MESSAGE = "BAD_MESSAGE"


class Fencing(StrEnum):
    PIDNS_CGROUP = "pidns+cgroup"
    PIDNS = "pidns"
    WEAK = "weak"


@dataclass(frozen=True, slots=True)
class Token:
    """The fencing token of one generation; epoch is (history counter, store revision)."""

    job: str
    generation: int
    epoch: tuple[int, int]

    @property
    def order(self) -> tuple[int, int, int]:
        """Newer is larger. History comes first: after a restore from backup the generation may go back, the
        history counter never does."""
        return (self.epoch[0], self.generation, self.epoch[1])


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What to run. `user` None means the guardian's own user."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str = "/"
    user: str | None = None
    group: str | None = None
    log_bytes_max: int = 16 << 20
    log_files_max: int = 4
    grace_ms: int = 10_000


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    slot: str
    token: Token
    spec: TaskSpec
    deadline_ns: int
    rank: int | None = None
    cpu_millis: int = 0
    memory_bytes: int = 0
    device_keys: tuple[str, ...] = ()
    hold_port: bool = False
    bind_address: str = ""
    """Where the held port is bound; empty means every IPv4 address."""


@dataclass(frozen=True, slots=True)
class Exit:
    reason: ExitReason
    code: int | None
    signal: int | None
    at_ns: int
    stderr_tail: str = ""
    empty: bool = True
    """True once the slot's cgroup or namespace was seen empty; only then may its devices be granted again."""


@dataclass(frozen=True, slots=True)
class Progress:
    step: int
    metrics: dict[str, float]
    at_ns: int


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """One slot as `list`, `hello` and status.json show it. pid and init_pid are host pids."""

    slot: str
    token: Token
    rank: int | None
    state: SlotState
    deadline_ns: int
    device_keys: tuple[str, ...] = ()
    pid: int | None = None
    init_pid: int | None = None
    start_ticks: int | None = None
    port: int = 0
    exit: Exit | None = None
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Started:
    pid: int
    init_pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Hello:
    nonce: str
    boot_id: str
    pid: int
    fencing: Fencing
    slots: tuple[SlotStatus, ...]
    leftovers: tuple[SlotStatus, ...]
    """Slots of an earlier guardian: EXITED when their processes are proven gone, STUCK when not."""


@dataclass(frozen=True, slots=True)
class TaskExit:
    slot: str
    token: Token
    exit: Exit


@dataclass(frozen=True, slots=True)
class TaskCall:
    slot: str
    token: Token
    call_id: str
    call: str
    args: JsonObject


@dataclass(frozen=True, slots=True)
class TaskProgress:
    slot: str
    token: Token
    progress: Progress


Event = TaskExit | TaskCall | TaskProgress


# -- lines -------------------------------------------------------------------------------------------------------


def encode_line(message: JsonObject, bytes_max: int = LINE_BYTES_MAX) -> bytes:
    """One message as one line. Raises BadMessage when it would be longer than bytes_max."""
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    if len(line) > bytes_max:
        raise BadMessage(f"message of {len(line)} bytes is larger than {bytes_max}")
    return line


def decode_line(line: bytes) -> JsonObject:
    """Raises BadMessage. Half a surrogate pair is no text: nothing behind here could pass it on as UTF-8."""
    try:
        value: object = json.loads(line.decode())
        if b"\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"not JSON: {error}") from None
    return as_object(value, "message")


class LineSplitter:
    """Cuts a byte stream into lines; holds at most one unfinished line of LINE_BYTES_MAX."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Raises BadMessage when a line is longer than LINE_BYTES_MAX; the stream cannot be used afterwards."""
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        if len(rest) >= LINE_BYTES_MAX or any(len(line) >= LINE_BYTES_MAX for line in lines):
            raise BadMessage(f"a line is longer than {LINE_BYTES_MAX} bytes")
        return [bytes(line) for line in lines if line.strip()]


# -- types to JSON and back ----------------------------------------------------------------------------------------


def token_to_json(token: Token) -> JsonObject:
    return {"job": token.job, "generation": token.generation, "epoch": list(token.epoch)}


def token_from_json(value: JsonObject) -> Token:
    epoch: object = value.get("epoch")
    if not isinstance(epoch, list):
        raise BadMessage("epoch must be [history, revision]")
    parts = cast("list[object]", epoch)
    if len(parts) != 2 or not all(isinstance(part, int) for part in parts):
        raise BadMessage("epoch must be [history, revision]")
    history, revision = cast("list[int]", parts)
    return Token(get_text(value, "job"), get_int(value, "generation"), (history, revision))


def spec_to_json(spec: TaskSpec) -> JsonObject:
    return {
        "argv": list(spec.argv),
        "env": spec.env,
        "cwd": spec.cwd,
        "user": spec.user,
        "group": spec.group,
        "log_bytes_max": spec.log_bytes_max,
        "log_files_max": spec.log_files_max,
        "grace_ms": spec.grace_ms,
    }


def spec_from_json(value: JsonObject) -> TaskSpec:
    argv = get_texts(value, "argv")
    if not argv or not argv[0]:
        raise BadMessage("argv must name a command")
    cwd = get_text_or_none(value, "cwd") or "/"
    if not cwd.startswith("/"):
        raise BadMessage(f"cwd must be an absolute path, not {cwd!r}")
    defaults = TaskSpec(argv, {})
    return TaskSpec(
        argv=argv,
        env=get_env(value, "env"),
        cwd=cwd,
        user=get_text_or_none(value, "user"),
        group=get_text_or_none(value, "group"),
        log_bytes_max=get_int({"log_bytes_max": defaults.log_bytes_max, **value}, "log_bytes_max", 4096),
        log_files_max=get_int({"log_files_max": defaults.log_files_max, **value}, "log_files_max", 1),
        grace_ms=get_int({"grace_ms": defaults.grace_ms, **value}, "grace_ms"),
    )


def prepare_to_json(request: PrepareRequest) -> JsonObject:
    return {
        "slot": request.slot,
        "token": token_to_json(request.token),
        "rank": request.rank,
        "cpu_millis": request.cpu_millis,
        "memory_bytes": request.memory_bytes,
        "device_keys": list(request.device_keys),
        "spec": spec_to_json(request.spec),
        "hold_port": request.hold_port,
        "bind_address": request.bind_address,
        "deadline_ns": request.deadline_ns,
    }


def prepare_from_json(value: JsonObject) -> PrepareRequest:
    return PrepareRequest(
        slot=get_slot(value),
        token=token_from_json(get_object(value, "token")),
        spec=spec_from_json(get_object(value, "spec")),
        deadline_ns=get_int(value, "deadline_ns"),
        rank=get_int_or_none(value, "rank"),
        cpu_millis=get_int({"cpu_millis": 0, **value}, "cpu_millis"),
        memory_bytes=get_int({"memory_bytes": 0, **value}, "memory_bytes"),
        device_keys=get_texts(value, "device_keys"),
        hold_port=get_bool(value, "hold_port"),
        bind_address=get_text({"bind_address": "", **value}, "bind_address"),
    )


def exit_to_json(value: Exit) -> JsonObject:
    return {
        "reason": value.reason.value,
        "code": value.code,
        "signal": value.signal,
        "at_ns": value.at_ns,
        "stderr_tail": value.stderr_tail,
        "empty": value.empty,
    }


def exit_from_json(value: JsonObject) -> Exit:
    return Exit(
        reason=get_member(ExitReason, value, "reason"),
        code=get_int_or_none(value, "code"),
        signal=get_int_or_none(value, "signal"),
        at_ns=get_int(value, "at_ns"),
        stderr_tail=get_text({"stderr_tail": "", **value}, "stderr_tail"),
        empty=get_bool(value, "empty"),
    )


def progress_to_json(value: Progress) -> JsonObject:
    return {"step": value.step, "metrics": value.metrics, "at_ns": value.at_ns}


def progress_from_json(value: JsonObject) -> Progress:
    return Progress(get_int(value, "step"), get_metrics(value, "metrics"), get_int(value, "at_ns"))


def status_to_json(status: SlotStatus) -> JsonObject:
    return {
        "slot": status.slot,
        "token": token_to_json(status.token),
        "rank": status.rank,
        "state": status.state.value,
        "pid": status.pid,
        "init_pid": status.init_pid,
        "start_ticks": status.start_ticks,
        "port": status.port,
        "deadline_ns": status.deadline_ns,
        "exit": None if status.exit is None else exit_to_json(status.exit),
        "progress": None if status.progress is None else progress_to_json(status.progress),
        "device_keys": list(status.device_keys),
    }


def status_from_json(value: JsonObject) -> SlotStatus:
    return SlotStatus(
        slot=get_slot(value),
        token=token_from_json(get_object(value, "token")),
        rank=get_int_or_none(value, "rank"),
        state=get_member(SlotState, value, "state"),
        deadline_ns=get_int(value, "deadline_ns"),
        device_keys=get_texts(value, "device_keys"),
        pid=get_int_or_none(value, "pid"),
        init_pid=get_int_or_none(value, "init_pid"),
        start_ticks=get_int_or_none(value, "start_ticks"),
        port=get_int(value, "port"),
        exit=None if value.get("exit") is None else exit_from_json(get_object(value, "exit")),
        progress=None if value.get("progress") is None else progress_from_json(get_object(value, "progress")),
    )


def statuses_from_json(message: JsonObject, key: str) -> tuple[SlotStatus, ...]:
    value: object = message.get(key)
    if not isinstance(value, list):
        raise BadMessage(f"{key} must be a list")
    return tuple(status_from_json(as_object(item, key)) for item in cast("list[object]", value))


def hello_to_json(hello: Hello) -> JsonObject:
    return {
        "nonce": hello.nonce,
        "boot_id": hello.boot_id,
        "pid": hello.pid,
        "fencing": hello.fencing.value,
        "slots": [status_to_json(status) for status in hello.slots],
        "leftovers": [status_to_json(status) for status in hello.leftovers],
    }


def hello_from_json(value: JsonObject) -> Hello:
    return Hello(
        nonce=get_text(value, "nonce"),
        boot_id=get_text(value, "boot_id"),
        pid=get_int(value, "pid"),
        fencing=get_member(Fencing, value, "fencing"),
        slots=statuses_from_json(value, "slots"),
        leftovers=statuses_from_json(value, "leftovers"),
    )


def event_to_json(event: Event) -> JsonObject:
    head: JsonObject = {"slot": event.slot, "token": token_to_json(event.token)}
    match event:
        case TaskExit():
            return {"event": "task_exit", **head, "exit": exit_to_json(event.exit)}
        case TaskCall():
            return {"event": "task_call", **head, "call_id": event.call_id, "call": event.call, "args": event.args}
        case TaskProgress():
            return {"event": "progress", **head, **progress_to_json(event.progress)}


def event_from_json(value: JsonObject) -> Event:
    slot, token = get_slot(value), token_from_json(get_object(value, "token"))
    match value.get("event"):
        case "task_exit":
            return TaskExit(slot, token, exit_from_json(get_object(value, "exit")))
        case "task_call":
            call_id, call = get_text(value, "call_id"), get_text(value, "call")
            return TaskCall(slot, token, call_id, call, get_object(value, "args"))
        case "progress":
            return TaskProgress(slot, token, progress_from_json(value))
        case other:
            raise BadMessage(f"event {other!r} is not known")
