"""A controller that asks for certificates, and connections to it with this or that one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio

from controld.config import Config, TlsConfig
from tests.support_service import Served, quick_config, serve
from tests.support_tls import Files, Operator
from virialpb.v1 import cluster_pb2_grpc, job_pb2_grpc

# A connection of its own for each: gRPC would share one between two with equal options.
OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


@dataclass
class Secure:
    """`files`: what the controller serves with, which may be replaced while it runs."""

    served: Served
    operator: Operator
    files: Files

    @asynccontextmanager
    async def dial(self, files: Files) -> AsyncGenerator[Served]:
        """As whoever these files belong to."""
        async with grpc.aio.secure_channel(
            self.served.ports.grpc_address, files.credentials(), options=OPTIONS
        ) as channel:
            jobs: job_pb2_grpc.JobServiceAsyncStub = job_pb2_grpc.JobServiceStub(channel)
            cluster: cluster_pb2_grpc.ClusterServiceAsyncStub = cluster_pb2_grpc.ClusterServiceStub(channel)
            yield replace(self.served, channel=channel, jobs=jobs, cluster=cluster)


def secure_config(config: Config, files: Files) -> Config:
    return replace(config, tls=TlsConfig(str(files.certificate), str(files.key), str(files.ca)))


@asynccontextmanager
async def serve_securely(directory: Path) -> AsyncGenerator[Secure]:
    operator = Operator(directory / "certs")
    files = operator.issue("controller", "c1")
    async with serve(directory / "c1", secure_config(quick_config(directory / "c1"), files)) as served:
        yield Secure(served, operator, files)
