"""The other controllers over gRPC: the ports `Peers` and `Colleagues`.

Questions share a channel to each peer; each stream of pings has a connection of its own, since one on which nothing
comes any more, and which nobody closes, must not be what the next stream gets. With new certificates new connections
are made before the old ones are given up: nobody may take a renewal for the silence of a leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final, cast

import grpc
import grpc.aio

from controld.replica.election import Verdict
from controld.replica.peers import HandedOver, HandOver, PeerLostError, Ping
from controld.replica.survey import Told
from controld.service.convert import messages as m
from controld.service.convert import replica as convert
from virialpb.tlsfiles import TlsContent
from virialpb.v1 import replica_pb2_grpc

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # A peer that comes back is found at once: an election takes less than a default back-off.
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", 64 << 10),
)

RETIRE_SECONDS: Final = 10.0
PROVE_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class _Listening:
    """A stream of pings on a connection of its own. `version`: of the certificate it was made with."""

    channel: grpc.aio.Channel
    call: grpc.aio.UnaryStreamCall[m.PingRequest, m.PingResponse]
    version: int


class GrpcPeers:
    """`address` is this controller's own. With `tls` peers are reached over TLS, and shown its certificate."""

    def __init__(self, address: str, tls: TlsContent | None = None) -> None:
        self._address = address
        self._credentials = None if tls is None else _credentials(tls)
        self._version = 0
        self.listens_with = 0
        """The version of the certificate that the newest pings came over a connection of."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def renew(self, tls: TlsContent) -> None:
        """From now on connect with these. Calls under way end on the connections they are on."""
        self._credentials = _credentials(tls)
        self._version += 1
        while self._channels:
            _, channel = self._channels.popitem()
            self._close(channel, RETIRE_SECONDS)

    async def pings(self, address: str) -> AsyncGenerator[Ping]:
        present, successor = self._listen(address), None
        self.listens_with = present.version
        try:
            while (message := await present.call.read()) is not grpc.aio.EOF:
                yield convert.ping_from_proto(cast("m.PingResponse", message))
                if successor is not None and successor.done():
                    found, successor = successor.result(), None
                    if found is not None:
                        self._end(present)
                        present = found
                        self.listens_with = present.version
                elif successor is None and present.version != self._version:
                    successor = asyncio.create_task(self._proven(address), name=f"new connection to {address}")
        except grpc.aio.AioRpcError as error:
            raise _lost(address, error) from error
        finally:
            if successor is not None:
                successor.cancel()
            self._end(present)
        raise PeerLostError(f"{address} sends no pings any more")

    def _listen(self, address: str) -> _Listening:
        channel = self._channel(address)
        return _Listening(channel, _stub(channel).Ping(convert.ping_request(self._address)), self._version)

    async def _proven(self, address: str) -> _Listening | None:
        """A stream on which a ping came; None where none did."""
        listening = self._listen(address)
        try:
            async with asyncio.timeout(PROVE_SECONDS):
                if await listening.call.read() is not grpc.aio.EOF:
                    return listening
        except (TimeoutError, grpc.aio.AioRpcError):
            pass
        except asyncio.CancelledError:
            self._end(listening)
            raise
        self._end(listening)
        return None

    def _end(self, listening: _Listening) -> None:
        listening.call.cancel()
        self._close(listening.channel, None)

    def _close(self, channel: grpc.aio.Channel, grace_seconds: float | None) -> None:
        """Without waiting for it."""
        task = asyncio.create_task(channel.close(grace_seconds))
        self._closing[task] = channel
        task.add_done_callback(lambda done: self._closing.pop(done, None))

    async def ask(self, address: str, token: int) -> Verdict:
        try:
            answer = await _stub(self._shared(address)).AskAgreement(convert.question_to_proto(token))
        except grpc.aio.AioRpcError as error:
            raise _lost(address, error) from error
        return convert.verdict_from_proto(answer)

    async def hand_over(self, address: str, request: HandOver) -> HandedOver:
        try:
            answer = await _stub(self._shared(address)).HandOver(convert.hand_over_to_proto(request))
        except grpc.aio.AioRpcError as error:
            raise _lost(address, error) from error
        return convert.handed_over_from_proto(answer)

    async def look(self, address: str) -> Told:
        try:
            answer = await _stub(self._shared(address)).Look(convert.look_request())
        except grpc.aio.AioRpcError as error:
            raise _lost(address, error) from error
        return convert.told_from_proto(answer)

    async def defragment(self, address: str) -> int:
        try:
            answer = await _stub(self._shared(address)).Defragment(convert.defragment_request())
        except grpc.aio.AioRpcError as error:
            raise _lost(address, error) from error
        return answer.size_bytes

    async def close(self) -> None:
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()
        for task, channel in tuple(self._closing.items()):
            task.cancel()
            await channel.close()

    def _shared(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._channel(address)
        return self._channels[address]

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials, options=_OPTIONS)


def _credentials(tls: TlsContent) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)


def _stub(channel: grpc.aio.Channel) -> replica_pb2_grpc.ReplicaServiceAsyncStub:
    stub: replica_pb2_grpc.ReplicaServiceAsyncStub = replica_pb2_grpc.ReplicaServiceStub(channel)
    return stub


def _lost(address: str, error: grpc.aio.AioRpcError) -> PeerLostError:
    return PeerLostError(f"{address}: {error.code().name} {error.details() or ''}".rstrip())
