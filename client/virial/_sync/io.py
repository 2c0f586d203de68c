"""What differs between the synchronous and the asynchronous client: the twin of `virial._async.io`."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import grpc

from virial._connect import Tls, channel_options
from virialpb.tlsprobe import asks_for_tls
from virialpb.v1 import admin_pb2_grpc, cluster_pb2_grpc, job_pb2_grpc, join_pb2_grpc

RpcError = grpc.RpcError
Lock = threading.Lock


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
            self.channel = grpc.insecure_channel(address, options=channel_options())
        else:
            self.channel = grpc.secure_channel(address, tls.credentials(), options=channel_options())
        self.jobs = job_pb2_grpc.JobServiceStub(self.channel)
        self.cluster = cluster_pb2_grpc.ClusterServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.certificates = join_pb2_grpc.CertificateServiceStub(self.channel)

    def use(self) -> bool:
        """False when it is closed already: take another one."""
        with self._lock:
            self._users += not self._closed
            return not self._closed

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._retired and not self._users
            self._closed |= last
        if last:
            self.channel.close()

    def retire(self) -> None:
        """Close it as soon as nobody uses it any more."""
        with self._lock:
            self._retired = True
            unused = not self._users
            self._closed |= unused
        if unused:
            self.channel.close()

    def close(self) -> None:
        """Now, and so end whatever runs on it."""
        with self._lock:
            self._closed = True
        self.channel.close()


def answers_tls(addresses: Sequence[str]) -> bool:
    return asks_for_tls(addresses)


def sleep(seconds: float) -> None:
    time.sleep(seconds)
