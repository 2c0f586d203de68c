"""The bulk stream: inventory until it is acknowledged, and logs on request. A connection of its own.

It follows the control stream: open while that has a session, to the same controller. Nothing here delays a beat.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

import grpc
from grpc import aio

from noded.core.messages import Inventory
from noded.link.backoff import Backoff
from noded.link.control import LinkLog
from noded.link.convert import (
    BulkDown,
    BulkUp,
    bulk_hello_to_proto,
    inventory_to_proto,
    log_chunk_to_proto,
)
from noded.link.logfiles import STREAMS, LogFiles
from noded.link.stream import Dialer, DialFailed, Stream, why
from noded.worker import Worker, WorkRefused, WorkTimeout
from virialpb.ids import Incarnation

CHUNK_BYTES: Final = 256 << 10
QUEUED_CHUNKS_MAX: Final = 8
READERS_MAX: Final = 64
FOLLOW_SECONDS: Final = 0.2
READ_SECONDS: Final = 10.0
ACK_SECONDS: Final = 10.0

T = TypeVar("T")

_BulkStream = Stream[BulkUp, BulkDown]


@dataclass(frozen=True, slots=True)
class Target:
    """Where the control stream has its session, and as whom."""

    address: str
    incarnation: Incarnation


class BulkLink:
    """`is_over(slot)`: no more output will come of it."""

    def __init__(
        self,
        dialer: Dialer,
        files: LogFiles,
        worker: Worker,
        random: Random,
        is_over: Callable[[str], bool],
        log: LinkLog,
    ) -> None:
        self._dialer = dialer
        self._files = files
        self._worker = worker
        self._backoff = Backoff(random)
        self._is_over = is_over
        self._log = log
        self._target: Target | None = None
        self._changed = asyncio.Event()
        self._inventory: Inventory | None = None
        self._seq = 0
        self._acked = 0
        self._readers: dict[int, asyncio.Task[None]] = {}
        # LogFiles keeps state for each stream of output, so its reads take turns.
        self._reading = asyncio.Lock()
        self.counters: Counter[str] = Counter()

    def renew(self, credentials: grpc.ChannelCredentials) -> None:
        """Of the next stream on; the present one ends with the control stream that it belongs to."""
        self._dialer.renew(credentials)

    def follow(self, target: Target | None) -> None:
        """The control stream has a session there; None: it has none."""
        if target != self._target:
            self._target = target
            self._changed.set()

    def report(self, inventory: Inventory) -> None:
        """What the node has; sent when it differs from the last, and on each new stream, until acknowledged."""
        if inventory != self._inventory:
            self._inventory = inventory
            self._seq += 1
            self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            target = self._target
            if target is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                stream: _BulkStream = await self._dialer.open(target.address, lambda stub: stub.Bulk)
            except DialFailed as failure:
                self._log.info("bulk.unreachable", address=target.address, why=str(failure))
            else:
                await self._serve(stream, target)
            await asyncio.sleep(self._backoff.next_seconds())

    async def _serve(self, stream: _BulkStream, target: Target) -> None:
        """Until the stream ends or the control stream's session is another."""
        self._acked = 0
        stream.send(bulk_hello_to_proto(target.incarnation))
        receiving = asyncio.create_task(self._receive(stream), name=f"bulk reader {target.address}")
        try:
            while not receiving.done() and self._target == target:
                self._changed.clear()
                if self._inventory is not None and self._acked < self._seq:
                    stream.send(inventory_to_proto(self._seq, self._inventory))
                waiting = asyncio.create_task(self._changed.wait())
                timeout = ACK_SECONDS if self._acked < self._seq else None
                await asyncio.wait((receiving, waiting), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
        finally:
            for task in (receiving, *self._readers.values()):
                task.cancel()
            self._readers.clear()
            await stream.close()

    async def _receive(self, stream: _BulkStream) -> None:
        try:
            async for message in stream.read():
                self._handle(stream, message)
        except aio.AioRpcError as error:
            self._log.info("bulk.broken", address=stream.address, why=why(error).message)

    def _handle(self, stream: _BulkStream, message: BulkDown) -> None:
        match message.WhichOneof("message"):
            case "inventory_ack":
                self._acked = max(self._acked, min(message.inventory_ack.seq, self._seq))
                self._backoff.reset()
            case "log_cancel":
                reader = self._readers.pop(message.log_cancel.request_id, None)
                if reader is not None:
                    reader.cancel()
            case "log_request":
                wanted = message.log_request
                request = LogRead(
                    wanted.request_id, wanted.slot, wanted.stream, wanted.offset, wanted.tail_bytes, wanted.follow
                )
                self._begin(stream, request)
            case _:
                self.counters["unknown_order"] += 1

    def _begin(self, stream: _BulkStream, request: LogRead) -> None:
        if request.request_id in self._readers:
            return
        refusal = self._refusal(request)
        if refusal:
            stream.send(log_chunk_to_proto(request.request_id, b"", request.offset, end=True, error=refusal))
            return
        task = asyncio.create_task(self._read_log(stream, request), name=f"log {request.request_id}")
        self._readers[request.request_id] = task
        task.add_done_callback(lambda _: self._readers.pop(request.request_id, None))

    def _refusal(self, request: LogRead) -> str:
        if len(self._readers) >= READERS_MAX:
            return f"OVERLOADED: {READERS_MAX} logs are being read on this node already"
        if request.stream not in STREAMS:
            return f"INVALID_SPEC: stream must be one of {', '.join(STREAMS)}"
        if "/" in request.slot or request.slot in ("", ".", "..") or not self._files.exists(request.slot):
            return "NOT_FOUND: this node keeps no logs of that task"
        return ""

    async def _read_log(self, stream: _BulkStream, request: LogRead) -> None:
        files, slot, name = self._files, request.slot, request.stream
        offset = request.offset
        try:
            offset = await self._file(lambda: files.start(slot, name, offset, request.tail_bytes))
            while True:
                over = not request.follow or self._is_over(slot)  # asked before the read: what comes later is read
                data, offset = await self._next(slot, name, offset)
                if data:
                    await stream.drained(QUEUED_CHUNKS_MAX)
                    stream.send(log_chunk_to_proto(request.request_id, data, offset, end=False))
                elif over:
                    break
                else:
                    await asyncio.sleep(FOLLOW_SECONDS)
            stream.send(log_chunk_to_proto(request.request_id, b"", offset, end=True))
        except (OSError, WorkTimeout, WorkRefused) as error:
            text = f"NODE_UNREACHABLE: the log cannot be read: {error}"
            stream.send(log_chunk_to_proto(request.request_id, b"", offset, end=True, error=text))

    async def _next(self, slot: str, stream: str, offset: int) -> tuple[bytes, int]:
        return await self._file(lambda: self._files.read(slot, stream, offset, CHUNK_BYTES))

    async def _file(self, read: Callable[[], T]) -> T:
        async with self._reading:
            return await self._worker.run(read, READ_SECONDS)


@dataclass(frozen=True, slots=True)
class LogRead:
    request_id: int
    slot: str
    stream: str
    offset: int
    tail_bytes: int
    follow: bool
