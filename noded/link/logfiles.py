"""Output of tasks as the guardian's scribe leaves it: `<stream>.log`, older parts `.1`, `.2`, ... Blocking reads.

Offsets count bytes of a stream over its rotations, from the oldest byte that was there when this agent first looked.
A part is known again by its inode, whatever it is called by then. What was rotated away is skipped, never repeated.
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
_ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a stream: which, and which offsets it holds."""

    inode: int
    path: Path
    start: int
    end: int


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
        starts = {part.inode: part.start for part in before}
        at = next((starts[inode] for inode, _, _ in found if inode in starts), before[-1].end if before else 0)
        parts: list[Part] = []
        for inode, path, size_bytes in found:
            parts.append(Part(inode, path, at, at + size_bytes))
            at += size_bytes
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
    def _listed(path: Path) -> list[tuple[int, Path, int]]:
        """(inode, path, size), oldest first. Looked at from the newest back: a file that moves on meanwhile is met
        twice under one inode, and not missed."""
        found: list[tuple[int, Path, int]] = []
        seen: set[int] = set()
        for index in range(PARTS_MAX):
            part = path if index == 0 else path.with_name(f"{path.name}.{index}")
            try:
                status = part.stat(follow_symlinks=False)
            except FileNotFoundError:
                if index > 0:
                    break
                continue  # between the rotation and the first byte of the new file
            if status.st_ino not in seen:
                seen.add(status.st_ino)
                found.append((status.st_ino, part, status.st_size))
        return found[::-1]
