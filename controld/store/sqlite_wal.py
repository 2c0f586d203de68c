"""Tells a torn end of SQLite's write-ahead log from damage in the middle of it.

After a crash SQLite reads the log up to the first frame whose checksum is wrong and drops the rest without a word.
That is right for the last transaction, which was being written. It is silent loss of acknowledged commits when a bit
flipped further up: every commit is synced before the next is begun, so what follows a torn one is never whole.
Format: https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

_HEADER = struct.Struct(">8I")  # magic, format, page size, checkpoint number, two salts, two checksums
_FRAME = struct.Struct(">6I")  # page, database size after a commit or 0, two salts, two checksums
_MAGIC_LITTLE_ENDIAN, _MAGIC_BIG_ENDIAN = 0x377F0682, 0x377F0683
_INDEX_FRAMES_OFFSET = 16  # of mxFrame in the header of the -shm file, in the machine's byte order
_WORD = 0xFFFFFFFF

Sum = tuple[int, int]


def drops_commits(path: Path) -> bool:
    """Whether SQLite, which has just opened the database `path` and still has it open, passes over whole commits."""
    log, index = path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")
    if not log.exists() or log.stat().st_size <= _HEADER.size:
        return False
    with index.open("rb") as file:
        file.seek(_INDEX_FRAMES_OFFSET)
        taken = int.from_bytes(file.read(4), sys.byteorder)
    with log.open("rb") as file:
        return _drops_commits(file, taken)


def _drops_commits(file: BinaryIO, taken: int) -> bool:
    """`taken`: how many frames, up to the last commit it found whole, SQLite read."""
    header = file.read(_HEADER.size)
    magic, _, page_bytes, _, salt_1, salt_2, *sums = _HEADER.unpack(header)
    if magic not in (_MAGIC_LITTLE_ENDIAN, _MAGIC_BIG_ENDIAN):
        return True  # the header is synced before the first frame, and there are frames
    order = "<" if magic == _MAGIC_LITTLE_ENDIAN else ">"
    if _checksum(header[:24], (0, 0), order) != tuple(sums):
        return True
    frames = _frames(file, page_bytes, taken, (salt_1, salt_2))
    previous = (sums[0], sums[1]) if taken == 0 else next(frames).sum
    refused = None
    for frame in frames:  # the whole ones of a commit that is not whole come first
        if not frame.of_this_round or frame.expected_sum(previous, order) != frame.sum:
            refused = frame
            break
        previous = frame.sum
    if refused is None:
        return False
    # Nothing in the refused frame can be relied on. Those behind it must follow from each other: what commits that
    # failed left here does not, once one was written over another.
    commits, previous = int(refused.size_pages != 0), None
    for frame in frames:
        if not frame.of_this_round or (previous is not None and frame.expected_sum(previous, order) != frame.sum):
            return False
        previous = frame.sum
        commits += frame.size_pages != 0
        if commits == 2:
            return True
    return False


class _Frame(NamedTuple):
    head: bytes
    page: bytes
    size_pages: int
    of_this_round: bool
    """Not left from an earlier round of the log, which is written over from its beginning."""
    sum: Sum

    def expected_sum(self, previous: Sum, order: str) -> Sum:
        return _checksum(self.page, _checksum(self.head[:8], previous, order), order)


def _frames(file: BinaryIO, page_bytes: int, taken: int, salts: Sum) -> Iterator[_Frame]:
    """The last frame that was taken, if any was, and those behind it."""
    file.seek(_HEADER.size + max(0, taken - 1) * (_FRAME.size + page_bytes))
    while len(head := file.read(_FRAME.size)) == _FRAME.size and len(page := file.read(page_bytes)) == page_bytes:
        _, size_pages, salt_1, salt_2, sum_1, sum_2 = _FRAME.unpack(head)
        yield _Frame(head, page, size_pages, (salt_1, salt_2) == salts, (sum_1, sum_2))


def _checksum(data: bytes, start: Sum, order: str) -> Sum:
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    first, second = start
    for low, high in zip(words[::2], words[1::2], strict=True):
        first = (first + low + second) & _WORD
        second = (second + high + first) & _WORD
    return first, second
