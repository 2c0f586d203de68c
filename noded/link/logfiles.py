"""Output of tasks as the guardian's scribe leaves it: `<stream>.log`, older parts `.1`, `.2`, ... Blocking reads.

Offsets count bytes of a stream over its rotations, from the oldest byte that was there when this agent first looked.
A part is known again by its inode, whatever it is called by then; since a new file may get the inode of one that was
deleted, its first bytes and size must agree too. What was rotated away is skipped, never repeated.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STREAMS: Final = ("stdout", "stderr")
STREAMS_REMEMBERED_MAX: Final = 1024
PARTS_MAX: Final = 1000
HEAD_BYTES: Final = 64
_ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a stream: which, and which offsets it holds."""

    inode: int
    path: Path
    start: int
    end: int
    head: bytes
    mtime_ns: int

    def continued_by(self, later: _File, *, newest: bool) -> bool:
        """Whether `later` is the same file. Only the newest part is still written to."""
        size_bytes = self.end - self.start
        unchanged = later.size_bytes == size_bytes and later.mtime_ns == self.mtime_ns
        return (
            later.inode == self.inode
            and (unchanged or (newest and later.size_bytes >= size_bytes))
            and later.head.startswith(self.head)
        )


@dataclass(frozen=True, slots=True)
class _File:
    inode: int
    path: Path
    size_bytes: int
    mtime_ns: int
    head: bytes


class LogFiles:
    """The logs below `tasks_dir`, one directory a slot. Not thread-safe: one read at a time."""

    def __init__(self, tasks_dir: Path) -> None:
        self._tasks_dir = tasks_dir
        self._known: OrderedDict[tuple[str, str], tuple[Part, ...]] = OrderedDict()

    def exists(self, slot: str) -> bool:
        return (self._tasks_dir / slot).is_dir()

    def parts(self, slot: str, stream: str) -> tuple[Part, ...]:
        """Oldest first; empty before the first byte. Raises OSError."""
        key = (slot, stream)
        before = self._known.get(key, ())
        found = self._listed(self._tasks_dir / slot / f"{stream}.log")
        # Where nothing is known again, everything that was is gone, and what is there begins after it.
        at = before[-1].end if before else 0
        skipped_bytes = 0
        for file in found:
            same = next((one for one in before if one.continued_by(file, newest=one is before[-1])), None)
            if same is not None:
                at = same.start - skipped_bytes
                break
            skipped_bytes += file.size_bytes
        parts: list[Part] = []
        for file in found:
            parts.append(Part(file.inode, file.path, at, at + file.size_bytes, file.head, file.mtime_ns))
            at += file.size_bytes
        self._known[key] = tuple(parts) or before
        self._known.move_to_end(key)
        if len(self._known) > STREAMS_REMEMBERED_MAX:
            self._known.popitem(last=False)
        return tuple(parts)

    def start(self, slot: str, stream: str, offset: int, tail_bytes: int) -> int:
        """Where reading begins: at `offset`, or so many bytes before the end when it is 0."""
        parts = self.parts(slot, stream)
        if not parts:
            return offset
        if offset == 0 and tail_bytes > 0:
            return max(parts[0].start, parts[-1].end - tail_bytes)
        return max(offset, parts[0].start)

    def read(self, slot: str, stream: str, offset: int, bytes_max: int) -> tuple[bytes, int]:
        """(data, offset after it). No data: nothing more is there for now. Raises OSError."""
        for _ in range(_ATTEMPTS):
            part = next((part for part in self.parts(slot, stream) if part.end > offset), None)
            if part is None:
                return b"", offset
            begin = max(offset, part.start)
            try:
                fd = os.open(part.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                if os.fstat(fd).st_ino == part.inode:  # else it was rotated meanwhile: look again
                    data = os.pread(fd, min(bytes_max, part.end - begin), begin - part.start)
                    return data, begin + len(data)
            finally:
                os.close(fd)
        return b"", offset

    @staticmethod
    def _listed(path: Path) -> list[_File]:
        """Oldest first. Looked at from the newest back: a file that moves on meanwhile is met twice under one inode,
        and not missed."""
        found: dict[int, _File] = {}
        for index in range(PARTS_MAX):
            part = path if index == 0 else path.with_name(f"{path.name}.{index}")
            try:
                fd = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                if index > 0:
                    break
                continue  # between the rotation and the first byte of the new file
            try:
                status = os.fstat(fd)
                head = os.pread(fd, HEAD_BYTES, 0)
            finally:
                os.close(fd)
            found.setdefault(status.st_ino, _File(status.st_ino, part, status.st_size, status.st_mtime_ns, head))
        return list(found.values())[::-1]
