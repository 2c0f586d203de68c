"""Reading a task's log through its node's bulk stream: bounded memory, and one slow reader holds up nobody.

A reader that does not keep up loses its request at the agent, not its place: once it has caught up, the log is asked
for again from the offset it got to.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from controld.core.ids import NodeUid, SlotId
from controld.service.convert.bulk import BulkOrder, LogCancel, LogChunk, LogRequest
from controld.service.failures import CallError
from virialpb.errors import details_for
from virialpb.reasons import Reason

READ_BYTES_MAX = 1 << 20
READS_PER_NODE_MAX = 64
ORDERS_MAX = 1_024


def unreachable(node: str, detail: str) -> CallError:
    return CallError(details_for(Reason.NODE_UNREACHABLE, subject=node, detail=detail))


def _refusal(text: str, subject: str, node: str) -> CallError:
    """What an agent refused: "REASON: words"."""
    reason, colon, words = text.partition(": ")
    known = Reason(reason) if colon and reason in set(Reason) else Reason.NOT_FOUND
    if known is Reason.NODE_UNREACHABLE:
        subject = node
    detail = f"{node} says: {(words if colon else text)[:200]}"
    return CallError(details_for(known, subject=subject, detail=detail))


class BulkLink:
    """One node's bulk stream: what waits to be sent on it, and the reads that wait for what comes in."""

    def __init__(self, node: str) -> None:
        self.node = node
        self._orders: deque[BulkOrder] = deque()
        self._ready = asyncio.Event()
        self._reads: dict[int, LogRead] = {}
        self._request_id = 0
        self.closed = False

    def put(self, order: BulkOrder) -> None:
        """Raises CallError when more waits than an agent that reads could leave behind."""
        if len(self._orders) >= ORDERS_MAX:
            raise unreachable(self.node, "its agent does not read its bulk stream")
        self._orders.append(order)
        self._ready.set()

    async def next_order(self) -> BulkOrder | None:
        """For one reader; None once the link is closed."""
        while not self._orders:
            if self.closed:
                return None
            self._ready.clear()
            await self._ready.wait()
        return self._orders.popleft()

    def register(self, read: LogRead) -> int:
        """A request id under which chunks reach `read`. Raises CallError."""
        if self.closed:
            raise unreachable(self.node, "its agent's connection broke")
        if len(self._reads) >= READS_PER_NODE_MAX:
            detail = f"{READS_PER_NODE_MAX} logs of {self.node} are being read"
            raise CallError(details_for(Reason.OVERLOADED, subject=self.node, detail=detail))
        self._request_id += 1
        self._reads[self._request_id] = read
        return self._request_id

    def forget(self, request_id: int, *, cancel: bool) -> None:
        if self._reads.pop(request_id, None) is None or not cancel or self.closed:
            return
        try:
            self.put(LogCancel(request_id))
        except CallError:
            self.close()  # the agent does not read: it shall connect anew

    def received(self, chunk: LogChunk) -> None:
        read = self._reads.get(chunk.request_id)
        if read is not None:  # else it was cancelled, and this was on its way
            read.receive(chunk)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._ready.set()
            for read in list(self._reads.values()):
                read.fail(unreachable(self.node, "its agent's connection broke while the log was read"))
            self._reads.clear()


class LogRead:
    """One caller reading one log. Use as an async iterator of chunks, and `close` it in any case."""

    def __init__(self, link: BulkLink, slot: SlotId, stream: str, offset: int, tail_bytes: int, follow: bool) -> None:
        self._link = link
        self._slot, self._stream, self._follow = slot, stream, follow
        self._offset, self._tail_bytes = offset, tail_bytes
        self._chunks: deque[LogChunk] = deque()
        self._chunks_bytes = 0
        self._ready = asyncio.Event()
        self._error: CallError | None = None
        self._ended = False
        self._request_id = 0
        self._ask()

    async def __aiter__(self) -> AsyncIterator[LogChunk]:
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self._chunks_bytes -= len(chunk.data)
                yield chunk
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            if not self._request_id:  # it had been cut off for being slow, and has caught up
                self._ask()
            self._ready.clear()
            await self._ready.wait()

    def receive(self, chunk: LogChunk) -> None:
        if chunk.error:
            self.fail(_refusal(chunk.error, f"the log of {self._slot}", self._link.node))
            return
        if self._chunks and self._chunks_bytes + len(chunk.data) > READ_BYTES_MAX:
            self._drop(cancel=True)
            return
        if chunk.data:
            self._chunks.append(chunk)
            self._chunks_bytes += len(chunk.data)
        self._offset, self._tail_bytes = chunk.next_offset, 0
        if chunk.end:
            self._ended = True
            self._drop(cancel=False)
        self._ready.set()

    def fail(self, error: CallError) -> None:
        self._error = error
        self._drop(cancel=False)
        self._ready.set()

    def close(self) -> None:
        self._drop(cancel=True)

    def _ask(self) -> None:
        self._request_id = self._link.register(self)
        self._link.put(
            LogRequest(self._request_id, self._slot, self._stream, self._offset, self._tail_bytes, self._follow)
        )

    def _drop(self, *, cancel: bool) -> None:
        if self._request_id:
            self._link.forget(self._request_id, cancel=cancel)
            self._request_id = 0


class LogRoutes:
    """Which node's bulk stream is where."""

    def __init__(self) -> None:
        self._links: dict[NodeUid, BulkLink] = {}
        self._changed = asyncio.Event()

    def attach(self, uid: NodeUid, node: str) -> BulkLink:
        """A new bulk stream of a node; an older one of it is closed."""
        before = self._links.get(uid)
        if before is not None:
            before.close()
        link = self._links[uid] = BulkLink(node)
        self._changed.set()
        self._changed = asyncio.Event()
        return link

    def detach(self, uid: NodeUid, link: BulkLink) -> None:
        link.close()
        if self._links.get(uid) is link:
            del self._links[uid]

    async def link(self, uid: NodeUid, node: str, wait_seconds: float) -> BulkLink:
        """The node's stream; one that is just reconnecting is waited for. Raises CallError."""
        try:
            async with asyncio.timeout(wait_seconds):
                while (link := self._links.get(uid)) is None:
                    await self._changed.wait()
        except TimeoutError:
            raise unreachable(node, "its agent is not connected") from None
        return link
