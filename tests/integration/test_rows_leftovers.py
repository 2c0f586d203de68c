"""Row E9: what a killed process leaves behind makes nobody think that it lives, and what lives is not swept away.

The guardian's socket is in test_guardian_faults.py.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from controld.store import sqlite_file
from controld.store.etcd_client import GrpcWire
from controld.store.etcd_endpoint import SOCKET, parse_endpoint
from controld.store.etcd_wire import STATUS, WireError
from controld.store.member import MemberError, MemberInUseError, MemberProcess, ready
from noded.files import NodeFiles
from tests import support_etcd
from tests.integration.noded_support import noded_env
from virialpb.etcd.v1 import etcd_pb2 as pb

Patch = pytest.MonkeyPatch
ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 60.0
DEAD = {"grpc_address": "127.0.0.1:1", "metrics_address": "", "metrics": "127.0.0.1:1", "pid": 1}


# -- ports.json: whoever started a daemon on a free port looks there for it


@contextmanager
def taken_port() -> Generator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield int(taken.getsockname()[1])


def start_in_vain(directory: Path, program: str) -> None:
    """In a directory that a killed one left, on a port that another program has by now."""
    directory.mkdir(exist_ok=True)
    ports = directory / "ports.json"
    ports.write_text(json.dumps(DEAD))
    with taken_port() as port:
        flags = ["--data-dir", str(directory), "--metrics-listen", f"127.0.0.1:{port}"]
        flags += ["--listen", "127.0.0.1:0"] if "controld" in program else ["--runtime-dir", str(directory / "run")]
        done = subprocess.run(
            [sys.executable, "-c", program, *flags],
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            env=noded_env(),
            cwd=ROOT,
            check=False,
        )
    assert done.returncode != 0
    assert str(port) in done.stderr, "it is the port that kept it from starting"
    assert not ports.exists(), "the ports of a former life are still told"


CONTROLD = "import sys; from controld.__main__ import main; sys.exit(main(sys.argv[1:]))"
NODED = "import sys; from noded.__main__ import main; sys.exit(main(sys.argv[1:]))"
KEEPS_PORTS = {
    CONTROLD: f"import controld.app; controld.app.forget_ports = lambda _: None; {CONTROLD}",
    NODED: f"import noded.files; noded.files.NodeFiles.forget_ports = lambda _: None; {NODED}",
}


@pytest.mark.row("E9")
@pytest.mark.parametrize("program", [CONTROLD, NODED], ids=["controld", "noded"])
def test_the_ports_of_a_killed_one_are_told_to_nobody(tmp_path: Path, program: str) -> None:
    start_in_vain(tmp_path / "d", program)


@pytest.mark.row("E9", defect="keeps_the_ports_file")
@pytest.mark.parametrize("program", [CONTROLD, NODED], ids=["controld", "noded"])
def test_the_ports_catch_one_that_keeps_the_file(tmp_path: Path, program: str) -> None:
    with pytest.raises(AssertionError, match="still told"):
        start_in_vain(tmp_path / "d", KEEPS_PORTS[program])


# -- pid files: the lock counts, and what is written in it is only for the message


def lock_by_a_pid_alone(directory: Path) -> None:
    """A killed noded and a killed controld left files that name a process which is alive: this one."""
    for name in ("noded.lock", "lock"):
        (directory / name).write_text("1\n")
    files = NodeFiles(directory)
    files.open(lambda: "uid")
    files.close()
    lock = sqlite_file.DirectoryLock(directory)
    lock.acquire()
    lock.release()


@pytest.mark.row("E9")
def test_a_pid_in_a_lock_file_is_no_lock(tmp_path: Path) -> None:
    lock_by_a_pid_alone(tmp_path)


# -- the socket of an etcd member


@pytest.fixture
def member() -> Iterator[MemberProcess]:
    support_etcd.require_etcd()
    with ExitStack() as stack:
        (config,) = support_etcd.configs(support_etcd.short_directory(stack))
        process = MemberProcess(config)
        stack.callback(process.kill)
        yield process


async def answers(member: MemberProcess) -> bool:
    """Over a new connection."""
    wire = GrpcWire([parse_endpoint(member.config.endpoint)])
    try:
        return bool((await wire.call(STATUS, pb.StatusRequest(), 5.0)).leader)
    except WireError:
        return False
    finally:
        await wire.close()


async def killed_and_started_again(member: MemberProcess) -> None:
    member.start()
    await ready(member, HANG_SECONDS)
    member.kill()
    assert (member.config.directory / SOCKET).exists(), "it was killed: its socket file is left"
    member.start()
    await ready(member, HANG_SECONDS)
    assert await answers(member)


async def started_twice(member: MemberProcess) -> None:
    member.start()
    await ready(member, HANG_SECONDS)
    second = MemberProcess(member.config)
    try:
        with pytest.raises(MemberInUseError, match=r"in use by another controld \(pid \d+\)"):
            second.start()
    finally:
        second.kill()
    assert await answers(member), "the socket of the one that runs is still its own"


@pytest.mark.row("E9")
async def test_a_stale_socket_of_a_member_is_replaced(member: MemberProcess) -> None:
    await killed_and_started_again(member)


@pytest.mark.row("E9", defect="leaves_the_socket_to_etcd")
async def test_the_member_catches_one_that_leaves_the_socket(member: MemberProcess, monkeypatch: Patch) -> None:
    """etcd does not listen over what is there."""
    monkeypatch.setattr("controld.store.member.SOCKET", "another:1")
    with pytest.raises(MemberError, match=r"address already in use|ended"):
        await killed_and_started_again(member)


@pytest.mark.row("E9")
async def test_a_member_that_runs_keeps_its_socket(member: MemberProcess, monkeypatch: Patch) -> None:
    monkeypatch.setattr("controld.store.member.LOCK_SECONDS", 0.1)
    await started_twice(member)


@pytest.mark.row("E9", defect="takes_every_socket_for_stale")
async def test_the_member_catches_one_that_takes_every_socket_for_stale(
    member: MemberProcess, monkeypatch: Patch
) -> None:
    def acquire(lock: sqlite_file.DirectoryLock, _: float = 0.0) -> None:
        lock._descriptor = os.open(lock._path, os.O_RDWR | os.O_CREAT)

    monkeypatch.setattr(sqlite_file.DirectoryLock, "acquire", acquire)
    with pytest.raises(pytest.fail.Exception):
        await started_twice(member)
    assert not await answers(member)
