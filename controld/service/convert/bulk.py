"""The bulk stream of a node agent: inventories and logs."""

from __future__ import annotations

from dataclasses import dataclass

from controld.core.ids import Epoch, Incarnation, SlotId
from controld.core.model import Inventory
from controld.service.convert.agent import incarnation_from
from controld.service.convert.common import epoch_to_proto
from controld.service.convert.inventory import inventory_from_proto
from controld.service.failures import invalid_field
from virialpb.v1 import job_pb2, node_pb2


@dataclass(frozen=True, slots=True)
class InventoryReport:
    seq: int
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class LogChunk:
    """`next_offset`: of the byte after `data`, counted over rotations. `end`: nothing more will come."""

    request_id: int
    data: bytes
    next_offset: int
    end: bool
    error: str


@dataclass(frozen=True, slots=True)
class LogRequest:
    """`tail_bytes`: only so many last bytes, where `offset` is 0; 0: from the oldest kept."""

    request_id: int
    slot: SlotId
    stream: str
    offset: int
    tail_bytes: int
    follow: bool


@dataclass(frozen=True, slots=True)
class LogCancel:
    request_id: int


@dataclass(frozen=True, slots=True)
class InventoryAck:
    seq: int


BulkOrder = LogRequest | LogCancel | InventoryAck


def bulk_hello_from_proto(message: node_pb2.BulkUp) -> Incarnation:
    if message.WhichOneof("message") != "hello":
        raise invalid_field("hello", "must be the first message of a bulk stream")
    return incarnation_from(message.hello)


def bulk_from_proto(message: node_pb2.BulkUp) -> InventoryReport | LogChunk | None:
    """None for a kind of message that this controller does not know. Raises CallError for a malformed one."""
    match message.WhichOneof("message"):
        case "inventory":
            return InventoryReport(message.inventory.seq, inventory_from_proto(message.inventory.inventory))
        case "log_chunk":
            chunk = message.log_chunk
            return LogChunk(chunk.request_id, chunk.data, chunk.next_offset, chunk.end, chunk.error)
        case "hello":
            raise invalid_field("hello", "may only be the first message of a stream; open a new one")
        case _:
            return None


def bulk_to_proto(order: BulkOrder, leader_epoch: Epoch) -> node_pb2.BulkDown:
    message = node_pb2.BulkDown(leader_epoch=epoch_to_proto(leader_epoch))
    match order:
        case LogRequest():
            message.log_request.CopyFrom(
                node_pb2.LogRequest(
                    request_id=order.request_id,
                    slot=order.slot,
                    stream=order.stream,
                    offset=order.offset,
                    tail_bytes=order.tail_bytes,
                    follow=order.follow,
                )
            )
        case LogCancel():
            message.log_cancel.CopyFrom(node_pb2.LogCancel(request_id=order.request_id))
        case InventoryAck():
            message.inventory_ack.CopyFrom(node_pb2.InventoryAck(seq=order.seq))
    return message


def log_data_to_proto(data: bytes, generation: int, rank: int, next_offset: int) -> job_pb2.ReadLogsResponse:
    return job_pb2.ReadLogsResponse(data=data, generation=generation, rank=rank, next_offset=next_offset)
