"""The wire over gRPC: one channel to one member at a time, time-outs on every call, keep-alive probes on the channel.

Published clients each fail one of: unix sockets, client certificates, compares of mod_revision, a watch that survives
its member; two of them cannot be loaded into one process. What is needed is little.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from controld.store.etcd_endpoint import Endpoint, EndpointError
from controld.store.etcd_wire import (
    KEEP_ALIVE_PATH,
    NEEDS_LEADER,
    WATCH_PATH,
    Method,
    Req,
    Res,
    WatchStream,
    WireError,
)
from virialpb.etcd.v1 import etcd_pb2 as pb

MESSAGE_BYTES_MAX: Final = 64 << 20  # a page of a load, or what a watch catches up with

# etcd ends connections that probe more often than its --grpc-keepalive-min-time, 5 s where it is not told otherwise.
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),  # a second try is the store's decision: it knows what may be said twice
)
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files: who signed the members' certificates, and what we show them."""

    ca: Path
    certificate: Path
    key: Path

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError."""
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes())


class _Stream:
    def __init__(self, call: grpc.aio.StreamStreamCall[pb.WatchRequest, pb.WatchResponse]) -> None:
        self._call = call

    async def read(self) -> pb.WatchResponse:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _wire_error(error) from error
        if not isinstance(response, pb.WatchResponse):
            raise WireError(await self._call.code(), f"the watch ended: {await self._call.details()}")
        return response

    def cancel(self) -> None:
        self._call.cancel()


class GrpcWire:
    """`endpoints`: one, the member beside this controller; of an etcd run by others also several, tried in turn."""

    def __init__(self, endpoints: Sequence[Endpoint], tls: ClientTls | None = None) -> None:
        if not endpoints:
            raise EndpointError("no endpoint of etcd is given")
        self._channels = [_channel(endpoint, tls) for endpoint in endpoints]
        self._current = 0
        self._closed = False

    async def call(self, method: Method[Req, Res], request: Req, timeout_seconds: float) -> Res:
        channel = self._channels[self._current]
        stub = channel.unary_unary(method.path, method.request.SerializeToString, method.response.FromString)
        metadata = NEEDS_LEADER if method.needs_leader else None
        try:
            return await stub(request, timeout=timeout_seconds, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            self._failed(channel, error.code())
            raise _wire_error(error) from error
        except grpc.aio.UsageError as error:  # the channel was closed
            raise WireError(grpc.StatusCode.CANCELLED, str(error)) from error
        except asyncio.CancelledError:
            # Closing a channel cancels its calls: their callers were not cancelled, and are told what happened.
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise WireError(grpc.StatusCode.CANCELLED, "the connection was closed") from None
            raise

    async def watch(self, create: pb.WatchCreateRequest, *, needs_leader: bool = True) -> WatchStream:
        channel = self._channels[self._current]
        stub = channel.stream_stream(WATCH_PATH, pb.WatchRequest.SerializeToString, pb.WatchResponse.FromString)
        call = stub(metadata=NEEDS_LEADER if needs_leader else None)
        try:
            await call.write(pb.WatchRequest(create_request=create))
        except grpc.aio.AioRpcError as error:
            self._failed(channel, error.code())
            raise _wire_error(error) from error
        except asyncio.InvalidStateError as error:  # it ended before the first word
            code = await call.code()
            self._failed(channel, code)
            raise WireError(code, await call.details()) from error
        except BaseException:
            call.cancel()
            raise
        return _Stream(call)

    async def keep_alive(self, lease: int, timeout_seconds: float) -> int:
        channel = self._channels[self._current]
        stub = channel.stream_stream(
            KEEP_ALIVE_PATH, pb.LeaseKeepAliveRequest.SerializeToString, pb.LeaseKeepAliveResponse.FromString
        )
        call = stub(timeout=timeout_seconds, metadata=NEEDS_LEADER)
        try:
            await call.write(pb.LeaseKeepAliveRequest(ID=lease))
            response = await call.read()
            if not isinstance(response, pb.LeaseKeepAliveResponse):
                raise WireError(await call.code(), await call.details())
        except grpc.aio.AioRpcError as error:
            raise _wire_error(error) from error
        except asyncio.InvalidStateError as error:
            raise WireError(await call.code(), await call.details()) from error
        finally:
            call.cancel()
        return response.TTL

    async def close(self) -> None:
        self._closed = True
        for channel in self._channels:
            await channel.close()

    def _failed(self, channel: grpc.aio.Channel, code: grpc.StatusCode) -> None:
        """Of several, the next call goes to another one; of calls that failed together the first decides."""
        if code in _LOST and self._channels[self._current] is channel:
            self._current = (self._current + 1) % len(self._channels)


def _channel(endpoint: Endpoint, tls: ClientTls | None) -> grpc.aio.Channel:
    if endpoint.secure:
        if tls is None:
            raise EndpointError(f"https://{endpoint.target} needs certificates: set the store's TLS files")
        return grpc.aio.secure_channel(endpoint.target, tls.credentials(), options=_OPTIONS)
    # etcd's HTTP/2 server refuses the percent-encoded path that gRPC would send as the authority of a socket.
    options = (*_OPTIONS, ("grpc.default_authority", "localhost"))
    return grpc.aio.insecure_channel(endpoint.target, options=options)


def _wire_error(error: grpc.aio.AioRpcError) -> WireError:
    return WireError(error.code(), error.details() or "")
