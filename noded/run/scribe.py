"""The one process that writes the guardian's files: logs of tasks, status.json, guardian.log.

It may hang on a dead disk; the guardian then goes on. It holds the guardian's lock too, so no second guardian writes
into the data directory before the last bytes of the first are down. It ends when the guardian's end of the pipe closes.

Spoken over stdin: one JSON object a line, {"path": relative, "size": n, ...}, followed by n bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from noded.run.logs import RotatingFile

if TYPE_CHECKING:
    from collections.abc import Callable

QUEUE_BYTES_MAX: Final = 4 << 20
STATUS_BYTES_MAX: Final = 16 << 20
RELEASED_KEPT: Final = 100
RESPAWN_NS: Final = 1_000_000_000
PIPE_BYTES: Final = 1 << 20
OPEN_FILES_MAX: Final = 256
GUARDIAN_LOG_BYTES_MAX: Final = 4 << 20


class Scribe:
    """The guardian's end. `clock` returns CLOCK_BOOTTIME in ns; `spawn` starts the process and returns (pid, pipe)."""

    def __init__(self, clock: Callable[[], int], spawn: Callable[[], tuple[int, int]]) -> None:
        self._clock = clock
        self._spawn = spawn
        self._queue = bytearray()
        self._start()

    @property
    def full(self) -> bool:
        return not self.alive or self._broken or len(self._queue) >= QUEUE_BYTES_MAX

    @property
    def idle(self) -> bool:
        return not self._queue or self._broken

    def log(self, path: str, data: bytes, bytes_max: int, files_max: int) -> None:
        self._put({"path": path, "bytes_max": bytes_max, "files_max": files_max}, data)

    def note(self, line: bytes) -> None:
        """A line of the guardian's own log; dropped while the disk is slow."""
        if not self.full:
            self.log("guardian.log", line, GUARDIAN_LOG_BYTES_MAX, 3)

    def status(self, slot: str, body: bytes, *, durable: bool, released: bool) -> None:
        """Replaces status.json. Kept even when the queue is full: it is small, and bounded by the number of slots."""
        if self.alive and not self._broken and len(self._queue) < STATUS_BYTES_MAX:
            self._put({"slot": slot, "durable": durable, "released": released}, body)

    def flush(self) -> None:
        """Moves what the pipe takes."""
        while self._queue and self.alive and not self._broken:
            try:
                written = os.write(self.fd, self._queue[: 1 << 16])
            except BlockingIOError:
                return
            except BrokenPipeError:
                # Its death is noticed by its reaping, which calls `lost`: the pipe may still be watched.
                self._broken = True
                return
            del self._queue[:written]
            self.advanced_ns = self._clock()

    def lost(self) -> None:
        """The process died. What it had in its pipe is lost, and so is a frame of which it got a part."""
        if self.alive:
            os.close(self.fd)
            self.alive = False
            self._queue.clear()

    def revive(self) -> bool:
        """Starts it again, at most once a second. True when it did: all states must be written anew."""
        now_ns = self._clock()
        if self.alive or now_ns - self._spawned_ns < RESPAWN_NS:
            return False
        self._start()
        return True

    def close(self) -> None:
        if self.alive:
            os.close(self.fd)
            self.alive = False

    def _start(self) -> None:
        self._spawned_ns = self.advanced_ns = self._clock()
        self.pid, self.fd = self._spawn()
        self.alive = True
        self._broken = False
        os.set_blocking(self.fd, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def _put(self, header: dict[str, Any], body: bytes) -> None:
        if not self._queue:
            self.advanced_ns = self._clock()
        self._queue += json.dumps({**header, "size": len(body)}).encode() + b"\n" + body
        self.flush()


class Desk:
    """What the scribe process does with each frame. A disk's errors are counted and told to the log that lost bytes."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._files: dict[str, RotatingFile] = {}
        self._lost: dict[str, int] = {}

    def log(self, path: str, data: bytes, bytes_max: int, files_max: int) -> None:
        file = self._files.get(path)
        if file is None:
            while len(self._files) >= OPEN_FILES_MAX:
                self._files.pop(next(iter(self._files))).close()
            full = self._data_dir / path
            file = self._files[path] = RotatingFile(full, bytes_max, files_max)
        lost = self._lost.get(path, 0)
        try:
            self._make(self._data_dir.joinpath(path).parent)
            if lost:
                file.write(f"\n[virial: {lost} bytes lost, the disk refused them]\n".encode())
                del self._lost[path]
            file.write(data)
        except OSError:
            self._lost[path] = self._lost.get(path, 0) + len(data)
            file.close()

    def status(self, slot: str, body: bytes, *, durable: bool, released: bool) -> None:
        directory = self._data_dir / "tasks" / slot
        new = directory / "status.json.new"
        try:
            self._make(directory)
            with new.open("wb") as file:
                file.write(body)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            new.replace(directory / "status.json")
        except OSError as error:
            sys.stderr.write(f"status of {slot}: {error}\n")
        if released:
            for path in [path for path in self._files if path.startswith(f"tasks/{slot}/")]:
                self._files.pop(path).close()
                self._lost.pop(path, None)
            self._prune()

    def _make(self, directory: Path) -> None:
        """Raises OSError. A data directory that somebody deleted is not made again: another agent may want the name."""
        if not self._data_dir.is_dir():
            raise FileNotFoundError(f"{self._data_dir} is gone")
        directory.mkdir(parents=True, exist_ok=True)

    def _prune(self) -> None:
        aged: list[tuple[int, Path]] = []
        for status in self._data_dir.glob("tasks/*/status.json"):
            try:
                if json.loads(status.read_bytes())["state"] == "RELEASED":
                    aged.append((status.stat().st_mtime_ns, status.parent))
            except (OSError, ValueError, KeyError):
                continue
        for _, directory in sorted(aged)[:-RELEASED_KEPT]:
            # status.json goes last: a directory without it would never be looked at again.
            for file in sorted(directory.iterdir(), key=lambda file: file.name == "status.json"):
                file.unlink(missing_ok=True)
            directory.rmdir()


def serve(source: BinaryIO, desk: Desk) -> None:
    while line := source.readline():
        frame = json.loads(line)
        body = source.read(frame["size"])
        if len(body) < frame["size"]:
            return
        if "path" in frame:
            desk.log(frame["path"], body, frame["bytes_max"], frame["files_max"])
        else:
            desk.status(frame["slot"], body, durable=frame["durable"], released=frame["released"])


def main(data_dir: str) -> None:
    os.umask(0o077)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # It ends by itself once the guardian has: a stop of the whole unit must not cost the last lines.
        signal.signal(signum, signal.SIG_IGN)
    serve(sys.stdin.buffer, Desk(Path(data_dir)))


if __name__ == "__main__":
    main(sys.argv[1])
