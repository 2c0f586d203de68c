"""Where nodes join: an address of its own, over TLS, at which no certificate is asked for and nothing else is served.

gRPC for Python asks every caller of an address for a certificate or none, so this cannot be the address of the others.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final

import grpc.aio

from controld.service.address import AddressError, check_address
from controld.service.connections import HANDSHAKE, at_most
from controld.service.gate import JoinGate
from controld.service.interceptor import CallInterceptor
from controld.service.join import JoinServicer, Registrar
from controld.service.metrics import Metrics
from controld.service.telemetry import StructLog
from controld.service.tls import ServerTls
from virialpb.v1 import join_pb2_grpc

# Anyone may connect: little is taken from each, and from all together.
CALLS_MAX: Final = 64
CONNECTIONS_MAX: Final = 128
OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    HANDSHAKE,
    at_most(CONNECTIONS_MAX),
    ("grpc.max_receive_message_length", 64 << 10),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_connection_age_ms", 60_000),
    ("grpc.max_connection_idle_ms", 20_000),
    ("grpc.so_reuseport", 0),
)


class JoinServer:
    def __init__(self, registrar: Registrar, *, log: StructLog, metrics: Metrics, make_id: Callable[[], str]) -> None:
        def revision() -> tuple[int, int]:
            return 0, 0  # nothing is read here

        interceptor = CallInterceptor(log=log, metrics=metrics, make_id=make_id, revision=revision, gate=JoinGate())
        self._server = grpc.aio.server(interceptors=[interceptor], options=OPTIONS, maximum_concurrent_rpcs=CALLS_MAX)
        join_pb2_grpc.add_JoinServiceServicer_to_server(JoinServicer(registrar), self._server)

    async def start(self, host: str, port: int, tls: ServerTls) -> int:
        """The port it listens on; 0 takes a free one. Raises AddressError."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._server.add_secure_port(address, tls.credentials(ask=False))
        except RuntimeError as error:
            check_address(host, port)
            raise AddressError(errno.EADDRINUSE, f"cannot listen on {address}: {error}") from error
        await self._server.start()
        return bound

    async def stop(self) -> None:
        await self._server.stop(1.0)
