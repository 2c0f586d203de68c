"""One gRPC stream to one address: opening it within a time, sending without ever blocking, reading until it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar, cast

import grpc
from grpc import aio

from virialpb.errors import ErrorDetails, FailedCall, details_from
from virialpb.tlsprobe import asks_for_tls
from virialpb.v1.node_pb2_grpc import NodeServiceStub

if TYPE_CHECKING:
    from virialpb.v1.node_pb2_grpc import NodeServiceAsyncStub

Up = TypeVar("Up")
Down = TypeVar("Down")

DIAL_SECONDS: Final = 3.0
QUEUE_MAX: Final = 4096
MESSAGE_BYTES_MAX: Final = 4 << 20
_OPTIONS: Final = (
    # A connection of its own: dialling anew must never get the one on which nothing comes back.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A path that has silently gone is found out below the streams too, and idle NAT entries are kept.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class DialFailed(Exception):
    """No connection to the address within DIAL_SECONDS."""


@dataclass(slots=True)
class Stream(Generic[Up, Down]):
    """An open stream. `send` queues; a writer of its own hands the queue to gRPC as the peer takes it."""

    address: str
    channel: aio.Channel
    call: aio.StreamStreamCall[Up, Down]
    kept: Callable[[], bool] = lambda: False
    """Whether the connection outlives the stream."""
    dropped: int = 0
    _queue: deque[Up] = field(default_factory=deque[Up])
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    _writer: asyncio.Task[None] | None = None

    def send(self, message: Up, replaces: Callable[[Up], bool] | None = None) -> bool:
        """False: the queue is full and the message dropped. `replaces`: a waiting last message that this outdates."""
        if replaces is not None and self._queue and replaces(self._queue[-1]):
            self._queue[-1] = message
            return True
        if len(self._queue) >= QUEUE_MAX:
            self.dropped += 1
            return False
        self._queue.append(message)
        self._wake.set()
        return True

    async def drained(self, at_most: int) -> None:
        """Wait until no more than so many messages are queued: for senders that can wait, such as logs."""
        while len(self._queue) > at_most and not self.call.done():
            self._room.clear()
            await self._room.wait()

    async def read(self) -> AsyncIterator[Down]:
        """What the peer sends, until the stream ends. Raises AioRpcError."""
        while (message := await self.call.read()) is not aio.EOF:
            yield cast("Down", message)

    async def close(self) -> None:
        """End the stream, and its connection unless that is kept. Never raises."""
        if self._writer is not None:
            self._writer.cancel()
        self.call.cancel()
        if not self.kept():
            with contextlib.suppress(Exception):
                await self.channel.close()

    def start(self) -> None:
        self._writer = asyncio.create_task(self._write(), name=f"stream writer {self.address}")

    async def _write(self) -> None:
        try:
            while True:
                while self._queue:
                    await self.call.write(self._queue.popleft())
                    self._room.set()
                self._wake.clear()
                await self._wake.wait()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader meets the same end, and says why
        finally:
            self._room.set()


class Dialer:
    """How controllers are reached: with TLS where `credentials` are given.

    Connections to the `warm` addresses are kept while no stream is on them: after a change of leader a stream then
    opens at once, and thousands of agents do not make their TLS handshakes in the same second.
    """

    def __init__(self, credentials: grpc.ChannelCredentials | None = None, warm: tuple[str, ...] = ()) -> None:
        self._credentials = credentials
        self._warm = warm
        self._kept: dict[str, aio.Channel] = {}

    def keep_warm(self) -> None:
        """Connect to every warm address that is not connected; to be called from time to time."""
        for address in self._warm:
            self._channel(address).get_state(try_to_connect=True)

    def renew(self, credentials: grpc.ChannelCredentials, in_use: aio.Channel | None = None) -> tuple[aio.Channel, ...]:
        """Connect with these from now on. Gives back the connections to close, not at once: one of them may be on its
        way to a stream. `in_use` goes with its stream.
        """
        self._credentials = credentials
        former = tuple(channel for channel in self._kept.values() if channel is not in_use)
        self._kept.clear()
        return former

    def suspect(self, address: str) -> None:
        """Nothing comes back on the connection to there: the next stream gets another one."""
        self._kept.pop(address, None)

    async def open(
        self, address: str, method: Callable[[NodeServiceAsyncStub], Callable[[], aio.StreamStreamCall[Up, Down]]]
    ) -> Stream[Up, Down]:
        """Connect and open one stream. Raises DialFailed."""
        channel = self._channel(address)
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                await self._ready(channel)
        except BaseException as error:
            if self._kept.get(address) is channel:
                del self._kept[address]
            with contextlib.suppress(Exception):
                await channel.close()
            if not isinstance(error, (TimeoutError, ConnectionError)):
                raise
            if self._credentials is None and await asyncio.to_thread(asks_for_tls, (address,)):
                raise DialFailed(f"{address} asks for TLS, and is called without it: set tls.ca") from None
            late = f"no connection within {DIAL_SECONDS:g} s"
            raise DialFailed(f"{address}: {late if isinstance(error, TimeoutError) else error}") from None
        stream = Stream(address, channel, method(NodeServiceStub(channel))())
        stream.kept = lambda: self._kept.get(address) is channel
        stream.start()
        return stream

    async def _ready(self, channel: aio.Channel) -> None:
        """Raises ConnectionError as soon as one attempt has failed, where there are others to dial."""
        if len(self._warm) < 2:
            await channel.channel_ready()
            return
        state = channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                raise ConnectionError("the connection was refused, or broke")
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)

    async def close(self) -> None:
        """Give up the kept connections. Never raises."""
        kept = list(self._kept.values())
        self._kept.clear()
        for channel in kept:
            with contextlib.suppress(Exception):
                await channel.close()

    def _channel(self, address: str) -> aio.Channel:
        channel = self._kept.get(address)
        if channel is None:
            if self._credentials is None:
                channel = aio.insecure_channel(address, options=_OPTIONS)
            else:
                channel = aio.secure_channel(address, self._credentials, options=_OPTIONS)
            if address in self._warm:
                self._kept[address] = channel
        return channel


def why(error: aio.AioRpcError) -> ErrorDetails:
    """What a failed stream said. Never raises."""
    return details_from(cast("FailedCall", error))
