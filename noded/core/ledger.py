"""Calls from inside tasks, passed on to the controller until it answers: the agent's half of the checkpoint registry.

A call keeps one id for its whole life, also over restarts of this agent (it is made of what the guardian calls it), and
is sent again after a reconnect and from time to time. The controller answers a repeated call as it did before.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from noded.core.events import ArgumentValue, DirectoryFailed, TaskCalled
from noded.core.instructions import GuardianReply, Instruction, MakeDirectory, ResultValue, SendTaskCall
from noded.core.messages import (
    CallBody,
    CheckpointBeginCall,
    CheckpointFailedCall,
    CheckpointPreparedCall,
    CheckpointWaitCall,
    TaskCall,
    TaskReply,
)
from noded.core.slots import Slot
from virialpb.ids import CheckpointId, SlotId, valid_id
from virialpb.lease import NS_PER_MS
from virialpb.reasons import Reason

PENDING_MAX: Final = 1000
"""As many as the guardian keeps; one rank has one or two in flight."""
RESEND_NS: Final = 5_000 * NS_PER_MS
TEXT_MAX: Final = 1000
INT_MAX: Final = (1 << 63) - 1


class BadCall(ValueError):
    """A task's call that is not as agreed; the text names the argument."""


@dataclass(slots=True)
class _Pending:
    call: TaskCall
    guardian_call_id: str
    sent_ns: int
    answer: TaskReply | None = None
    """Of a begin: what to answer once its directory is there."""
    directory: str = ""


class CallLedger:
    """`place(directory, job, checkpoint)` says where a checkpoint lies on this node."""

    def __init__(self, counters: Counter[str], place: Callable[[str, str, CheckpointId], str]) -> None:
        self._counters = counters
        self._place = place
        self._pending: dict[int, _Pending] = {}

    def called(
        self, event: TaskCalled, slot: Slot | None, now_ns: int, *, nonce: str, online: bool
    ) -> list[Instruction]:
        """A task calls. `online`: there is a session to pass it on to; else it goes when there is one."""

        def refuse(reason: str, message: str) -> list[Instruction]:
            return [GuardianReply(event.slot, event.call_id, error=reason, message=message)]

        if slot is None or slot.token != event.token or slot.expired(now_ns) or slot.ended:
            self._counters["fenced_call"] += 1
            return refuse(Reason.FENCED, "the lease of this task is over")
        try:
            body = parse_call(event.call, dict(event.arguments))
        except BadCall as problem:
            return refuse(Reason.INVALID_SPEC, str(problem))
        call_id = stable_call_id(nonce, event.slot, event.call_id)
        if call_id not in self._pending and len(self._pending) >= PENDING_MAX:
            return refuse(Reason.OVERLOADED, f"{PENDING_MAX} calls wait for the controller already")
        call = TaskCall(call_id, event.slot, event.token, body)
        self._pending[call_id] = _Pending(call, event.call_id, now_ns)
        return [SendTaskCall(call)] if online else []

    def replied(self, reply: TaskReply, slot: Slot | None) -> list[Instruction]:
        pending = self._pending.get(reply.call_id)
        if pending is None or pending.call.slot != reply.slot or pending.answer is not None:
            self._counters["late_reply"] += 1
            return []
        if slot is not None and isinstance(pending.call.call, CheckpointBeginCall) and reply.error is None:
            checkpoint = CheckpointId(reply.checkpoint)
            pending.directory = self._place(reply.directory, slot.token.job, checkpoint)
            pending.answer = reply
            return [MakeDirectory(reply.call_id, pending.directory, slot.record.user, slot.record.group)]
        del self._pending[reply.call_id]
        if not pending.guardian_call_id:
            return []
        if reply.error is not None:
            return [GuardianReply(reply.slot, pending.guardian_call_id, error=reply.error, message=reply.error_message)]
        return [GuardianReply(reply.slot, pending.guardian_call_id, _result(pending.call.call, reply))]

    def directory_made(self, call_id: int) -> list[Instruction]:
        pending = self._pending.pop(call_id, None)
        if pending is None or pending.answer is None:
            return []
        result: tuple[tuple[str, ResultValue], ...] = (
            ("checkpoint_id", pending.answer.checkpoint),
            ("directory", pending.directory),
            ("tier", pending.answer.tier),
        )
        return [GuardianReply(pending.call.slot, pending.guardian_call_id, result)]

    def directory_failed(self, event: DirectoryFailed, now_ns: int, *, online: bool) -> list[Instruction]:
        """No room for this rank's shard: the task goes on training, and the controller aborts without waiting."""
        pending = self._pending.pop(event.call_id, None)
        if pending is None or pending.answer is None:
            return []
        reason = Reason.STORAGE_FULL if event.full else Reason.PERMISSION_DENIED
        detail = event.detail[:TEXT_MAX]
        body = CheckpointFailedCall(CheckpointId(pending.answer.checkpoint), reason, detail)
        failed = TaskCall(event.call_id ^ 1, pending.call.slot, pending.call.token, body)
        self._pending[failed.call_id] = _Pending(failed, "", now_ns)
        told: list[Instruction] = [
            GuardianReply(pending.call.slot, pending.guardian_call_id, error=reason, message=detail)
        ]
        return [*told, SendTaskCall(failed)] if online else told

    def resend(self, now_ns: int, *, all_of_them: bool = False) -> list[Instruction]:
        """Unanswered calls: all after a reconnect, otherwise those that have waited long."""
        found: list[Instruction] = []
        for pending in self._pending.values():
            if pending.answer is None and (all_of_them or pending.sent_ns + RESEND_NS <= now_ns):
                pending.sent_ns = now_ns
                found.append(SendTaskCall(pending.call))
        return found

    def forget(self, slot: SlotId) -> None:
        """The slot is no more: nobody waits for these answers."""
        self._pending = {key: one for key, one in self._pending.items() if one.call.slot != slot}

    def clear(self) -> None:
        self._pending.clear()


