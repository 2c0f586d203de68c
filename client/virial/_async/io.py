"""What differs between the asynchronous and the synchronous client. `virial._sync.io` is its twin, written by hand."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from virial._connect import Tls, channel_options
from virialpb.v1 import cluster_pb2_grpc, job_pb2_grpc

RpcError = grpc.aio.AioRpcError


class Connection:
    """One channel to one controller, with its stubs."""

    def __init__(self, address: str, tls: Tls | None) -> None:
        self.address = address
        if tls is None:
            self.channel = grpc.aio.insecure_channel(address, options=channel_options())
        else:
            self.channel = grpc.aio.secure_channel(address, tls.credentials(), options=channel_options())
        self.jobs = job_pb2_grpc.JobServiceStub(self.channel)
        self.cluster = cluster_pb2_grpc.ClusterServiceStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)
