"""Whoever only connects takes little: callers that are not known yet cannot take the files that all the rest needs."""

from __future__ import annotations

import asyncio
import resource
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import grpc
import grpc.aio
import pytest

from controld.service import connections, join_server
from tests.integration.test_join import joining_config
from tests.support_service import HANG_SECONDS, quick_config, serve
from tests.support_tls import Files, Operator
from virialpb import certificates as c
from virialpb.v1 import cluster_pb2, cluster_pb2_grpc

Patch = pytest.MonkeyPatch


async def status(address: str, credentials: grpc.ChannelCredentials) -> None:
    async with grpc.aio.secure_channel(address, credentials) as channel:
        stub: cluster_pb2_grpc.ClusterServiceAsyncStub = cluster_pb2_grpc.ClusterServiceStub(channel)
        await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=HANG_SECONDS)


async def silent(stack: ExitStack, address: str) -> asyncio.StreamReader:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    stack.callback(writer.close)
    return reader


async def hung_up(readers: list[asyncio.StreamReader], count: int) -> None:
    """Wait until so many of them have been."""
    async with asyncio.timeout(HANG_SECONDS):
        while sum(reader.at_eof() or reader.exception() is not None for reader in readers) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_silent_connections_where_nodes_join_are_few_and_short(tmp_path: Path, monkeypatch: Patch) -> None:
    short = ("grpc.server_handshake_timeout_ms", 1_000)
    assert connections.HANDSHAKE in join_server.OPTIONS
    options = tuple(short if one == connections.HANDSHAKE else one for one in join_server.OPTIONS)
    monkeypatch.setattr(join_server, "OPTIONS", options)
    operator = Operator(tmp_path / "certs")
    admin = operator.issue("admin", "ann")
    most = join_server.CONNECTIONS_MAX
    async with serve(tmp_path / "c", joining_config(quick_config(tmp_path / "c"), operator)) as served:
        with ExitStack() as stack:
            readers = [await silent(stack, served.ports.join_address) for _ in range(most + 40)]
            await hung_up(readers, 40)
            await status(served.ports.grpc_address, admin.credentials())
            await hung_up(readers, most + 40)
            await hung_up([await silent(stack, served.ports.join_address)], 1)


def test_files_are_left_for_the_controller_itself(monkeypatch: Patch) -> None:
    limits = [(1_024, 4_096)]

    def limit(_: int) -> tuple[int, int]:
        return limits[-1]

    def set_limit(_: int, new: tuple[int, int]) -> None:
        limits.append(new)

    monkeypatch.setattr(resource, "getrlimit", limit)
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert connections.connections_max() == 4_096 - connections.FILES_KEPT
    assert limits[-1] == (4_096, 4_096)
    limits.append((100, 100))
    assert connections.connections_max() == connections.CONNECTIONS_MIN
    limits.append((-1, -1))
    assert connections.connections_max() == connections.FILES_MAX - connections.FILES_KEPT


async def test_who_holds_the_issuer_does_not_pass_for_a_controller(tmp_path: Path) -> None:
    operator = Operator(tmp_path / "certs")
    issuer, user = operator.issue("issuer", "join"), operator.issue("user", "alice")
    signer = c.load_authority(issuer.certificate.read_bytes(), issuer.key.read_bytes())
    ours = operator.issue("controller", "c1")
    key = c.new_key()
    forged = c.issue(signer, key.public_key(), "c1", datetime.now(UTC), 1, hosts=("127.0.0.1",), serves=True)
    assert "UNAVAILABLE" in await answer(c.key_pem(key), forged, user)
    assert "UNIMPLEMENTED" in await answer(ours.key.read_bytes(), ours.certificate.read_bytes(), user)


async def answer(key: bytes, certificate: bytes, user: Files) -> str:
    """What a caller gets of a server with such a certificate."""
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    await server.start()
    try:
        await status(f"127.0.0.1:{port}", user.credentials())
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        await server.stop(0)
    return "OK"