def stable_call_id(nonce: str, slot: SlotId, guardian_call_id: str) -> int:
    """63 bits, even (the odd neighbour is the agent's own failure report), the same in every life of this agent."""
    digest = hashlib.sha256(f"{nonce}/{slot}/{guardian_call_id}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 1) & ~1 or 2


def parse_call(call: str, arguments: Mapping[str, ArgumentValue]) -> CallBody:
    """Raises BadCall naming the argument."""

    def whole(name: str) -> int:
        value = arguments.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= INT_MAX:
            raise BadCall(f"{call}: {name} must be a whole number >= 0")
        return value

    def text(name: str, *, bound: int = TEXT_MAX) -> str:
        value = arguments.get(name)
        if not isinstance(value, str) or len(value) > bound:
            raise BadCall(f"{call}: {name} must be a text of at most {bound} characters")
        return value

    def checkpoint() -> CheckpointId:
        value = text("checkpoint_id")
        if not valid_id(value):
            raise BadCall(f"{call}: checkpoint_id {value[:80]!r} is not the id of a checkpoint")
        return CheckpointId(value)

    match call:
        case "checkpoint_begin":
            return CheckpointBeginCall(whole("step"))
        case "checkpoint_prepared":
            digest, file = text("digest", bound=128), text("file", bound=128)
            return CheckpointPreparedCall(checkpoint(), whole("step"), whole("size_bytes"), digest, file)
        case "checkpoint_wait":
            return CheckpointWaitCall(checkpoint())
        case "checkpoint_failed":
            return CheckpointFailedCall(checkpoint(), text("reason"), text("message"))
        case _:
            raise BadCall(f"unknown call {call[:80]!r}")


def _result(call: CallBody, reply: TaskReply) -> tuple[tuple[str, ResultValue], ...]:
    return () if isinstance(call, CheckpointFailedCall) else (("state", reply.state),)
