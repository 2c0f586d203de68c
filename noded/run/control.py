"""Answers to noded's requests. What they mean is decided in noded/run/slots.py; this only translates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from noded.run import protocol
from noded.run.fields import BadMessage, JsonObject, get_bool, get_env, get_int, get_object, get_slot, get_text
from noded.run.protocol import Refusal, Started, token_from_json
from noded.run.service import Service, boottime_ns
from noded.run.slots import Action, Phase, Refused, Slot

if TYPE_CHECKING:
    from noded.run.wire import Connection


def handle_request(service: Service, connection: Connection, message: JsonObject) -> None:
    """Raises BadMessage where not even an id can be answered; the connection is then closed."""
    request_id = get_int(message, "id")
    try:
        result = _dispatch(service, connection, request_id, get_text(message, "op"), message)
    except BadMessage as error:
        result = Refused(Refusal.BAD_MESSAGE, str(error))
    if result is not None:
        _answer(connection, request_id, result)


def _answer(connection: Connection, request_id: int, result: JsonObject | Refused) -> None:
    if isinstance(result, Refused):
        connection.send({"id": request_id, "ok": False, "error": result.reason.value, "message": result.message})
    else:
        connection.send({"id": request_id, "ok": True, **result})


def _dispatch(
    service: Service, connection: Connection, request_id: int, op: str, message: JsonObject
) -> JsonObject | Refused | None:
    """None: the answer comes later, or has been sent."""
    table = service.table
    match op:
        case "hello":
            return _hello(service, connection, request_id)
        case "prepare":
            return _prepare(service, connection, request_id, message)
        case "start":
            return _start(service, connection, request_id, message)
        case "extend":
            wanted = get_object(message, "deadlines")
            refused, actions = table.extend({slot: get_int(wanted, slot) for slot in wanted}, boottime_ns())
            service.act(actions)
            return {"refused": refused}
        case "stop":
            slot_id, grace_ms = get_slot(message), get_int(message, "grace_ms")
            service.note("slot.stop", slot=slot_id, reason=message.get("reason"), grace_ms=grace_ms)
            return _acted(service, table.stop(slot_id, grace_ms, boottime_ns()))
        case "release":
            return _acted(service, table.release(get_slot(message)))
        case "reply":
            dead = service.calls.reply(get_slot(message), get_text(message, "call_id"), message)
            if dead is not None:
                service.calls.forget(dead)
            return {}
        case "push":
            service.push(get_slot(message), {**get_object(message, "message")})
            return {}
        case "list":
            return {"slots": [protocol.status_to_json(slot.status) for slot in table.all()]}
        case "shutdown":
            return _shutdown(service, connection, request_id, kill=get_bool(message, "kill"))
        case _:
            return Refused(Refusal.BAD_MESSAGE, f"op {op[:80]!r} is not known")


def _acted(service: Service, result: list[Action] | Refused) -> JsonObject | Refused:
    if isinstance(result, Refused):
        return result
    service.act(result)
    return {}


def _hello(service: Service, connection: Connection, request_id: int) -> None:
    """From here on events go to this connection; the one that had them is closed."""
    older, service.noded = service.noded, connection
    if older is not None and older is not connection:
        service.drop_control(older, "replaced by a newer noded")
    service.noded = connection
    _answer(connection, request_id, protocol.hello_to_json(service.hello()))
    for call in service.calls.waiting():
        service.emit(call)


def _prepare(
    service: Service, connection: Connection, request_id: int, message: JsonObject
) -> JsonObject | Refused | None:
    request = protocol.prepare_from_json(message)
    if service.stop_at_ns is not None:
        return Refused(Refusal.SHUTTING_DOWN, "the guardian is shutting down")
    actions = service.table.prepare(request, boottime_ns())
    if isinstance(actions, Refused):
        return actions
    slot = service.table.get(request.slot)
    if slot is not None and slot.phase is not Phase.PREPARING:
        return {"port": slot.port}

    def answer(slot: Slot | None, refused: Refused | None) -> None:
        if refused is None and slot is not None and slot.phase is Phase.PREPARED:
            _answer(connection, request_id, {"port": slot.port})
        else:
            _answer(connection, request_id, refused or Refused(Refusal.ALREADY_ENDED, f"{request.slot} was ended"))

    service.waiters.setdefault(request.slot, []).append(answer)
    service.act(actions)
    return None


def _start(
    service: Service, connection: Connection, request_id: int, message: JsonObject
) -> JsonObject | Refused | None:
    slot_id, token = get_slot(message), token_from_json(get_object(message, "token"))
    actions = service.table.start(slot_id, token, get_env(message, "env_add"), boottime_ns())
    if isinstance(actions, Refused):
        return actions
    if isinstance(actions, Started):
        return _started(actions)

    def answer(slot: Slot | None, refused: Refused | None) -> None:
        if refused is None and slot is not None and slot.started is not None:
            _answer(connection, request_id, _started(slot.started))
        elif slot is not None and slot.exit is not None:
            text = f"{slot_id}: {slot.exit.reason}: {slot.exit.stderr_tail}"
            _answer(connection, request_id, Refused(Refusal.START_FAILED, text))
        else:
            _answer(connection, request_id, refused or Refused(Refusal.START_FAILED, f"{slot_id} did not start"))

    service.waiters.setdefault(slot_id, []).append(answer)
    service.act(actions)
    return None


def _started(started: Started) -> JsonObject:
    return {"pid": started.pid, "init_pid": started.init_pid, "start_ticks": started.start_ticks}


def _shutdown(service: Service, connection: Connection, request_id: int, *, kill: bool) -> Refused | None:
    live = service.table.live()
    if live and not kill:
        return Refused(Refusal.NOT_EMPTY, f"{len(live)} slots are live: {', '.join(slot.id for slot in live[:5])}")
    service.begin_stop(0)
    service.on_stopped.append(lambda: _answer(connection, request_id, {}))
    return None
