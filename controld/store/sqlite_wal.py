"""Tells a torn end of SQLite's write-ahead log from damage in the middle of it.

After a crash SQLite reads the log up to the first frame whose checksum is wrong and drops the rest without a word.
That is right for the last transaction, which was being written. It is silent loss of acknowledged commits when a bit
flipped further up: every commit is synced before the next is begun, so what follows a torn one is never whole.
Format: https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import BinaryIO

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
    header = file.read(_HEADER.size)
    magic, _, page_bytes, _, salt_1, salt_2, sum_1, sum_2 = _HEADER.unpack(header)
    if magic not in (_MAGIC_LITTLE_ENDIAN, _MAGIC_BIG_ENDIAN):
        return True  # the header is synced before the first frame, and there are frames
    order = "<" if magic == _MAGIC_LITTLE_ENDIAN else ">"
    if _checksum(header[:24], (0, 0), order) != (sum_1, sum_2):
        return True
    file.seek(_HEADER.size + taken * (_FRAME.size + page_bytes))
    commits, previous = 0, None
    while commits < 2:
        frame = file.read(_FRAME.size + page_bytes)
        if len(frame) < _FRAME.size + page_bytes:
            return False
        _, size_pages, *salts, sum_1, sum_2 = _FRAME.unpack_from(frame)
        if salts != [salt_1, salt_2]:
            return False  # left from an earlier round of the log
        # The first is the one that SQLite refused; those behind it must follow from each other. What failed commits
        # left here does not, once one was written over another.
        if previous is not None and _frame_sum(frame, previous, order) != (sum_1, sum_2):
            return False
        previous = (sum_1, sum_2)
        commits += size_pages != 0
    return True


def _frame_sum(frame: bytes, previous: Sum, order: str) -> Sum:
    return _checksum(frame[_FRAME.size :], _checksum(frame[:8], previous, order), order)


def _checksum(data: bytes, start: Sum, order: str) -> Sum:
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    first, second = start
    for low, high in zip(words[::2], words[1::2], strict=True):
        first = (first + low + second) & _WORD
        second = (second + high + first) & _WORD
    return first, second
