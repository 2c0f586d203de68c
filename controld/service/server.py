"""The gRPC server: what it serves, its bounds, where it listens."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, Protocol, cast

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from controld.service.address import AddressError, check_address
from controld.service.admin import AdminServicer
from controld.service.backend import Backend
from controld.service.cluster import ClusterServicer
from controld.service.connections import HANDSHAKE, at_most, connections_max
from controld.service.gate import Gate
from controld.service.interceptor import CallInterceptor
from controld.service.job import JobServicer
from controld.service.join import CertificateServicer, Registrar
from controld.service.log_reads import LogRoutes
from controld.service.metrics import Metrics
from controld.service.node import NodeServicer
from controld.service.replica import ReplicaServicer
from controld.service.telemetry import StructLog
from controld.service.tls import ServerTls
from virialpb.v1 import (
    admin_pb2_grpc,
    cluster_pb2_grpc,
    job_pb2_grpc,
    join_pb2_grpc,
    node_pb2_grpc,
    replica_pb2_grpc,
)

SERVICES = (
    "virialpb.v1.JobService",
    "virialpb.v1.ClusterService",
    "virialpb.v1.NodeService",
    "virialpb.v1.CertificateService",
)
# Not served in a simulation.
ADMIN_SERVICE = "virialpb.v1.AdminService"
# Served by one of several controllers only.
REPLICA_SERVICE = "virialpb.v1.ReplicaService"
METHODS = frozenset(
    name
    for servicer in (
        job_pb2_grpc.JobServiceServicer,
        admin_pb2_grpc.AdminServiceServicer,
        cluster_pb2_grpc.ClusterServiceServicer,
        node_pb2_grpc.NodeServiceServicer,
        replica_pb2_grpc.ReplicaServiceServicer,
        join_pb2_grpc.CertificateServiceServicer,
        join_pb2_grpc.JoinServiceServicer,
    )
    for name in vars(servicer)
    if not name.startswith("_")
)

# An inventory of 4,096 devices is about 2 MiB; a page of a list is cut at 2 MiB, one gang of 4,096 ranks is 3 MiB.
RECEIVE_BYTES_MAX = 4 << 20
SEND_BYTES_MAX = 16 << 20
OPTIONS: tuple[tuple[str, int], ...] = (
    HANDSHAKE,
    ("grpc.max_receive_message_length", RECEIVE_BYTES_MAX),
    ("grpc.max_send_message_length", SEND_BYTES_MAX),
    ("grpc.max_concurrent_streams", 1_024),
    # Two controllers must not share a port by accident: the second is told that it is in use.
    ("grpc.so_reuseport", 0),
    # Watches and agents may be silent for long: a dead peer is noticed within 30 s, a live one may ask every 5 s.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class _Health(Protocol):
    async def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None: ...
    async def enter_graceful_shutdown(self) -> None: ...


class ApiServer:
    """A single controller's is made after it leads, so what it serves is right from its first answer; one of several
    says who leads, or that it does not know yet.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        log: StructLog,
        metrics: Metrics,
        make_id: Callable[[], str],
        gate: Gate,
        registrar: Registrar,
    ) -> None:

        def revision() -> tuple[int, int]:
            return backend.leader.state.history, backend.leader.state.revision

        interceptor = CallInterceptor(log=log, metrics=metrics, make_id=make_id, revision=revision, gate=gate)
        self._metrics = metrics
        self._server = grpc.aio.server(interceptors=[interceptor], options=(*OPTIONS, at_most(connections_max())))
        routes = LogRoutes()
        job_pb2_grpc.add_JobServiceServicer_to_server(JobServicer(backend, routes), self._server)
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(ClusterServicer(backend, registrar), self._server)
        node_pb2_grpc.add_NodeServiceServicer_to_server(NodeServicer(backend, routes), self._server)
        join_pb2_grpc.add_CertificateServiceServicer_to_server(CertificateServicer(registrar), self._server)
        self._services = SERVICES
        if backend.admin is not None:
            self._services = (*self._services, ADMIN_SERVICE)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(backend, backend.admin), self._server)
        if backend.replica is not None:
            self._services = (*self._services, REPLICA_SERVICE)
            servicer = ReplicaServicer(backend.replica, backend.admin)
            replica_pb2_grpc.add_ReplicaServiceServicer_to_server(servicer, self._server)
        health_servicer: Any = cast("Any", health).aio.HealthServicer()  # the stubs know the threaded one only
        self._health: _Health = health_servicer
        cast("Any", health_pb2_grpc).add_HealthServicer_to_server(health_servicer, self._server)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int, tls: ServerTls | None) -> int:
        """The port it listens on; 0 takes a free one. Raises AddressError."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        credentials = tls.credentials() if tls is not None else None
        if tls is not None:
            self._metrics.tell_certificate(tls.not_after_seconds)
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            check_address(host, port)
            raise AddressError(errno.EADDRINUSE, f"cannot listen on {address}: {error}") from error
        await self._server.start()
        for service in ("", *self._services):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return bound

    async def stop(self, grace_seconds: float) -> None:
        """Take no new calls; give those under way so long. Streams are ended by the leader's own stop."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)
