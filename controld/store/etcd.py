"""The replicated store: etcd's Raft under the store port, one member beside each controller.

What makes it safe stands in `etcd_txn` (the guards) and `etcd_watch` (no gap); here is what is repeated and for how
long, and what an answer means to the caller. A transaction whose outcome is unknown is given again as it was: the head
tells whether it was applied. Nothing here decides who leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from controld.core.ids import Epoch
from controld.store import etcd_evidence, etcd_load, etcd_memory, etcd_probe, etcd_restore, etcd_txn, etcd_watch, guard
from controld.store.etcd_evidence import Evidence
from controld.store.etcd_keys import HISTORY_FIRST, Claim, Keys, history_text, read_history
from controld.store.etcd_members import EtcdMembers
from controld.store.etcd_probe import Limits
from controld.store.etcd_session import Attempts, EtcdTimes, Session
from controld.store.etcd_space import Space, compact_to
from controld.store.etcd_wire import STATUS, TXN, Meaning, Wire, WireError, meaning
from controld.store.guard import Head
from controld.store.port import (
    Commit,
    CommitTooLargeError,
    DeposedError,
    LeaderSeen,
    Leadership,
    Loaded,
    MemberLostError,
    OutcomeUnknownError,
    StorageFullError,
    StoreClosedError,
    StoreCorruptError,
    StoredChange,
    StoreError,
    StoreStatus,
    StoreUnavailableError,
)
from controld.store.sqlite_file import DirectoryLock, directory_errors, prepare
from virialpb.etcd.v1 import etcd_pb2 as pb

PREFIX = "virial"
SIZE_BYTES_MAX = 8 << 30
NONCE_BITS = 64


class EtcdStore:
    """See `controld.store.port.SharedStore` for the contract.

    `connect` makes the wire when the store is opened. `directory` keeps what was seen and is locked while the store is
    open; without one a snapshot of etcd that is brought back behind our back goes unnoticed. `rng` tells takeovers
    apart. `first_history`: where the history of a new store begins, as for the embedded store.
    """

    def __init__(
        self,
        connect: Callable[[], Wire],
        *,
        rng: random.Random,
        directory: Path | None = None,
        prefix: str = PREFIX,
        size_bytes_max: int = SIZE_BYTES_MAX,
        times: EtcdTimes | None = None,
        first_history: int = HISTORY_FIRST,
    ) -> None:
        self._connect = connect
        self._rng = rng
        self._directory = directory
        self._keys = Keys(prefix)
        self._times = times or EtcdTimes()
        self._space = Space(size_bytes_max)
        # The member beside this controller, and through it the others; for an etcd whose members are ours.
        self.members = EtcdMembers(self._opened, size_bytes_max)
        self._limits = Limits(0, 0)
        self._session: Session | None = None
        self._evidence: Evidence | None = None
        self._lock: DirectoryLock | None = None
        self._first_history = first_history
        self._seen = Epoch(0, 0)
        self._commit_seconds = 0.0

    async def open(self) -> None:
        """Raises StoreUnavailableError, StoreLockedError, StoreCorruptError, OSError."""
        if self._session is not None:
            raise StoreClosedError("the store is open already")
        if self._directory is not None:
            self._lock = await asyncio.to_thread(_locked, self._directory)
        try:
            self._session = Session(self._connect(), self._keys, self._times)
            await self._begin(self._session)
        except BaseException:
            await self.close()
            raise

    async def _begin(self, session: Session) -> None:
        """Wait for a member with a majority; make sure of the history counter; ask what fits into a transaction."""
        attempts = Attempts(self._times, self._times.open)
        trouble: StoreError | WireError | None = None
        while await attempts.next():
            try:
                await self._ensure_history(session)
                self._limits = await etcd_probe.probe(session)
            except WireError as error:
                trouble = error
            else:
                return
        raise StoreUnavailableError(
            f"no answer from etcd in {self._times.open:g} s ({trouble}); is its member running?"
        )

    async def _ensure_history(self, session: Session) -> None:
        """Raises WireError, StoreCorruptError, OSError."""
        seen = Epoch(0, 0)
        if self._directory is not None:
            seen = await asyncio.to_thread(etcd_memory.read, self._directory)
        found = await session.call(TXN, pb.TxnRequest(success=[etcd_txn.get(self._keys.history)]), self._times.read)
        kv, revision = etcd_txn.one(found, 0), found.header.revision
        history, restoring = (0, False) if kv is None else read_history(kv.value)
        if kv is None or Epoch(history, revision) < seen:
            history = max(self._first_history if kv is None else 0, seen.history + 1)
            before = None if kv is None else kv.value
            request = etcd_txn.begin_history(self._keys, before, history_text(history, restoring=restoring))
            response = await session.call(TXN, request, self._times.read)
            if not response.succeeded:  # another controller was quicker
                await self._ensure_history(session)
                return
            revision = response.header.revision
        await self._remember(Epoch(history, revision))

    async def close(self) -> None:
        session, self._session = self._session, None
        if self._evidence is not None:
            self._evidence.stop()
            self._evidence = None
        self._space.stop()
        try:
            if session is not None:
                await session.close()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    async def load(self) -> Loaded:
        session = self._opened()
        attempts = Attempts(self._times, self._times.read)
        trouble: WireError | None = None
        while await attempts.next():
            try:
                loaded = await etcd_load.load(session)
            except WireError as error:
                trouble = error  # also "compacted", on a load that took longer than the history is kept
            else:
                self._seen = max(self._seen, Epoch(loaded.history, loaded.revision))
                return loaded
        raise OutcomeUnknownError(f"the store could not be loaded: {trouble}")

    async def campaign(self, identity: str) -> Leadership:
        """Depose whoever leads. Raises OutcomeUnknownError, StorageFullError, DeposedError where another is quicker."""
        return await self._lead(identity, "", None)

    async def take_over(self, identity: str, address: str, token: int) -> Leadership:
        return await self._lead(identity, address, token)

    async def _lead(self, identity: str, address: str, token: int | None) -> Leadership:
        session = self._opened()
        claim = Claim(identity, address, f"{self._rng.getrandbits(NONCE_BITS):016x}", evidence=bool(address))
        attempts = Attempts(self._times, self._times.campaign)
        request: pb.TxnRequest | None = None
        history, lease = 0, 0
        trouble: WireError | None = None
        while await attempts.next():
            try:
                if request is None:
                    history, leads = await self._office(session, attempts.timeout)
                    if token is not None and leads != token:
                        raise DeposedError(f"{identity} would take over from {token}; the store is at {leads}")
                    if claim.evidence:
                        lease = await etcd_evidence.grant(session, attempts.timeout)
                    request = etcd_txn.take_over(self._keys, history, leads, claim, lease)
                response = await session.call(TXN, request, attempts.timeout)
            except WireError as error:
                trouble = self._doubt(session, error, trouble if request is not None else None)
                continue
            taken = response.header.revision if response.succeeded else _taken_by(response, claim)
            if taken:
                return await self._leads(session, Leadership(identity, taken, Epoch(history, taken)), claim, lease)
            raise DeposedError(f"{identity} did not take over: another controller was quicker")
        raise OutcomeUnknownError(f"the takeover was not answered: {trouble}")

    async def _leads(self, session: Session, leadership: Leadership, claim: Claim, lease: int) -> Leadership:
        await self._remember(leadership.epoch)
        if self._evidence is not None:
            self._evidence.stop()
        self._evidence = Evidence(session, leadership.token, claim.nonce, lease) if claim.evidence else None
        return leadership

    async def _office(self, session: Session, timeout_seconds: float) -> tuple[int, int]:
        """(history, token of who leads now or 0). Raises WireError, StoreCorruptError."""
        asked = pb.TxnRequest(success=[etcd_txn.get(self._keys.history), etcd_txn.get(self._keys.leader)])
        response = await session.call(TXN, asked, timeout_seconds)
        history = etcd_load.settled(etcd_txn.one(response, 0))
        leader = etcd_txn.one(response, 1)
        return history, 0 if leader is None else leader.mod_revision

    async def resign(self, leadership: Leadership) -> None:
        session = self._opened()
        if self._evidence is not None:
            self._evidence.stop()
            self._evidence = None
        attempts = Attempts(self._times, self._times.campaign)
        doubt: WireError | None = None
        while await attempts.next():
            try:
                response = await session.call(TXN, etcd_txn.resign(self._keys, leadership.token), attempts.timeout)
            except WireError as error:
                doubt = error
            else:
                if response.succeeded or doubt is not None:  # in doubt: it is over either way
                    return
                raise DeposedError(f"{leadership.identity} resigned at epoch {leadership.epoch}, and led no more")
        raise OutcomeUnknownError(f"the resignation was not answered: {doubt}")

    async def commit(self, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
        """Also raises SequenceError and CommitTooLargeError, both certain."""
        kept = tuple(changes)
        guard.require_valid(kept)
        session = self._opened()
        _require_possible(leadership)
        request = etcd_txn.commit(self._keys, leadership, seq, kept)
        self._limits.require(request)
        await self._space.require(session, kept)
        attempts = Attempts(self._times, self._times.commit, self._commit_seconds)
        loop = asyncio.get_running_loop()
        doubt: WireError | None = None
        while await attempts.next():
            began = loop.time()
            try:
                response = await session.call(TXN, request, attempts.timeout)
            except WireError as error:
                attempts.failed(error)
                doubt = self._doubt(session, error, doubt)
                continue
            self._commit_seconds += (loop.time() - began - self._commit_seconds) / 8
            if response.succeeded:
                return response.header.revision
            try:
                head = etcd_txn.head_of(response)
                if guard.already_applied(head, leadership, seq):
                    await self._require_same(session, head, kept)
                    return head.revision
            except DeposedError as error:
                if doubt is not None:  # the first attempt may have come before the takeover
                    raise OutcomeUnknownError(f"a commit in doubt ({doubt}) could not be repeated: {error}") from error
                raise
            raise StoreCorruptError(f"etcd: commit {seq} of epoch {leadership.epoch} is due, and yet its guard failed")
        raise OutcomeUnknownError(f"commit {seq} of epoch {leadership.epoch} was not answered: {doubt}")

    def _doubt(self, session: Session, error: WireError, before: WireError | None) -> WireError:
        """The error of a write that may have had an effect. Raises what is certain, unless an earlier one is not."""
        known = meaning(error)
        if known is Meaning.FULL:
            self._space.relieve_soon(session)
        if before is None and known is Meaning.FULL:
            raise StorageFullError(f"{error}; it is compacted and defragmented now") from error
        if before is None and known is Meaning.TOO_LARGE:
            raise CommitTooLargeError(str(error)) from error
        return error

    async def _require_same(self, session: Session, head: Head, changes: Sequence[StoredChange]) -> None:
        """Raises SequenceError where another commit was applied under the number. Nothing was written since."""
        puts = [change for change in changes if change.value is not None]
        request = pb.TxnRequest(success=[etcd_txn.get(self._keys.record(change.key)) for change in puts])
        attempts = Attempts(self._times, self._times.commit)
        while await attempts.next():
            try:
                response = await session.call(TXN, request, attempts.timeout)
            except WireError:
                continue
            for index, change in enumerate(puts):
                kv = etcd_txn.one(response, index)
                if kv is None or (kv.mod_revision, kv.value) != (head.revision, change.value):
                    raise guard.another_applied(head)
            return
        raise OutcomeUnknownError("a repeated commit was applied before, but what it wrote could not be read")

    async def barrier(self, leadership: Leadership) -> None:
        session = self._opened()
        _require_possible(leadership)
        try:
            response = await session.call(TXN, etcd_txn.barrier(self._keys, leadership), self._times.barrier)
        except WireError as error:
            if meaning(error) is Meaning.REFUSED:
                raise MemberLostError(f"no proof of leadership: {error}") from error
            raise OutcomeUnknownError(f"no proof of leadership: {error}") from error
        if not response.succeeded:
            raise DeposedError(f"{leadership.identity} led at epoch {leadership.epoch}, and leads no more")
        if self._evidence is not None:
            self._evidence.proved(leadership.token)

    async def watch(self, after_revision: int) -> AsyncGenerator[Commit]:
        """Goes on by itself when etcd can be reached again."""
        position = after_revision
        while True:
            with contextlib.suppress(OutcomeUnknownError):
                async with contextlib.aclosing(etcd_watch.follow(self._opened(), position)) as items:
                    async for item in items:
                        position = item.revision
                        if isinstance(item, Commit):
                            yield item

    async def follow(self, after_revision: int) -> AsyncGenerator[Commit | LeaderSeen]:
        async with contextlib.aclosing(etcd_watch.follow(self._opened(), after_revision)) as items:
            async for item in items:
                yield item

    async def compact(self, revision: int) -> None:
        """Also defragments and disarms the space alarm, where space is short. Raises OutcomeUnknownError."""
        session = self._opened()
        try:
            status = await session.call(STATUS, pb.StatusRequest(), self._times.status)
            await compact_to(session, min(revision, status.header.revision))
            await self._space.relieve(session, compact=False)
        except WireError as error:
            raise OutcomeUnknownError(f"not compacted: {error}") from error
        await self._remember(self._seen)

    async def status(self) -> StoreStatus:
        """Of the member beside this controller, also when it has no majority. Raises StoreUnavailableError."""
        session = self._opened()
        try:
            status = await session.call(STATUS, pb.StatusRequest(), self._times.status)
            history, revision = await etcd_load.local_history(session)
            compacted_revision = await session.compacted_revision()
        except WireError as error:
            raise StoreUnavailableError(f"the etcd member does not answer: {error}") from error
        return StoreStatus(
            kind="etcd",
            history=history,
            revision=revision,
            compacted_revision=compacted_revision,
            size_bytes=status.db_size,
            commit_operations_max=self._limits.operations_max,
            commit_bytes_max=self._limits.bytes_max,
            problems=etcd_probe.problems(status),
        )

    async def backup(self, path: str) -> None:
        """All records as of one revision, in the form of the embedded store's backups. Raises OSError, StoreError."""
        loaded = await self.load()
        await asyncio.to_thread(etcd_restore.write_backup, Path(path), loaded)

    async def restore(self, path: str) -> None:
        """From a backup of this store or of the embedded one. Raises OSError, StoreError.

        When it is cut short, the store refuses to be loaded until a restore is run to its end.
        """
        session = self._opened()
        backup = await asyncio.to_thread(etcd_restore.read_backup, Path(path))
        history = await etcd_restore.restore(session, self._limits, backup, history_seen=self._seen.history)
        await self._remember(Epoch(history, 0))

    async def _remember(self, seen: Epoch) -> None:
        self._seen = max(self._seen, seen)
        if self._directory is not None:
            await asyncio.to_thread(etcd_memory.write, self._directory, self._seen)

    @property
    def short(self) -> asyncio.Event:
        """Set when space is short; cleared by whoever cares for the members."""
        return self._space.short

    def _opened(self) -> Session:
        if self._session is None:
            raise StoreClosedError("the store is closed")
        return self._session


def _require_possible(leadership: Leadership) -> None:
    """In etcd the token is the revision of the takeover, as the epoch has it. Raises DeposedError."""
    if leadership.token != leadership.epoch.revision or leadership.token <= 0:
        raise DeposedError(f"{leadership.identity}: nobody ever led with token {leadership.token}, {leadership.epoch}")


def _taken_by(response: pb.TxnResponse, claim: Claim) -> int:
    """The token of the leadership, where an attempt whose answer was lost had won it; 0: another one leads."""
    leader = etcd_txn.one(response, 0)
    return leader.mod_revision if leader is not None and leader.value == claim.encode() else 0


def _locked(directory: Path) -> DirectoryLock:
    with directory_errors(directory):
        prepare(directory)
        lock = DirectoryLock(directory)
        lock.acquire()
        return lock
