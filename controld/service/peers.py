"""The other controllers over gRPC: the ports `Peers` and `Colleagues`.

Questions share a channel to each peer; each stream of pings has a connection of its own, since one on which nothing
comes any more, and which nobody closes, must not be what the next stream gets.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc
import grpc.aio

from controld.replica.election import Verdict
from controld.replica.peers import HandedOver, HandOver, PeerLostError, Ping
from controld.replica.survey import Told
from controld.service.convert import replica as convert
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


class GrpcPeers:
    """`address` is this controller's own. With `credentials` peers are reached over TLS."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._address = address
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def pings(self, address: str) -> AsyncGenerator[Ping]:
        async with self._channel(address) as channel:
            call = _stub(channel).Ping(convert.ping_request(self._address))
            try:
                async for message in call:
                    yield convert.ping_from_proto(message)
            except grpc.aio.AioRpcError as error:
                raise _lost(address, error) from error
            finally:
                call.cancel()
        raise PeerLostError(f"{address} sends no pings any more")

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

    def _shared(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._channel(address)
        return self._channels[address]

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials, options=_OPTIONS)


def _stub(channel: grpc.aio.Channel) -> replica_pb2_grpc.ReplicaServiceAsyncStub:
    stub: replica_pb2_grpc.ReplicaServiceAsyncStub = replica_pb2_grpc.ReplicaServiceStub(channel)
    return stub


def _lost(address: str, error: grpc.aio.AioRpcError) -> PeerLostError:
    return PeerLostError(f"{address}: {error.code().name} {error.details() or ''}".rstrip())
