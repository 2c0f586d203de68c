"""What differs between the synchronous and the asynchronous client: the twin of `virial._async.io`."""

from __future__ import annotations

import time

import grpc

from virial._connect import Tls, channel_options
from virialpb.v1 import cluster_pb2_grpc, job_pb2_grpc

RpcError = grpc.RpcError


class Connection:
    """One channel to one controller, with its stubs."""

    def __init__(self, address: str, tls: Tls | None) -> None:
        self.address = address
        if tls is None:
            self.channel = grpc.insecure_channel(address, options=channel_options())
        else:
            self.channel = grpc.secure_channel(address, tls.credentials(), options=channel_options())
        self.jobs = job_pb2_grpc.JobServiceStub(self.channel)
        self.cluster = cluster_pb2_grpc.ClusterServiceStub(self.channel)

    def close(self) -> None:
        self.channel.close()


def sleep(seconds: float) -> None:
    time.sleep(seconds)
