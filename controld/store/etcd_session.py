"""An open wire and how long it is waited for: time-outs, repeated attempts, and an end that everybody hears of."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from controld.store.etcd_keys import Keys
from controld.store.etcd_wire import (
    LOCAL_RANGE,
    Meaning,
    Method,
    Req,
    Res,
    WatchStream,
    Wire,
    WireError,
    meaning,
)
from controld.store.port import StoreClosedError
from virialpb.etcd.v1 import etcd_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EtcdTimes:
    """All in seconds. A proposal that was lost in an election of etcd is never answered: for as long as one takes
    (`election`) attempts are short and close. After that each has twice the time of the last, and twice the pause: a
    slow disk must not be asked ever faster. `refused`: a member whose socket refuses for so long does not run, and what
    waits for it is told.
    """

    attempt: float = 0.2
    election: float = 1.0
    attempt_max: float = 3.0
    pause: float = 0.02
    pause_max: float = 0.2
    commit: float = 5.0
    campaign: float = 5.0
    refused: float = 5.0
    barrier: float = 0.5
    read: float = 10.0
    open: float = 30.0
    follow: float = 5.0
    status: float = 1.0
    compact: float = 60.0
    defragment: float = 300.0


class Attempts:
    """`while await attempts.next(): ...` until the time is over; the first attempt is always made.

    `usual_seconds`: what one takes where all is well; none is given less than twice that.
    """

    def __init__(self, times: EtcdTimes, total_seconds: float, usual_seconds: float = 0.0) -> None:
        self.timeout = min(max(times.attempt, 2 * usual_seconds), times.attempt_max)
        self._times = times
        self._pause = times.pause
        self._began = asyncio.get_running_loop().time()
        self._end = self._began + total_seconds
        self._made = 0
        self._refused_at: float | None = None

    async def next(self) -> bool:
        self._made += 1
        if self._made == 1:
            return True
        now = asyncio.get_running_loop().time()
        if now - self._began >= self._times.election:
            self.timeout = min(self.timeout * 2, self._times.attempt_max)
            self._pause = min(self._pause * 2, self._times.pause_max)
        if now + self._pause >= self._end:
            return False
        if self._refused_at is not None and now - self._refused_at >= self._times.refused:
            return False
        await asyncio.sleep(self._pause)
        return True

    def failed(self, error: WireError) -> None:
        """How the last attempt ended, where it is of interest that nobody listens."""
        if meaning(error) is not Meaning.REFUSED:
            self._refused_at = None
        elif self._refused_at is None:
            self._refused_at = asyncio.get_running_loop().time()


class Session:
    """One life of a store's connection."""

    def __init__(self, wire: Wire, keys: Keys, times: EtcdTimes) -> None:
        self.keys = keys
        self.times = times
        self._wire = wire
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def closed(self) -> bool:
        return self._closing.done()

    async def call(self, method: Method[Req, Res], request: Req, timeout_seconds: float) -> Res:
        """Raises WireError, StoreClosedError."""
        self.require_open()
        try:
            return await self._wire.call(method, request, timeout_seconds)
        except WireError:
            self.require_open()
            raise

    async def watch(self, create: pb.WatchCreateRequest, *, needs_leader: bool = True) -> WatchStream:
        """Raises WireError, StoreClosedError."""
        self.require_open()
        return await self.until_closed(self._wire.watch(create, needs_leader=needs_leader))

    async def keep_alive(self, lease: int, timeout_seconds: float) -> int:
        """Raises WireError, StoreClosedError."""
        self.require_open()
        return await self._wire.keep_alive(lease, timeout_seconds)

    async def until_closed(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises StoreClosedError where the end comes first, and what `work` raises."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._closing), return_when=asyncio.FIRST_COMPLETED)
            self.require_open()
            return task.result()
        finally:
            if not task.cancel() and not task.cancelled():
                task.exception()  # looked at, so that the loop does not complain of it

    async def sleep(self, seconds: float) -> None:
        """Raises StoreClosedError."""
        await self.until_closed(asyncio.sleep(seconds))

    async def compacted_revision(self) -> int:
        """Up to where the history is gone; 0: nothing of it. Asks the member alone. Raises WireError.

        etcd tells the number only to a watch that comes too late for it.
        """
        key = self.keys.prefix.encode() + b"/none"
        try:
            first = pb.RangeRequest(key=key, revision=1, serializable=True, count_only=True)
            await self.call(LOCAL_RANGE, first, self.times.status)
        except WireError as error:
            if meaning(error) is not Meaning.COMPACTED:
                raise
        else:
            return 0
        stream = await self.watch(pb.WatchCreateRequest(key=key, start_revision=1), needs_leader=False)
        try:
            async with asyncio.timeout(self.times.status):
                while True:
                    response = await self.until_closed(stream.read())
                    if response.compact_revision:
                        return response.compact_revision
        except TimeoutError as error:
            raise WireError(grpc.StatusCode.DEADLINE_EXCEEDED, "no word of what is compacted") from error
        finally:
            stream.cancel()

    def require_open(self) -> None:
        if self.closed:
            raise StoreClosedError("the store is closed")

    async def close(self) -> None:
        if not self._closing.done():
            self._closing.set_result(None)
        await self._wire.close()
