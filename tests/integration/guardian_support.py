"""Real guardians for tests: one a test, in directories of its own, gone with the test."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from noded.run import procs
from noded.run.cgroup import find_places, remove_places, sweep
from noded.run.client import ClientEvent, GuardianClient, GuardianRefused
from noded.run.protocol import Exit, PrepareRequest, SlotStatus, TaskCall, TaskExit, TaskProgress, TaskSpec, Token

ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 60.0
LONG_NS = 600 * 10**9


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def alive(pid: int) -> bool:
    process = procs.read_process(pid)
    return process is not None and not process.zombie


def unlocked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def mark_of(world: World) -> str:
    return hashlib.sha256(os.fsencode(world.data_dir)).hexdigest()[:16]


def groups_of(world: World, below: str = "") -> list[Path]:
    """Its guardian's groups in every hierarchy, or a file in them."""
    return sorted(Path("/sys/fs/cgroup").rglob(f"virial-{mark_of(world)}/{below}".rstrip("/")))


def remove_groups(world: World) -> None:
    """What a killed guardian left under /sys/fs/cgroup."""
    places = find_places(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text(), f"virial-{mark_of(world)}")
    sweep(places)
    remove_places(places)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


async def until(check: Callable[[], object], what: str) -> None:
    """A hang guard, not a measure."""
    give_up = time.monotonic() + HANG_SECONDS
    while not check():
        assert time.monotonic() < give_up, f"never: {what}"
        await asyncio.sleep(0.01)


@dataclass
class World:
    """The directories of one node, and clients of its guardian."""

    base: Path
    fencing: str = "auto"
    clients: list[GuardianClient] = field(default_factory=list[GuardianClient])
    readers: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    @property
    def data_dir(self) -> Path:
        return self.base / "data"

    @property
    def runtime_dir(self) -> Path:
        return self.base / "run"

    @property
    def guardian_pid(self) -> int:
        return int((self.data_dir / "guardian.lock").read_text())

    async def noded(self, **options: Any) -> Noded:
        wanted: dict[str, Any] = {"allow_root_tasks": True, "fencing": self.fencing, **options}
        client = GuardianClient(self.data_dir, self.runtime_dir, **wanted)
        self.clients.append(client)
        noded = Noded(client)
        await client.connect()
        self.readers.append(asyncio.create_task(noded.read()))
        return noded

    def status(self, slot: str) -> dict[str, Any]:
        try:
            return json.loads((self.data_dir / "tasks" / slot / "status.json").read_bytes())
        except FileNotFoundError:
            return {}

    def log(self, slot: str, name: str = "stdout") -> str:
        try:
            return (self.data_dir / "tasks" / slot / f"{name}.log").read_text()
        except FileNotFoundError:
            return ""

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for reader in self.readers:
            reader.cancel()
        await asyncio.gather(*self.readers, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError, ValueError):
            pid = self.guardian_pid
            if alive(pid) and str(self.data_dir) in command_line(pid):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
                await until(lambda: not alive(pid), "guardian killed")
        await until(lambda: unlocked(self.data_dir / "guardian.lock"), "its scribe has written the last lines")
        remove_groups(self)
        shutil.rmtree(self.base, ignore_errors=True)


class Noded:
    """A client and what it heard."""

    def __init__(self, client: GuardianClient) -> None:
        self.client = client
        self.heard: list[ClientEvent] = []

    async def read(self) -> None:
        async for event in self.client.events():
            self.heard.append(event)

    async def exit_of(self, slot: str) -> TaskExit:
        found: list[TaskExit] = []

        def look() -> bool:
            found[:] = [event for event in self.heard if isinstance(event, TaskExit) and event.slot == slot]
            return bool(found)

        await until(look, f"task_exit of {slot}")
        return found[-1]

    async def ended(self, slot: str) -> Exit:
        """As the guardian lists it: also when nobody heard the event."""
        give_up = time.monotonic() + HANG_SECONDS
        while (end := (await self.status(slot)).exit) is None:
            assert time.monotonic() < give_up, f"{slot} never ended"
            await asyncio.sleep(0.01)
        return end

    def calls(self) -> list[TaskCall]:
        return [event for event in self.heard if isinstance(event, TaskCall)]

    def progress(self) -> list[TaskProgress]:
        return [event for event in self.heard if isinstance(event, TaskProgress)]

    async def status(self, slot: str) -> SlotStatus:
        return next(status for status in await self.client.list_slots() if status.slot == slot)

    async def run(self, argv: list[str], slot: str = "j.1.0", **options: Any) -> SlotStatus:
        """Prepares and starts; `options` go into the request, or into the spec when it has that field."""
        wanted = ask(argv, slot, **options)
        await self.client.prepare(wanted)
        await self.client.start(slot, wanted.token, {})
        return await self.status(slot)

    async def run_leased(self, argv: list[str], lease_ms: int, **options: Any) -> SlotStatus:
        """Runs with a short lease. A loaded machine may take longer than that to start it: then with a longer one."""
        for attempt in range(8):
            deadline_ns = now_ns() + (lease_ms << attempt) * 1_000_000
            with contextlib.suppress(GuardianRefused):
                return await self.run(argv, f"leased{attempt}.1.0", deadline_ns=deadline_ns, **options)
        raise AssertionError("no lease was long enough")


def ask(argv: list[str], slot: str = "j.1.0", **options: Any) -> PrepareRequest:
    of_spec = {name: options.pop(name) for name in list(options) if name in TaskSpec.__dataclass_fields__}
    spec: dict[str, Any] = {"argv": tuple(argv), "env": {}, **of_spec}
    job, generation, _ = slot.rsplit(".", 2)
    return PrepareRequest(
        slot=slot,
        token=Token(job, int(generation), (0, int(generation) * 10)),
        spec=TaskSpec(**spec),
        deadline_ns=options.pop("deadline_ns", now_ns() + LONG_NS),
        **options,
    )


def new_base() -> Path:
    """Not pytest's tmp_path: that is too long for unix sockets, and closed to tasks of other users."""
    base = Path(tempfile.mkdtemp(prefix="vg-", dir="/tmp"))
    base.chmod(0o755)
    return base


@contextlib.asynccontextmanager
async def new_world(fencing: str = "auto") -> AsyncGenerator[World]:
    world = World(new_base(), fencing)
    try:
        yield world
    finally:
        await world.close()


def start_by_hand(world: World, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Without a client; `options` go to subprocess.run."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "noded.run.guardian", "--detach"),
            *("--data-dir", str(world.data_dir), "--runtime-dir", str(world.runtime_dir), *more),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        **options,
    )


class TaskChannel:
    """The task's end of VIRIAL_SOCK, spoken from the test."""

    def __init__(self, world: World) -> None:
        (path,) = (world.runtime_dir / "t").glob("*.sock")
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(HANG_SECONDS)
        self.sock.connect(str(path))
        self.file = self.sock.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict[str, Any]:
        line = await asyncio.to_thread(self.file.readline)
        return json.loads(line) if line else {}

    def close(self) -> None:
        self.file.close()
        self.sock.close()


PYTHON = sys.executable

# Double fork into a new session, then write the pid for the test and stay.
ESCAPE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("escaped", open("/proc/self/stat").read().split()[0], flush=True)
        time.sleep(1000)
    os._exit(0)
os.wait()
print("ready", flush=True)
time.sleep(1000)
"""
