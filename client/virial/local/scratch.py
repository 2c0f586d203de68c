"""A directory for a cluster that is to leave nothing: removed at its end, and where it was killed, by the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "virial-"
# Held by whoever uses the directory. It comes into being held, so that nobody sees it free before its time.
LOCK_FILE: Final = "scratch.lock"


@contextmanager
def scratch_directory(parent: Path | None = None) -> Generator[Path]:
    """A new one in `parent` (the system's place for such); those there that killed clusters of this user left are
    removed first. Raises OSError."""
    place = parent or Path(tempfile.gettempdir())
    _sweep(place)
    made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    held = os.open(made / f".{LOCK_FILE}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        (made / f".{LOCK_FILE}").rename(made / LOCK_FILE)
        yield made
    finally:
        _remove(made)
        os.close(held)


def _sweep(place: Path) -> None:
    """Whatever cannot be removed is left for the next one."""
    for directory in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            found = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(directory)
            finally:
                os.close(found)


def _remove(directory: Path) -> None:
    """The lock goes last: without it nobody would try again."""
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != LOCK_FILE:
            entry.unlink(missing_ok=True)
    with suppress(OSError):
        if [entry.name for entry in directory.iterdir()] == [LOCK_FILE]:
            (directory / LOCK_FILE).unlink()
            directory.rmdir()
