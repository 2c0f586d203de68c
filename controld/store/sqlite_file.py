"""The files of the embedded store: lock, integrity, history counter, safe replacement. Blocking; no event loop here.

A data directory holds `state.sqlite3` (with `-wal` and `-shm` while open), `lock`, and `history`: the history
counter once more. It outlives the database file, so that whoever restores an old backup, or copies an old file back
by hand, cannot bring back a fencing token that was used before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from urllib.parse import quote

from controld.store import sqlite_schema, sqlite_wal
from controld.store.port import (
    OutcomeUnknownError,
    StorageFullError,
    StoreClosedError,
    StoreCorruptError,
    StoreError,
    StoreLockedError,
)

DATABASE = "state.sqlite3"
# Beside the database, while it is taken into another store, and afterwards.
IMPORTING = ".importing"
IMPORTED = ".imported"

_MAGIC = b"SQLite format 3\0"
_HEADER_BYTES = 100
_LOCK_POLL_SECONDS = 0.02
_RESTORE_HINT = "nothing was changed; restore a backup with `controld restore`, or repair the disk first"


class DirectoryLock:
    """Exclusive use of a data directory, until `release` or the end of the process, however it ends."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    @property
    def descriptor(self) -> int:
        """For a child that shall keep the lock as long as it lives. Raises RuntimeError where it is not held."""
        if self._descriptor is None:
            raise RuntimeError(f"{self._path} is not locked")
        return self._descriptor

    def acquire(self, patience_seconds: float = 0.0) -> None:
        """Wait for a holder that is just ending. Raises StoreLockedError, naming the process that has it; OSError."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        give_up = time.monotonic() + patience_seconds
        try:
            while not _locks(descriptor):
                if time.monotonic() >= give_up:
                    holder = os.read(descriptor, 20).decode("ascii", "replace").strip() or "unknown"
                    raise StoreLockedError(
                        f"{self._path.parent}: in use by another controld (pid {holder}); stop it, or give this one "
                        "its own data directory"
                    )
                time.sleep(_LOCK_POLL_SECONDS)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        with contextlib.suppress(OSError):  # on a full disk the holder stays unknown, but the lock holds
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        # The file stays: a process that removed it could pull it from under one that just locked it.
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def directory_errors(directory: Path) -> Generator[None, None, None]:
    """One clear message where the directory cannot be used, of the OSError class it came from."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise type(error)(
            error.errno,
            f"cannot use the data directory {directory}: {reason} ({error.filename or directory}); make it a directory "
            f"that user id {os.geteuid()} may write, or name another one",
        ) from error


def prepare(directory: Path) -> None:
    """Make the directory (mode 0700) where it is missing. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))


@contextlib.contextmanager
def errors(path: Path) -> Generator[None, None, None]:
    """Errors of SQLite about the database `path` become the port's."""
    try:
        yield
    except sqlite3.ProgrammingError as error:
        raise StoreClosedError(f"{path}: {error}") from error
    except sqlite3.Error as error:
        raise translate(error, path) from error


def translate(error: sqlite3.Error, path: Path) -> StoreError:
    """What an error of SQLite means for a commit.

    Out of space is certain: the frame that would make a transaction count is written last, so a write that failed
    was before it. A failed fsync (SQLITE_IOERR_FSYNC, also when the file system finds only then that it is full) is
    not: the frame may be on disk. So is everything that is not known better.
    """
    whole_code: int | None = getattr(error, "sqlite_errorcode", None)
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    code = None if whole_code is None else whole_code & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return StorageFullError(f"{path}: no space left ({error})")
    # Without a code it is Python's own: a stored text that is not UTF-8.
    undecodable = code is None and isinstance(error, sqlite3.OperationalError)
    if undecodable or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        what = str(error).splitlines()[0]
        return corrupt(path, f"damaged ({what})")
    return OutcomeUnknownError(f"{path}: {name}: {error}")


def corrupt(path: Path, what: str) -> StoreCorruptError:
    return StoreCorruptError(f"{path}: {what}; {_RESTORE_HINT}")


