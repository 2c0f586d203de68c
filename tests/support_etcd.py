"""Real etcd members for tests: one that many share under prefixes of their own, and clusters to be broken."""

from __future__ import annotations

import asyncio
import atexit
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from controld.store.etcd import EtcdStore
from controld.store.etcd_client import GrpcWire
from controld.store.etcd_endpoint import parse_endpoint
from controld.store.etcd_session import EtcdTimes
from controld.store.etcd_wire import STATUS, Wire, WireError
from controld.store.member import INSTALL_HINT, MemberMissingError, MemberProcess, find_etcd, ready
from controld.store.member_config import MemberConfig, PeerTls
from virialpb.etcd.v1 import etcd_pb2 as pb

READY_SECONDS = 60.0  # a hang guard
REQUIRED = "VIRIAL_ETCD"  # "required": a test that finds no etcd fails instead of being skipped
SMALL_BYTES = 1 << 20
_numbers = count(1)


def require_etcd() -> None:
    try:
        find_etcd()
    except MemberMissingError:
        if os.environ.get(REQUIRED) == "required":
            raise
        pytest.skip(f"etcd is not installed: {INSTALL_HINT}")


def short_directory(stack: ExitStack) -> Path:
    """The path of a socket has at most 107 bytes, and pytest's are long."""
    directory = Path(tempfile.mkdtemp(prefix="ve-"))
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    return directory


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def with_tls(config: MemberConfig, tls: PeerTls) -> MemberConfig:
    return replace(config, tls=tls)


def configs(directory: Path, number: int = 1, scheme: str = "http", **changes: Any) -> list[MemberConfig]:
    peers = {f"m{i}": f"{scheme}://127.0.0.1:{port}" for i, port in enumerate(free_ports(number))}
    made = [MemberConfig(name, directory / name, peers) for name in peers]
    return [replace(config, **changes) for config in made]


@dataclass
class Members:
    """Running members, and stores on them."""

    processes: list[MemberProcess]

    def store(self, index: int = 0, **options: Any) -> EtcdStore:
        """A handle that talks to one member alone."""
        return make_store(self.processes[index], **options)

    async def ready(self, *indices: int) -> None:
        chosen = [self.processes[i] for i in indices] or self.processes
        await asyncio.gather(*(ready(process, READY_SECONDS) for process in chosen))

    async def leader(self) -> int:
        """The index of the leading member; waits until one leads."""
        while True:
            for index, process in enumerate(self.processes):
                if process.poll() is not None:
                    continue
                wire = GrpcWire([parse_endpoint(process.config.endpoint)])
                try:
                    status = await wire.call(STATUS, pb.StatusRequest(), 1.0)
                    if status.leader and status.leader == status.header.member_id:
                        return index
                except WireError:
                    continue
                finally:
                    await wire.close()
            await asyncio.sleep(0.05)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()


def start(stack: ExitStack, number: int = 1, **changes: Any) -> Members:
    require_etcd()
    directory = short_directory(stack)
    members = Members([MemberProcess(config) for config in configs(directory, number, **changes)])
    stack.callback(members.stop)
    for process in members.processes:
        process.start()
    return members


@cache
def shared() -> Members:
    """One member for all tests that do not hurt it."""
    stack = ExitStack()
    atexit.register(stack.close)
    return start(stack)


def make_store(
    process: MemberProcess,
    *,
    prefix: str = "virial",
    times: EtcdTimes | None = None,
    directory: Path | None = None,
    size_bytes_max: int = 8 << 30,
    wrap: Callable[[Wire], Wire] = lambda wire: wire,
) -> EtcdStore:
    endpoint = parse_endpoint(process.config.endpoint)
    return EtcdStore(
        lambda: wrap(GrpcWire([endpoint])),
        rng=random.Random(next(_numbers)),
        prefix=prefix,
        times=times,
        directory=directory,
        size_bytes_max=size_bytes_max,
    )


def fresh_prefix() -> str:
    return f"t{next(_numbers)}"


def makers(stack: ExitStack) -> Mapping[str, Callable[[], EtcdStore]]:
    """`make`: handles on one empty store; `make_small`: on one of about a megabyte, in a member of its own."""
    require_etcd()
    prefix = fresh_prefix()

    def small() -> EtcdStore:
        return start(stack, size_bytes_max=SMALL_BYTES).store(size_bytes_max=SMALL_BYTES)

    return {"make": lambda: shared().store(prefix=prefix), "make_small": small}
