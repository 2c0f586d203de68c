"""Output of tasks: read from pipes by the guardian, written to rotated files by the scribe.

The guardian itself never writes to a disk: one that hangs would stop the lease clock of every task of the node. It
hands bytes to the scribe (noded/run/scribe.py), a process of its own, over a bounded queue.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from noded.run.protocol import STDERR_TAIL_BYTES

if TYPE_CHECKING:
    from io import FileIO

    from noded.run.scribe import Scribe

READ_BYTES: Final = 1 << 16
PATIENCE_NS: Final = 1_000_000_000
"""While the disk is slow a task waits on its full pipe; when nothing at all was written for this long, its output is
dropped and counted instead. Training goes on when a disk dies."""


def takes_output(scribe: Scribe, now_ns: int) -> bool:
    """False while the disk is slow, but only for so long: then output is taken and dropped."""
    return not scribe.full or now_ns - scribe.advanced_ns >= PATIENCE_NS


class Output:
    """One stream of one task: the pipe's reading end, its file, and the last bytes of it."""

    def __init__(self, fd: int, path: str, bytes_max: int, files_max: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.path = path
        self._limits = (bytes_max, files_max)
        self._tail = bytearray()
        self._dropped_bytes = 0

    @property
    def tail(self) -> str:
        """At most 4 KiB of the end, made valid UTF-8."""
        text = bytes(self._tail).decode("utf-8", "replace")
        while len(text.encode()) > STDERR_TAIL_BYTES:
            text = text[max(1, len(text) // 64) :]
        return text

    def pump(self, scribe: Scribe, now_ns: int) -> bool:
        """Moves one chunk. False at the end of the stream, or when the scribe cannot take more for now."""
        if not takes_output(scribe, now_ns):
            return False
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self._tail = (self._tail + data)[-STDERR_TAIL_BYTES:]
        if scribe.full:
            self._dropped_bytes += len(data)
            return True
        if self._dropped_bytes:
            data = f"\n[virial: {self._dropped_bytes} bytes lost, the disk did not take them]\n".encode() + data
            self._dropped_bytes = 0
        scribe.log(self.path, data, *self._limits)
        return True

    def say(self, scribe: Scribe, text: str) -> None:
        """A line of the guardian's own at the end of the stream."""
        data = f"[virial: {text}]\n".encode()
        self._tail = (self._tail + data)[-STDERR_TAIL_BYTES:]
        if not scribe.full:
            scribe.log(self.path, data, *self._limits)

    @property
    def open(self) -> bool:
        return self.fd >= 0

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class RotatingFile:
    """`path`, `path.1` (newer) .. `path.<files_max - 1>`, each of at most bytes_max bytes."""

    def __init__(self, path: Path, bytes_max: int, files_max: int) -> None:
        self._path = path
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._file: FileIO | None = None
        self._size = 0

    def write(self, data: bytes) -> None:
        """Raises OSError; what was not written is lost, and a later write may succeed."""
        while data:
            file = self._opened()
            room = self._bytes_max - self._size
            if room <= 0:
                self._rotate()
                continue
            cut = len(data) if len(data) <= room else data.rfind(b"\n", 0, room) + 1
            if cut == 0 and self._size > 0:
                # No line ends in what is left: rather a shorter file than a torn line.
                self._rotate()
                continue
            cut = cut or room
            written = file.write(data[:cut])
            self._size += written
            whole = written == cut
            data = data[written:]
            if data and whole:
                self._rotate()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> FileIO:
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
            self._size = self._file.tell()
        return self._file

    def _rotate(self) -> None:
        self.close()
        for index in range(self._files_max - 1, 0, -1):
            older = self._numbered(index)
            newer = self._numbered(index - 1)
            if newer.exists():
                newer.replace(older)
        if self._files_max == 1:
            self._path.unlink(missing_ok=True)

    def _numbered(self, index: int) -> Path:
        return self._path if index == 0 else self._path.with_name(f"{self._path.name}.{index}")
