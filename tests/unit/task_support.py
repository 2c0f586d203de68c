"""What the task tests share: a guardian's socket that does what a test tells it, and a gang of plain processes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from virial.task import Task
from virial.task._environment import parse_environment

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 60.0

Fields = dict[str, object]


class Refuse(Exception):
    """A handler raises it to answer ok=false."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.message = message


class Silence(Exception):
    """A handler raises it to answer nothing."""


Handler = Callable[[Fields], Mapping[str, object]]


@dataclass(frozen=True)
class Call:
    """One request as it arrived."""

    connection: int
    call: str
    args: Fields


class FakeGuardian:
    """The guardian's end of VIRIAL_SOCK. Answers from `handlers`; a call without one is answered with {}."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler] | None = None) -> None:
        self.path = path
        self.handlers: dict[str, Handler] = dict(handlers or {})
        self.calls: list[Call] = []
        self.changed = threading.Condition()
        self.connections: dict[int, socket.socket] = {}
        self.accepted = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is looked at after each event. A hang is an error, not a measure."""
        with self.changed:
            assert self.changed.wait_for(condition, HANG_S), self.calls

    def named(self, call: str) -> list[Call]:
        return [each for each in self.calls if each.call == call]

    def wait_for_call(self, call: str, count: int = 1) -> Call:
        self.wait_for(lambda: len(self.named(call)) >= count)
        return self.named(call)[count - 1]

    def wait_for_connections(self, count: int) -> None:
        self.wait_for(lambda: self.accepted >= count)

    def push(self, **message: object) -> None:
        self.send_raw(json.dumps(message).encode() + b"\n")

    def send_raw(self, data: bytes) -> None:
        for connection in list(self.connections.values()):
            connection.sendall(data)

    def disconnect(self) -> None:
        for connection in list(self.connections.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.disconnect()
        for thread in self._threads:
            thread.join(HANG_S)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self.changed:
                self.accepted += 1
                number = self.accepted
                self.connections[number] = connection
                self.changed.notify_all()
            thread = threading.Thread(target=self._serve, args=(number, connection), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, number: int, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as lines:
            for line in lines:
                request = cast("Fields", json.loads(line))
                call, args = str(request["call"]), cast("Fields", request["args"])
                with self.changed:
                    self.calls.append(Call(number, call, args))
                    self.changed.notify_all()
                handler = self.handlers.get(call)
                try:
                    answer: Fields = {"ok": True, "result": handler(args) if handler else {}}
                except Refuse as refused:
                    answer = {"ok": False, "error": refused.reason, "message": refused.message}
                except Silence:
                    continue
                connection.sendall(json.dumps({"id": request["id"], **answer}).encode() + b"\n")
        with self.changed:
            self.connections.pop(number, None)
            self.changed.notify_all()


@contextlib.contextmanager
def guardian(folder: Path, **handlers: Handler) -> Generator[FakeGuardian]:
    """A fake guardian whose socket is `folder/sock`."""
    fake = FakeGuardian(folder / "sock", handlers)
    try:
        yield fake
    finally:
        fake.close()


@contextlib.contextmanager
def managed_task(fake: FakeGuardian, rank: int = 0, world_size: int = 1, **environ: str) -> Generator[Task]:
    """A task as Virial starts it."""
    virial = {"VIRIAL_SOCK": str(fake.path), "VIRIAL_JOB": "train", "VIRIAL_GENERATION": "2", "VIRIAL_EPOCH": "1.7"}
    ranks = {"VIRIAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    task = Task(parse_environment({**virial, **ranks, **environ}))
    try:
        yield task
    finally:
        task.close()


def begins_in(directory: Path, checkpoint_id: str = "c1") -> Handler:
    """A `checkpoint_begin` handler that names `directory`."""
    return lambda args: {"checkpoint_id": checkpoint_id, "directory": str(directory), "tier": "shared"}


def answers(**result: object) -> Handler:
    return lambda args: result


def silent(args: Fields) -> Fields:
    raise Silence


def in_child(body: Callable[[], None]) -> int:
    """Run `body` in a forked child; the exit status as `os.waitstatus_to_exitcode` has it (0 when it returned)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads about is what is tested
        pid = os.fork()
    if pid == 0:
        status = 70
        try:
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return cast("int", probe.getsockname()[1])


@dataclass
class Gang:
    """Three ranks of examples/train.py as plain processes, as a user starts them by hand."""

    processes: list[subprocess.Popen[str]]

    @classmethod
    def start(cls, *options: str, world_size: int = 3, environs: Mapping[int, Mapping[str, str]] | None = None) -> Gang:
        port = str(free_port())
        gang = cls([])
        for rank in range(world_size):
            environ = {name: value for name, value in os.environ.items() if not name.startswith("VIRIAL_")}
            environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_PORT": port}
            path = [str(ROOT / "client"), str(ROOT / "protos"), *filter(None, [os.environ.get("PYTHONPATH")])]
            environ["PYTHONPATH"] = os.pathsep.join(path)
            environ |= (environs or {}).get(rank, {})
            gang.processes.append(
                subprocess.Popen(
                    [sys.executable, str(ROOT / "examples" / "train.py"), *options],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return gang

    def finish(self) -> list[tuple[int, str, str]]:
        """(exit status, stdout, stderr) of each rank."""
        try:
            results: list[tuple[int, str, str]] = []
            for process in self.processes:
                out, err = process.communicate(timeout=HANG_S)
                results.append((process.returncode, out, err))
            return results
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait(HANG_S)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