def check(path: Path) -> None:
    """Refuse a file that is not a whole database of ours, without changing it. Raises StoreCorruptError, OSError."""
    _check_header(path)
    before = set(_side_files(path))
    try:
        with contextlib.closing(sqlite3.connect(uri(path, "ro"), uri=True)) as connection:
            tables = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
            if [str(row[0]) for row in tables] != list(sqlite_schema.TABLES):
                raise corrupt(path, "damaged (its tables are not as they were made)")
            problems = [str(row[0]) for row in connection.execute("PRAGMA quick_check(3)")]
            if sqlite_wal.drops_commits(path):
                problems = [f"a commit in {path.name}-wal does not match its checksum, and later ones follow it"]
    except sqlite3.Error as error:
        if isinstance(cause := translate(error, path), StoreCorruptError):
            raise cause from error
        raise OSError(errno.EIO, f"cannot be read ({error})", str(path)) from error
    finally:
        for made in set(_side_files(path)) - before:  # reading in WAL mode makes them; they hold nothing
            made.unlink(missing_ok=True)
    if problems != ["ok"]:
        raise corrupt(path, "damaged (" + "; ".join(problems).replace("\n", " ") + ")")


def _check_header(path: Path) -> None:
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if not header:
        raise corrupt(path, "empty")
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        raise corrupt(path, "not a SQLite database")
    version, application = int.from_bytes(header[60:64], "big"), int.from_bytes(header[68:72], "big")
    if application != sqlite_schema.APPLICATION_ID:
        raise corrupt(path, f"a SQLite database of another program (application id {application:#x})")
    if version != sqlite_schema.VERSION:
        known = sqlite_schema.VERSION
        raise corrupt(path, f"has schema version {version}, this controld reads version {known}: use the other")
    pages, page_bytes = int.from_bytes(header[28:32], "big"), int.from_bytes(header[16:18], "big")
    size_bytes = path.stat().st_size
    # While a log is there, the file may be behind what its first page says: a crash can cut a copy of the log short.
    if not any(_side_files(path)) and size_bytes < pages * page_bytes:
        raise corrupt(path, f"has {size_bytes} bytes, not the {pages * page_bytes} that were written")


def identity(path: Path) -> tuple[int, int] | None:
    """Which file this is, whatever its name; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def uri(path: Path, mode: str) -> str:
    return f"file:{quote(str(path.absolute()))}?mode={mode}"


def _side_files(path: Path) -> Iterator[Path]:
    for suffix in ("-wal", "-shm", "-journal"):
        side = path.with_name(path.name + suffix)
        if side.exists():
            yield side


def require_absent(path: Path) -> None:
    """A directory without its database must look new. Raises StoreCorruptError where it was in use before."""
    if (taken := path.with_name(path.name + IMPORTED)).exists():
        raise StoreCorruptError(
            f"{path}: was taken into etcd ({taken.name} is what it was); set store.kind to etcd and store.member_dir"
        )
    traces = [*_side_files(path), *(file for file in [_history_file(path)] if file.exists())]
    if traces:
        raise StoreCorruptError(
            f"{path}: missing, but {traces[0].name} shows that the directory was in use; restore a backup with "
            f"`controld restore`, or empty {path.parent} to begin a new cluster"
        )


def _history_file(path: Path) -> Path:
    return path.with_name("history")


def read_history(path: Path) -> int:
    """The history counter kept beside the database `path`; 0 where there is none. Raises StoreCorruptError."""
    file = _history_file(path)
    try:
        text = file.read_text("ascii", "replace").strip()
    except FileNotFoundError:
        return 0
    if not text.isdecimal():
        raise StoreCorruptError(f"{file}: not a number; write the history counter into it (`virial status`)")
    return int(text)


def write_history(path: Path, history: int) -> None:
    if read_history(path) != history:
        file = _history_file(path)
        with new_file(file) as partial:
            partial.write_text(f"{history}\n", "ascii")


@contextlib.contextmanager
def new_file(path: Path) -> Generator[Path, None, None]:
    """An empty file (mode 0600) that takes the place of `path`, durably and at once, when the block ends well."""
    partial = path.with_name(path.name + ".partial")
    for stale in [partial, *_side_files(partial)]:
        stale.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    except BaseException:
        for left in [partial, *_side_files(partial)]:
            left.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """fsync a file, or a directory so that the names in it last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path) -> None:
    """Move a database and its log out of the way, as `*.replaced`: a log left behind would be played into the next."""
    aside = path.with_name(path.name + ".replaced")
    for old in [aside, *_side_files(aside)]:
        old.unlink(missing_ok=True)
    sides = list(_side_files(path))
    if path.exists():
        path.replace(aside)
    for side in sides:
        side.replace(aside.with_name(side.name.replace(path.name, aside.name)))


def size(path: Path) -> int:
    """Bytes on disk, the log included."""
    return sum(file.stat().st_size for file in [path, *_side_files(path)])
