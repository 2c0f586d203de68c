"""Room on the disk to open the store: a file that is given up when a start finds the disk full.

Opening writes: a log and its index, the leadership, events. A disk that filled up while the controller was down, or
that made it go down, would keep it down, and with it every stop and release that could help. Blocking.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from controld.store.port import StorageFullError
from controld.store.sqlite_file import DATABASE

RESERVE: Final = "reserve"
# As much as a log may hold that was not yet copied into the database: a start copies it.
RESERVE_BYTES: Final = 16 << 20
# A disk of which less than so many times the reserve is free has better uses for the rest of it.
_PLENTY: Final = 8
# What a start, and the stops after it, may need. Less free than this is a full disk.
NEEDED_BYTES: Final = 4 << 20


def make(directory: Path) -> None:
    """Where the disk is full, give up the reserve."""
    if _free_bytes(directory) < NEEDED_BYTES:
        (directory / RESERVE).unlink(missing_ok=True)


def reserve(directory: Path, size_bytes: int) -> None:
    """Take the reserve, where there is plenty of room. Never raises: without it everything works but the worst day."""
    file = directory / RESERVE
    with contextlib.suppress(OSError):
        if not size_bytes or file.exists() or _free_bytes(directory) < _PLENTY * size_bytes:
            return
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError:
            file.unlink()
        finally:
            os.close(descriptor)


def full(directory: Path) -> StorageFullError | None:
    """The one message for a start that failed, when it did so for want of room; None when there is room."""
    free_bytes = _free_bytes(directory)
    if free_bytes >= NEEDED_BYTES:
        return None
    return StorageFullError(
        f"{directory / DATABASE}: the disk is full ({free_bytes >> 10} KiB free); nothing was lost: free at least "
        f"{NEEDED_BYTES >> 20} MiB there and start controld again"
    )


def _free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
