"""What the controller and its planner process say to each other: length-prefixed MessagePack, typed both ways.

Nodes go over only when they changed since the last question to this process; the process keeps the rest.
"""

from __future__ import annotations

import msgspec

from controld.core.ids import NodeUid
from controld.matching.port import NodeView, Pending, Plan

LENGTH_BYTES = 4
# A question about 10,000 nodes goes over in parts of a few MB; nothing honest comes near this.
FRAME_BYTES_MAX = 256 << 20


class Nodes(msgspec.Struct, tag="nodes", frozen=True):
    """Part of a snapshot: nodes that are new or changed, and those that are gone."""

    changed: tuple[NodeView, ...]
    gone: tuple[NodeUid, ...] = ()


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Plan on the nodes as sent so far."""

    number: int
    revision: int
    pending: tuple[Pending, ...]


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The process is up. Its first word, so that the time it takes to start is not taken for planning."""


class Answer(msgspec.Struct, tag="answer", frozen=True):
    number: int
    plan: Plan


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The planner raised. `error` is for the log; the traceback is on the process's standard error."""

    number: int
    error: str


ToPlanner = Nodes | Ask
FromPlanner = Ready | Answer | Failed

_encoder = msgspec.msgpack.Encoder()
_to_planner = msgspec.msgpack.Decoder(ToPlanner)
_from_planner = msgspec.msgpack.Decoder(FromPlanner)


class WireError(Exception):
    """The other end sent what is no message."""


def frame(message: ToPlanner | FromPlanner) -> bytes:
    data = _encoder.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def length_of(prefix: bytes) -> int:
    """Raises WireError."""
    length = int.from_bytes(prefix, "big")
    if length > FRAME_BYTES_MAX:
        raise WireError(f"a frame of {length} bytes, at most {FRAME_BYTES_MAX} are taken")
    return length


def to_planner(data: bytes) -> ToPlanner:
    """Raises WireError."""
    try:
        return _to_planner.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(str(error)) from error


def from_planner(data: bytes) -> FromPlanner:
    """Raises WireError."""
    try:
        return _from_planner.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(str(error)) from error
