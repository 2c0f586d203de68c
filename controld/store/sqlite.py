"""The embedded store: SQLite in one data directory, for one controller on one machine.

Every blocking call runs on one thread of its own, so the event loop never waits for a disk, and commits have one
order. A commit whose caller is cancelled happens wholly or not at all: its outcome is unknown to the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from controld.store import guard, sqlite_backup, sqlite_db, sqlite_file, sqlite_room
from controld.store.port import Commit, Leadership, Loaded, StoreClosedError, StoredChange, StoreError, StoreStatus
from controld.store.sqlite_db import Database

T = TypeVar("T")

SIZE_BYTES_MAX = 8 << 30  # a runaway is refused with StorageFullError before it takes the disk from the machine


class SqliteStore:
    """See `controld.store.port.Store` for the contract. `directory` is made where it is missing.

    A new store's history begins at `first_history`. Agents may have seen an earlier one of this name: where it grows
    with the time of making, no fencing token of a store that was lost is ever granted again. `reserve_bytes` are kept
    on the disk for a start that finds it full.
    """

    def __init__(
        self,
        directory: Path,
        *,
        size_bytes_max: int = SIZE_BYTES_MAX,
        first_history: int = 1,
        reserve_bytes: int = 0,
    ) -> None:
        self._directory = directory
        self._path = directory / sqlite_file.DATABASE
        self._size_bytes_max = size_bytes_max
        self._first_history = first_history
        self._reserve_bytes = reserve_bytes
        self._lock = sqlite_file.DirectoryLock(directory)
        self._thread: ThreadPoolExecutor | None = None
        self._database: Database | None = None
        self._changed = asyncio.Event()

    async def open(self) -> None:
        if self._thread is not None:
            raise StoreClosedError(f"{self._path}: is open already")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        try:
            await self._submit(self._open)
        except BaseException:  # also cancelled, while the thread goes on opening: what it gets is given back
            self._thread.submit(self._close)
            self._stop_thread()
            raise

    async def close(self) -> None:
        """Waits for what is under way. Whoever watches gets StoreClosedError."""
        if self._thread is None:
            return
        try:
            await asyncio.shield(self._submit(self._close))
        finally:
            self._stop_thread()
            self._wake()

    async def load(self) -> Loaded:
        return await self._run(lambda database: database.load())

    async def campaign(self, identity: str) -> Leadership:
        return await self._run(lambda database: database.campaign(identity))

    async def commit(self, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
        kept = tuple(changes)
        guard.require_valid(kept)
        return await self._run(lambda database: database.commit(leadership, seq, kept), wake=True)

    async def barrier(self, leadership: Leadership) -> None:
        await self._run(lambda database: database.barrier(leadership))

    async def watch(self, after_revision: int) -> AsyncIterator[Commit]:
        history = (await self._run(lambda database: database.head())).history
        position = after_revision
        while True:
            changed = self._changed  # taken before looking: a commit in between is not missed
            commits, upto = await self._run(lambda database, after=position: database.log(history, after))
            for commit in commits:
                yield commit
            if upto == position:
                await changed.wait()
            position = upto

    async def compact(self, revision: int) -> None:
        while await self._run(lambda database: database.compact(revision)):
            pass

    async def status(self) -> StoreStatus:
        return await self._run(self._status)

    async def backup(self, path: str) -> None:
        """Write a whole, checked copy to `path`, in one step; commits go on meanwhile. Raises OSError, StoreError."""
        self._opened()
        await self.copy_to(path)

    async def copy_to(self, path: str) -> None:
        """As `backup`, of a store that this process need not have open: another one may serve it."""
        await asyncio.to_thread(sqlite_backup.write, self._path, Path(path))

    async def restore(self, path: str) -> None:
        """Open or not: replace the database by a backup; the old one stays beside it as `*.replaced`.

        Afterwards nobody leads, and the history counter is above every one this directory has seen.
        Raises StoreCorruptError where the backup is damaged (nothing is changed then), StoreLockedError, OSError.
        """
        if self._thread is None:
            await asyncio.to_thread(self._restore_closed, Path(path))
        else:
            await self._run(lambda database: self._restore_open(database, Path(path)), wake=True)

    def _opened(self) -> Database:
        if self._database is None:
            raise StoreClosedError(f"{self._path}: the store is closed")
        return self._database

    async def _run(self, work: Callable[[Database], T], *, wake: bool = False) -> T:
        """On the thread. Woken at the end or at a cancellation: who looks then waits for the thread anyway."""
        self._opened()
        result = self._submit(lambda: work(self._opened()))
        if wake:
            result.add_done_callback(lambda _: self._wake())
        return await result

    def _submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _wake(self) -> None:
        """Every watch looks again; who comes later waits for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _stop_thread(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    # Below: on the thread.

    def _open(self) -> None:
        with sqlite_file.directory_errors(self._directory):
            sqlite_file.prepare(self._directory)
            self._lock.acquire()
            try:
                sqlite_room.make(self._directory)
                self._open_locked()
            except BaseException as error:
                self._lock.release()
                # SQLite says of a full disk whatever it failed at: no memory for its index, an unreadable file.
                if isinstance(error, (OSError, StoreError)) and (full := sqlite_room.full(self._directory)):
                    raise full from error
                raise
            sqlite_room.reserve(self._directory, self._reserve_bytes)

    def _open_locked(self) -> None:
        kept = sqlite_file.read_history(self._path)
        if self._path.exists():
            sqlite_file.check(self._path)
            if sqlite_db.history_of(self._path) < kept:  # an old file was copied back by hand
                sqlite_db.begin_history(self._path, kept + 1)
        else:
            sqlite_file.require_absent(self._path)
            with sqlite_file.new_file(self._path) as partial:
                sqlite_db.create(partial, self._first_history)
        database = Database(self._path, self._size_bytes_max)
        sqlite_file.write_history(self._path, database.head().history)
        self._database = database

    def _close(self) -> None:
        database, self._database = self._database, None
        try:
            if database is not None:
                database.close()
        finally:
            self._lock.release()

    def _restore_closed(self, backup: Path) -> None:
        with sqlite_file.directory_errors(self._directory):
            sqlite_file.prepare(self._directory)
        self._lock.acquire()
        try:
            sqlite_backup.install(self._path, backup)
        finally:
            self._lock.release()

    def _restore_open(self, database: Database, backup: Path) -> None:
        self._database = None
        database.close()
        try:
            sqlite_backup.install(self._path, backup)
        finally:  # the backup, or the old one where it was not installed
            self._database = Database(self._path, self._size_bytes_max)

    def _status(self, database: Database) -> StoreStatus:
        head = database.head()
        return StoreStatus("sqlite", head.history, head.revision, head.compacted_revision, sqlite_file.size(self._path))
