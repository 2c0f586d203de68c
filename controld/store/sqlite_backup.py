"""Backups of the embedded store, and putting one in the place of its database. Blocking; no event loop here."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from pathlib import Path

from controld.store import sqlite_db, sqlite_file
from controld.store.port import StoreCorruptError


def write(path: Path, target: Path) -> None:
    """A whole and checked copy of the database `path`, as of one moment, under `target`. Writers are not held up.

    Raises OSError, StorageFullError, StoreCorruptError; `target` is then what it was before.
    """
    if target.parent.resolve() == path.parent.resolve():
        raise OSError(errno.EINVAL, "a backup does not belong into the data directory itself", str(target))
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no SQLite store of a controller here", str(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such directory", str(target.parent))
    with sqlite_file.new_file(target) as partial:
        _copy(path, partial)
        sqlite_file.check(partial)


def stage_import(path: Path) -> Path:
    """A whole copy of the database `path`, which nobody has open, to be taken into another store; the database itself
    is set aside, so that no controller begins from it again. After a crash the copy of the first attempt is found.

    Raises FileNotFoundError where there is neither, OSError, StoreCorruptError, StorageFullError.
    """
    staged = path.with_name(path.name + sqlite_file.IMPORTING)
    if path.exists():
        sqlite_file.check(path)
        with sqlite_file.new_file(staged) as partial:
            _copy(path, partial)
            sqlite_file.check(partial)
        sqlite_file.set_aside(path)
        sqlite_file.sync(path.parent)
    elif not staged.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no SQLite store of a controller here", str(path))
    return staged


def end_import(path: Path) -> Path:
    """What was staged is in the other store: keep it under another name."""
    done = path.with_name(path.name + sqlite_file.IMPORTED)
    path.with_name(path.name + sqlite_file.IMPORTING).replace(done)
    sqlite_file.sync(path.parent)
    return done


def install(path: Path, backup: Path) -> None:
    """Put a backup in the place of the database `path`, which nobody has open, with a history counter never used.

    The old database stays as `*.replaced`. A crash on the way leaves the old one, or none, which `open` refuses.
    Raises StoreCorruptError where the backup is damaged (nothing is changed then), OSError, StorageFullError.
    """
    sqlite_file.check(backup)
    history = 1 + max(sqlite_file.read_history(path), sqlite_db.history_of(backup), _history_if_readable(path))
    staged = path.with_name("restored.sqlite3")
    with sqlite_file.new_file(staged) as partial:
        _copy(backup, partial)
        sqlite_db.begin_history(partial, history)
    sqlite_file.set_aside(path)
    staged.replace(path)
    sqlite_file.sync(path.parent)


def _history_if_readable(path: Path) -> int:
    """0 where the database is missing or damaged: being restored over is what it is there for."""
    try:
        sqlite_file.check(path)
        return sqlite_db.history_of(path)
    except (StoreCorruptError, FileNotFoundError):
        return 0


def _copy(source: Path, target: Path) -> None:
    with (
        sqlite_file.errors(target),
        contextlib.closing(sqlite3.connect(sqlite_file.uri(source, "ro"), uri=True)) as reader,
        contextlib.closing(sqlite_db.connect(target)) as writer,
    ):
        reader.backup(writer)
        writer.execute("PRAGMA journal_mode = DELETE")  # one file, whatever the source kept beside it
