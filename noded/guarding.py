"""Between the guardian's words (noded.run.protocol) and the core's: nothing is decided here."""

from __future__ import annotations

from typing import Final, cast

from noded.core import events as e
from noded.core import messages as m
from noded.core.instructions import GuardianPrepare
from noded.run import protocol as p
from noded.run.protocol import Refusal
from virialpb.ids import Epoch, JobId, SlotId, Token
from virialpb.reasons import ExitReason, PrepareFailure

_FAILURES: Final = {
    Refusal.DEVICE_BUSY: PrepareFailure.DEVICE_BUSY,
    Refusal.USER_REQUIRED: PrepareFailure.USER_REQUIRED,
    Refusal.USER_UNKNOWN: PrepareFailure.USER_UNKNOWN,
    Refusal.DEADLINE_PASSED: PrepareFailure.DEADLINE_PASSED,
    Refusal.STALE_GENERATION: PrepareFailure.STALE_GENERATION,
    Refusal.COMMAND_NOT_FOUND: PrepareFailure.COMMAND_NOT_FOUND,
    Refusal.CWD_MISSING: PrepareFailure.WORKING_DIRECTORY_MISSING,
}


def failure_of(reason: Refusal) -> PrepareFailure:
    """The node itself could not: whatever has no reason of its own reads as the guardian's failure, with its words."""
    return _FAILURES.get(reason, PrepareFailure.GUARDIAN_LOST)


def token_to_guardian(token: Token) -> p.Token:
    return p.Token(token.job, token.generation, (token.epoch.history, token.epoch.revision))


def request_of(order: GuardianPrepare, bind_address: str) -> p.PrepareRequest:
    task = order.task
    defaults = p.TaskSpec(task.command, {})
    return p.PrepareRequest(
        slot=order.slot,
        token=token_to_guardian(order.token),
        spec=p.TaskSpec(
            argv=task.command,
            env=dict(task.env),
            cwd=task.working_directory or defaults.cwd,
            user=task.user or None,
            group=task.group or None,
            log_bytes_max=task.log_bytes_max or defaults.log_bytes_max,
            log_files_max=task.log_files_max or defaults.log_files_max,
            grace_ms=task.grace_ms,
        ),
        deadline_ns=order.deadline_ns,
        rank=order.rank,
        cpu_millis=order.cpu_millis,
        memory_bytes=order.memory_bytes,
        device_keys=order.device_keys,
        hold_port=order.hold_port,
        bind_address=bind_address,
    )


def hello_from_guardian(hello: p.Hello, records: tuple[m.SlotRecord, ...]) -> e.GuardianHello:
    return e.GuardianHello(
        nonce=hello.nonce,
        boot_id=hello.boot_id,
        fencing=hello.fencing,
        slots=slots_from_guardian(hello.slots),
        leftovers=slots_from_guardian(hello.leftovers),
        records=records,
    )


def slots_from_guardian(slots: tuple[p.SlotStatus, ...]) -> tuple[e.GuardianSlot, ...]:
    return tuple(_slot(status) for status in slots if status.state is not p.SlotState.RELEASED)


def event_from_guardian(event: p.Event) -> e.Event:
    slot, token = SlotId(event.slot), _token(event.token)
    match event:
        case p.TaskExit():
            return e.TaskExited(slot, token, _exit(event.exit), empty=event.exit.empty)
        case p.TaskProgress():
            return e.TaskProgressed(slot, token, _progress(event.progress))
        case p.TaskCall():
            plain = ((name, value) for name, value in event.args.items() if _is_plain(value))
            arguments = cast("tuple[tuple[str, e.ArgumentValue], ...]", tuple(plain))
            return e.TaskCalled(slot, token, event.call_id, event.call, arguments)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _slot(status: p.SlotStatus) -> e.GuardianSlot:
    return e.GuardianSlot(
        slot=SlotId(status.slot),
        token=_token(status.token),
        rank=status.rank,
        state=e.GuardianState(status.state.value),
        deadline_ns=status.deadline_ns,
        port=status.port,
        device_keys=status.device_keys,
        pid=status.pid or 0,
        init_pid=status.init_pid or 0,
        start_ticks=status.start_ticks or 0,
        exit=None if status.exit is None else _exit(status.exit),
        progress=None if status.progress is None else _progress(status.progress),
    )


def _token(token: p.Token) -> Token:
    return Token(JobId(token.job), token.generation, Epoch(*token.epoch))


def _exit(end: p.Exit) -> m.TaskExit:
    return m.TaskExit(ExitReason(end.reason.value), end.code or 0, end.signal or 0, end.stderr_tail)


def _progress(progress: p.Progress) -> e.Progress:
    return e.Progress(progress.step, tuple(sorted(progress.metrics.items())), progress.at_ns)
