"""What differs between the asynchronous and the synchronous client. `virial._sync.io` is its twin, written by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio

from virial._connect import Tls, channel_options
from virialpb.tlsprobe import asks_for_tls
from virialpb.v1 import admin_pb2_grpc, cluster_pb2_grpc, job_pb2_grpc, join_pb2_grpc

RpcError = grpc.aio.AioRpcError


class Lock:
    """Nothing: between two awaits nobody else runs. Its twin is a lock, as threads need one."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class Connection:
    """One channel to one controller, with its stubs. `use` and `leave` count who needs it."""

    def __init__(self, address: str, tls: Tls | None) -> None:
        self.address = address
        self._lock = Lock()
        self._users = 0
        self._retired = False
        self._closed = False
        self.stamp = () if tls is None else tls.stamp()
        if tls is None:
            self.channel = grpc.aio.insecure_channel(address, options=channel_options())
        else:
            self.channel = grpc.aio.secure_channel(address, tls.credentials(), options=channel_options())
        self.jobs = job_pb2_grpc.JobServiceStub(self.channel)
        self.cluster = cluster_pb2_grpc.ClusterServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.certificates = join_pb2_grpc.CertificateServiceStub(self.channel)

    def use(self) -> bool:
        """False when it is closed already: take another one."""
        with self._lock:
            self._users += not self._closed
            return not self._closed

    async def leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._retired and not self._users
            self._closed |= last
        if last:
            await self.channel.close()

    async def retire(self) -> None:
        """Close it as soon as nobody uses it any more."""
        with self._lock:
            self._retired = True
            unused = not self._users
            self._closed |= unused
        if unused:
            await self.channel.close()

    async def close(self) -> None:
        """Now, and so end whatever runs on it."""
        with self._lock:
            self._closed = True
        await self.channel.close()


async def answers_tls(addresses: Sequence[str]) -> bool:
    return await asyncio.to_thread(asks_for_tls, addresses)


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)
