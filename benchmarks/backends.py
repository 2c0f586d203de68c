"""The stores that are measured, made anew in a folder: SQLite, memory, and etcd members of our own on this machine."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from benchmarks.clients import Call
from controld.store.etcd import EtcdStore
from controld.store.etcd_client import GrpcWire
from controld.store.etcd_endpoint import parse_endpoint
from controld.store.etcd_wire import Method
from controld.store.member import MemberMissingError, MemberProcess, ready
from controld.store.member_config import MemberConfig
from controld.store.memory import MemoryStore
from controld.store.port import Store
from controld.store.sqlite import SqliteStore
from virialpb.etcd.v1 import etcd_pb2 as pb

PUT = Method("/etcdserverpb.KV/Put", pb.PutRequest, pb.PutResponse)
RAW_KEYS = 100_000
CALL_SECONDS = 30.0


@dataclass
class Backend:
    """`store` gives a new, empty one each time; `arguments` are controld's for one of its own."""

    folder: Path
    store: Callable[[], Store]
    arguments: tuple[str, ...]
    members: list[MemberProcess] = field(default_factory=list[MemberProcess])

    def cpu_s(self) -> float:
        """Processor time that the members have used."""
        return sum(_cpu_s(member.pid) for member in self.members)

    def raw(self, record_bytes: int) -> AbstractAsyncContextManager[Call] | None:
        """One put a call into the same member, where there is one."""
        return _raw(self.members[0], record_bytes) if self.members else None


def _cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def _raw(member: MemberProcess, record_bytes: int) -> AsyncGenerator[Call]:
    wire = GrpcWire([parse_endpoint(member.config.endpoint)])
    value = bytes(record_bytes)
    numbers = count()

    async def put(client: int, turn: int) -> None:
        del client, turn
        request = pb.PutRequest(key=b"raw/%07d" % (next(numbers) % RAW_KEYS), value=value)
        await wire.call(PUT, request, CALL_SECONDS)

    try:
        yield put
    finally:
        await wire.close()


@asynccontextmanager
async def backend(kind: str, folder: Path, members: int) -> AsyncGenerator[Backend]:
    if kind == "etcd":
        with ExitStack() as stack:
            running = _start(stack, folder, members)
            await asyncio.gather(*(ready(member, CALL_SECONDS) for member in running))
            numbers = count()
            endpoint = parse_endpoint(running[0].config.endpoint)
            yield Backend(
                folder,
                lambda: EtcdStore(
                    lambda: GrpcWire([endpoint]), rng=random.Random(next(numbers)), prefix=f"b{next(numbers)}"
                ),
                ("--store-kind", "etcd", "--store-member-dir", str(running[0].config.directory)),
                running,
            )
    elif kind == "sqlite":
        numbers = count()
        yield Backend(folder, lambda: SqliteStore(folder / f"data-{next(numbers)}"), ("--store-kind", "sqlite"))
    else:
        yield Backend(folder, MemoryStore, ("--store-kind", "memory"))


def _start(stack: ExitStack, folder: Path, number: int) -> list[MemberProcess]:
    with ExitStack() as ports:
        sockets = [ports.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        peers = {f"m{i}": f"http://127.0.0.1:{each.getsockname()[1]}" for i, each in enumerate(sockets)}
    members = [MemberProcess(MemberConfig(name, folder / name, peers)) for name in peers]
    for member in members:
        try:
            member.start()
        except MemberMissingError as error:
            sys.exit(f"benchmarks.commit: {error}")
        stack.callback(member.kill)
    return members
