"""Calls of tasks over their VIRIAL_SOCK: answered here, or kept until noded answers them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from noded.run.fields import BadMessage, get_int, get_metrics, get_object, get_text
from noded.run.protocol import Progress, Refusal, TaskCall, TaskProgress, encode_line, token_to_json
from noded.run.wire import Closed

if TYPE_CHECKING:
    from noded.run.fields import JsonObject
    from noded.run.slots import Slot
    from noded.run.wire import Connection

PENDING_MAX: Final = 1000
PENDING_PER_SLOT_MAX: Final = 100
PENDING_BYTES_MAX: Final = 64 << 20
ARGS_BYTES_MAX: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class _Pending:
    event: TaskCall
    connection: Connection
    request_id: int
    size_bytes: int


class Calls:
    """Calls that wait for noded. They outlive a noded: the next one is told of them again, under the same call_id."""

    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}
        self._next = 0
        self._bytes = 0

    def waiting(self) -> list[TaskCall]:
        return [pending.event for pending in self._pending.values()]

    def handle(
        self, slot: Slot, connection: Connection, message: JsonObject, now_ns: int
    ) -> TaskCall | TaskProgress | None:
        """Answers the call, or returns what noded must hear. Raises BadMessage (cut the connection) and Closed."""
        request_id = get_int(message, "id")
        call = get_text(message, "call")
        args = get_object({"args": {}, **message}, "args")
        if call == "hello":
            result = {"rank": slot.request.rank, "token": token_to_json(slot.token)}
            connection.send({"id": request_id, "ok": True, "result": result})
            return None
        if call == "progress":
            try:
                progress = Progress(get_int(args, "step"), get_metrics(args, "metrics"), now_ns)
            except BadMessage as error:
                refuse(connection, request_id, Refusal.BAD_MESSAGE, str(error))
                return None
            connection.send({"id": request_id, "ok": True, "result": {}})
            return TaskProgress(slot.id, slot.token, progress)
        size_bytes = len(encode_line(args))
        if size_bytes > ARGS_BYTES_MAX:
            refuse(connection, request_id, Refusal.BAD_MESSAGE, f"args have {size_bytes} bytes, > {ARGS_BYTES_MAX}")
            return None
        own = sum(1 for pending in self._pending.values() if pending.event.slot == slot.id)
        if (
            len(self._pending) >= PENDING_MAX
            or own >= PENDING_PER_SLOT_MAX
            or self._bytes + size_bytes > PENDING_BYTES_MAX
        ):
            refuse(connection, request_id, Refusal.OVERLOADED, f"{len(self._pending)} calls wait for noded")
            return None
        self._next += 1
        event = TaskCall(slot.id, slot.token, str(self._next), call, args)
        self._pending[event.call_id] = _Pending(event, connection, request_id, size_bytes)
        self._bytes += size_bytes
        return event

    def reply(self, slot_id: str, call_id: str, message: JsonObject) -> Connection | None:
        """`message` has result or error. Returns a connection that turned out to be dead. Late replies are dropped."""
        pending = self._pending.get(call_id)
        if pending is None or pending.event.slot != slot_id:
            return None
        self._remove(call_id)
        try:
            if message.get("error") is not None:
                error = get_object(message, "error")
                reason, text = get_text(error, "reason"), get_text({"message": "", **error}, "message")
                refuse(pending.connection, pending.request_id, reason, text)
            else:
                result = get_object({"result": {}, **message}, "result")
                pending.connection.send({"id": pending.request_id, "ok": True, "result": result})
        except Closed:
            return pending.connection
        return None

    def forget(self, connection: Connection) -> None:
        """The task no longer listens there: nobody needs the answer."""
        for call_id in [call_id for call_id, pending in self._pending.items() if pending.connection is connection]:
            self._remove(call_id)

    def _remove(self, call_id: str) -> None:
        self._bytes -= self._pending.pop(call_id).size_bytes


def refuse(connection: Connection, request_id: int, reason: str, message: str) -> None:
    connection.send({"id": request_id, "ok": False, "error": str(reason), "message": message})
