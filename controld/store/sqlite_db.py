"""The database of the embedded store. Blocking, and used by one thread only.

Tables: `head` (one row: counters, leadership, what was committed last), `kv` (the records), `log` (the commits since
the last compaction, for `watch`). SQLite does not checksum what it stores; every row does here, and `head` holds
their number and sum, so that a flipped bit or a lost page is an error at load and never a wrong lease.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Generator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TypeAlias

from controld.core.ids import Epoch
from controld.store import guard, sqlite_file, sqlite_schema
from controld.store.guard import Head
from controld.store.port import (
    Commit,
    CompactedError,
    Leadership,
    Loaded,
    SequenceError,
    StoredChange,
    StoredRecord,
)
from controld.store.sqlite_log import pack, unpack

_PUT = (
    "INSERT INTO kv (key, value, create_revision, modify_revision, checksum) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (key) DO UPDATE SET value = excluded.value, modify_revision = excluded.modify_revision, "
    "checksum = excluded.checksum"
)

_LOG_PAGE = 64
_LOAD_PAGE = 5_000
_COMPACT_PAGE = 1_000
_BUSY_S = 1.0  # only somebody's `sqlite3` shell can hold the lock; the commit then fails as unknown
_CACHE_KIB = 64 << 10
_CHECKPOINT_PAGES = 4_000
_WAL_KEPT_BYTES = 64 << 20
_DIGEST_MASK = (1 << 62) - 1

Numbers: TypeAlias = tuple[int, ...]


@dataclass(slots=True)
class HeadRow:
    """The one row of `head`, in the order of its columns; `digest` sums the checksums of all records."""

    history: int
    revision: int = 0
    compacted_revision: int = 0
    token: int = 0
    epoch_history: int = 0
    epoch_revision: int = 0
    seq: int = 0
    seq_revision: int = 0
    records: int = 0
    digest: int = 0

    @property
    def guard(self) -> Head:
        return Head(self.token, Epoch(self.epoch_history, self.epoch_revision), self.seq, self.seq_revision)

    def lead(self, token: int, epoch: Epoch) -> None:
        self.token, (self.epoch_history, self.epoch_revision) = token, epoch
        self.seq = self.seq_revision = 0

    def count(self, records: int, digest: int) -> None:
        self.records += records
        self.digest = (self.digest + digest) & _DIGEST_MASK


def create(path: Path, history: int) -> None:
    """Fill an empty file. The caller makes it durable and moves it into place."""
    with sqlite_file.errors(path), contextlib.closing(connect(path)) as connection:
        connection.executescript(sqlite_schema.CREATE)
        _write_head(connection, HeadRow(history))


def begin_history(path: Path, history: int) -> None:
    """Begin a new history: nobody leads, and no position of a watch from before it is good any more."""
    with sqlite_file.errors(path), contextlib.closing(connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")  # one file, no log beside it
        connection.execute("BEGIN IMMEDIATE")
        head = _read_head(connection, path)
        head.history = history
        head.lead(0, Epoch(0, 0))
        head.compacted_revision = head.revision
        connection.execute("DELETE FROM log")
        _write_head(connection, head)
        connection.execute("COMMIT")


def history_of(path: Path) -> int:
    """The history counter of a checked database."""
    with (
        sqlite_file.errors(path),
        contextlib.closing(sqlite3.connect(sqlite_file.uri(path, "ro"), uri=True)) as connection,
    ):
        return _read_head(connection, path).history


def position_of(path: Path) -> Epoch:
    """(history counter, revision) of a checked database."""
    with (
        sqlite_file.errors(path),
        contextlib.closing(sqlite3.connect(sqlite_file.uri(path, "ro"), uri=True)) as connection,
    ):
        head = _read_head(connection, path)
    return Epoch(head.history, head.revision)


def read(path: Path) -> Loaded:
    """The contents of a checked database that nobody has open for writing."""
    with (
        sqlite_file.errors(path),
        contextlib.closing(sqlite3.connect(sqlite_file.uri(path, "ro"), uri=True)) as connection,
    ):
        return _load(connection, path)


def write(path: Path, loaded: Loaded) -> None:
    """Fill an empty file with the contents of any store, revisions and all. The caller makes it durable."""
    create(path, loaded.history)
    with sqlite_file.errors(path), contextlib.closing(connect(path)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        head = _read_head(connection, path)
        head.revision = head.compacted_revision = loaded.revision
        for record in loaded.records:
            row = (record.key, record.value, record.create_revision, record.modify_revision)
            checksum = _checksum(*row)
            connection.execute(_PUT, (*row, checksum))
            head.count(1, checksum)
        _write_head(connection, head)
        connection.execute("COMMIT")


class Database:
    """An open database that passed `sqlite_file.check`. Raises what the port says, for every method."""

    def __init__(self, path: Path, size_bytes_max: int) -> None:
        self._path = path
        with sqlite_file.errors(self._path):
            self._connection = connect(path)
            try:
                self._configure(size_bytes_max)
            except BaseException:
                self._connection.close()
                raise
        wal = path.with_name(path.name + "-wal")
        self._files = [(file, opened) for file in (path, wal) if (opened := sqlite_file.identity(file)) is not None]

    def _require_in_place(self) -> None:
        """What is written into a file that has lost its name succeeds, and is gone with the process."""
        for file, opened in self._files:
            if sqlite_file.identity(file) != opened:
                raise sqlite_file.corrupt(file, "removed or replaced while it was in use")

    def _configure(self, size_bytes_max: int) -> None:
        one = self._one
        if one("PRAGMA journal_mode = WAL") != "wal":
            raise OSError(f"{self._path}: this file system cannot hold a write-ahead log; use a local one")
        for pragma in (
            "synchronous = FULL",  # an fsync a commit: what was acknowledged is there after a power cut
            "trusted_schema = OFF",
            "cell_size_check = ON",
            "temp_store = MEMORY",
            f"cache_size = -{_CACHE_KIB}",
            f"wal_autocheckpoint = {_CHECKPOINT_PAGES}",
            f"journal_size_limit = {_WAL_KEPT_BYTES}",
            f"max_page_count = {max(1, size_bytes_max // int(one('PRAGMA page_size')))}",
        ):
            self._connection.execute(f"PRAGMA {pragma}")
        # A commit whose fsync failed may be visible now and yet not be on disk, nor ever get there: the kernel counts
        # its pages as clean. Copying the whole log into the database writes them again, before anyone relies on them.
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._connection.close()

    def head(self) -> HeadRow:
        with sqlite_file.errors(self._path):
            return _read_head(self._connection, self._path)

    def load(self) -> Loaded:
        with sqlite_file.errors(self._path):
            return _load(self._connection, self._path)

    def campaign(self, identity: str) -> Leadership:
        with self._transaction() as head:
            head.revision += 1
            epoch = Epoch(head.history, head.revision)
            head.lead(head.revision, epoch)
        return Leadership(identity=identity, token=epoch.revision, epoch=epoch)

    def commit(self, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
        with self._transaction() as head:
            if guard.already_applied(head.guard, leadership, seq):
                self._require_same(head, changes)
                return head.seq_revision
            head.revision += 1
            effective = [change for change in changes if self._apply(head, change)]
            if effective:
                packed = pack(effective)
                row = (head.revision, packed, zlib.crc32(packed))
                self._connection.execute("INSERT INTO log (revision, changes, checksum) VALUES (?, ?, ?)", row)
            head.seq, head.seq_revision = seq, head.revision
        return head.revision

    def _apply(self, head: HeadRow, change: StoredChange) -> bool:
        """Whether the change changed anything."""
        execute = self._connection.execute
        old = execute("SELECT create_revision, checksum FROM kv WHERE key = ?", (change.key,)).fetchone()
        if change.value is None:
            if old is None:
                return False
            execute("DELETE FROM kv WHERE key = ?", (change.key,))
            head.count(-1, -old[1])
            return True
        created: int = head.revision if old is None else old[0]
        checksum = _checksum(change.key, change.value, created, head.revision)
        execute(_PUT, (change.key, change.value, created, head.revision, checksum))
        head.count(int(old is None), checksum - (0 if old is None else old[1]))
        return True

    def _require_same(self, head: HeadRow, changes: Sequence[StoredChange]) -> None:
        # Deletions are left out: the one that found its key is in the log, the one that did not is not.
        logged = self._log_page(head.seq_revision - 1, 1)
        if not logged or logged[0].revision != head.seq_revision:
            return  # compacted, or it changed nothing
        if [c for c in logged[0].changes if c.value is not None] != [c for c in changes if c.value is not None]:
            epoch = head.guard.epoch
            raise SequenceError(f"commit {head.seq} of epoch {epoch}: another one was applied under this number")

    def barrier(self, leadership: Leadership) -> None:
        self._require_in_place()
        with sqlite_file.errors(self._path):
            guard.require_leadership(_read_head(self._connection, self._path).guard, leadership)

    def log(self, history: int, after_revision: int) -> tuple[list[Commit], int]:
        """Some commits after a revision, in order, and the revision up to which they are all. Raises CompactedError."""
        with sqlite_file.errors(self._path):
            head = _read_head(self._connection, self._path)
            if head.history != history or not head.compacted_revision <= after_revision <= head.revision:
                raise CompactedError(head.compacted_revision)
            commits = self._log_page(after_revision, _LOG_PAGE)
        return commits, commits[-1].revision if len(commits) == _LOG_PAGE else head.revision

    def _log_page(self, after_revision: int, limit: int) -> list[Commit]:
        commits: list[Commit] = []
        query = "SELECT revision, changes, checksum FROM log WHERE revision > ? ORDER BY revision LIMIT ?"
        for revision, packed, checksum in self._connection.execute(query, (after_revision, limit)):
            if zlib.crc32(packed) != checksum:
                raise sqlite_file.corrupt(self._path, f"the log at revision {revision} does not match its checksum")
            commits.append(Commit(revision, unpack(packed)))
        return commits

    def compact(self, revision: int) -> bool:
        """Drop a bounded part of the log; whether some is left to drop (commits get their turn in between)."""
        with self._transaction() as head:
            head.compacted_revision = max(head.compacted_revision, min(revision, head.revision))
            dropped = self._connection.execute(
                "DELETE FROM log WHERE revision IN (SELECT revision FROM log WHERE revision <= ? LIMIT ?)",
                (head.compacted_revision, _COMPACT_PAGE),
            ).rowcount
        return dropped == _COMPACT_PAGE

    def _one(self, query: str) -> str | int:
        row: tuple[str | int] = self._connection.execute(query).fetchone()
        return row[0]

    @contextlib.contextmanager
    def _transaction(self) -> Generator[HeadRow, None, None]:
        """One transaction that ends by writing the head that was read at its beginning, as changed by the block."""
        connection = self._connection
        with sqlite_file.errors(self._path):
            try:
                connection.execute("BEGIN IMMEDIATE")
                head = _read_head(connection, self._path)
                before = astuple(head)
                yield head
                if astuple(head) != before:
                    _write_head(connection, head)
                self._require_in_place()
                connection.execute("COMMIT")
            finally:
                # Never by opening the file anew: after a failed fsync this connection still knows that the
                # transaction did not end well and writes it again, while a new one would find it and believe it.
                if connection.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")


def connect(path: Path) -> sqlite3.Connection:
    """Never makes the file: a missing database is an error, not an empty one."""
    return sqlite3.connect(sqlite_file.uri(path, "rw"), uri=True, timeout=_BUSY_S, isolation_level=None)


def _load(connection: sqlite3.Connection, path: Path) -> Loaded:
    head = _read_head(connection, path)
    records: list[StoredRecord] = []
    digest = 0
    rows = connection.execute("SELECT key, value, create_revision, modify_revision, checksum FROM kv ORDER BY key")
    while page := rows.fetchmany(_LOAD_PAGE):
        for key, value, created, modified, checksum in page:
            if _checksum(key, value, created, modified) != checksum:
                raise sqlite_file.corrupt(path, f"the record {key} does not match its checksum")
            digest += checksum
            records.append(StoredRecord(key, value, created, modified))
    if (len(records), digest & _DIGEST_MASK) != (head.records, head.digest):
        raise sqlite_file.corrupt(path, f"{len(records)} records found, not the {head.records} committed")
    return Loaded(head.history, head.revision, tuple(records))


def _checksum(key: str, value: bytes, created: int, modified: int) -> int:
    return zlib.crc32(value, zlib.crc32(f"{key}\0{created}\0{modified}".encode()))


def _sealed(head: HeadRow) -> Numbers:
    numbers: Numbers = astuple(head)
    return (*numbers, zlib.crc32(repr(numbers).encode()))


def _read_head(connection: sqlite3.Connection, path: Path) -> HeadRow:
    row: Numbers | None = connection.execute(
        "SELECT history, revision, compacted_revision, token, epoch_history, epoch_revision, seq, seq_revision, "
        "records, digest, checksum FROM head"
    ).fetchone()
    if row is None:
        raise sqlite_file.corrupt(path, "without its head row")
    head = HeadRow(*row[:-1])
    if _sealed(head) != row:
        raise sqlite_file.corrupt(path, "its head row does not match its checksum")
    return head


def _write_head(connection: sqlite3.Connection, head: HeadRow) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO head (id, history, revision, compacted_revision, token, epoch_history, epoch_revision, "
        "seq, seq_revision, records, digest, checksum) VALUES (0, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        _sealed(head),
    )
