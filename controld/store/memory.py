"""The store in memory, for simulation and tests: deterministic, no threads, no clock but the event loop's.

`MemoryDisk` is what survives a crash; any number of `MemoryStore` handles share one, as controllers share etcd.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

from controld.core.ids import Epoch
from controld.store import guard
from controld.store.faults import FaultKind, Faults, NoFaults, Operation
from controld.store.guard import Head
from controld.store.port import (
    EVIDENCE_SECONDS,
    Commit,
    CompactedError,
    DeposedError,
    Incumbent,
    LeaderSeen,
    Leadership,
    Loaded,
    OutcomeUnknownError,
    SequenceError,
    StorageFullError,
    StoreClosedError,
    StoredChange,
    StoredRecord,
    StoreError,
    StoreStatus,
)

T = TypeVar("T")

INTRUDER = "intruder"  # who campaigns in an injected DEPOSED


@dataclass(frozen=True, slots=True)
class _Contents:
    revision: int
    records: dict[str, StoredRecord]


@dataclass(slots=True)
class MemoryDisk:
    """`capacity_bytes` bounds keys and values together; beyond it a commit that grows the store is refused."""

    capacity_bytes: int | None = None
    history: int = 1
    revision: int = 0
    compacted_revision: int = 0
    size_bytes: int = 0
    head: Head = field(default_factory=Head)
    records: dict[str, StoredRecord] = field(default_factory=dict[str, StoredRecord])
    log: list[Commit] = field(default_factory=list[Commit])
    incumbent: Incumbent | None = None
    leaders: list[LeaderSeen] = field(default_factory=list[LeaderSeen])
    proofs: int = 0
    backups: dict[str, _Contents] = field(default_factory=dict[str, _Contents])
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """Everyone who waits looks again; who comes later waits for the next."""
        self.changed.set()
        self.changed = asyncio.Event()

    def campaign(self, identity: str) -> Leadership:
        return self._lead(identity, "")

    def take_over(self, identity: str, address: str, token: int) -> Leadership:
        held = self.incumbent.leadership.token if self.incumbent is not None else 0
        if held != token:
            raise DeposedError(f"{identity} would take over from {token}; the store is at {held}")
        leadership = self._lead(identity, address)
        self.prove(leadership)
        return leadership

    def _lead(self, identity: str, address: str) -> Leadership:
        self._vacate()
        leadership = Leadership(identity=identity, token=self.head.token, epoch=self.head.epoch)
        self._stand(Incumbent(leadership, address))
        return leadership

    def _vacate(self) -> None:
        """A head of nobody's: what was led before it is over."""
        self.revision += 1
        self.head = Head(token=self.revision, epoch=Epoch(self.history, self.revision))

    def _stand(self, incumbent: Incumbent | None) -> None:
        self.incumbent = incumbent
        self.leaders.append(LeaderSeen(self.revision, incumbent))
        self.wake()

    def resign(self, leadership: Leadership) -> None:
        guard.require_leadership(self.head, leadership)
        self._vacate()
        self._stand(None)

    def prove(self, leadership: Leadership) -> None:
        """A barrier: of one that took over it is also the evidence that it is alive."""
        guard.require_leadership(self.head, leadership)
        incumbent = self.incumbent
        if incumbent is None or not incumbent.address:
            return
        self.proofs += 1
        asyncio.get_running_loop().call_later(EVIDENCE_SECONDS, self._no_evidence, self.proofs)
        if not incumbent.alive:
            self.revision += 1
            self._stand(replace(incumbent, alive=True))

    def _no_evidence(self, proofs: int) -> None:
        if self.proofs == proofs and self.incumbent is not None:
            self.revision += 1
            self._stand(replace(self.incumbent, alive=False))

    def commit(self, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
        if guard.already_applied(self.head, leadership, seq):
            self._require_same(changes)
            return self.head.revision
        growth = sum(self._growth(change) for change in changes)
        if self.capacity_bytes is not None and growth > 0 and self.size_bytes + growth > self.capacity_bytes:
            raise StorageFullError(f"{self.size_bytes} of {self.capacity_bytes} bytes used, {growth} more needed")
        self.size_bytes += growth
        self.revision += 1
        effective = tuple(change for change in changes if change.value is not None or change.key in self.records)
        for change in effective:
            self._apply(change)
        if effective:
            self.log.append(Commit(self.revision, effective))
        self.head = self.head.after(seq, self.revision)
        self.wake()
        return self.revision

    def _require_same(self, changes: Sequence[StoredChange]) -> None:
        # Deletions are left out: the one that found its key is in the log, the one that did not is not.
        logged = next((commit.changes for commit in reversed(self.log) if commit.revision == self.head.revision), None)
        if logged is not None and _puts(logged) != _puts(changes):
            raise SequenceError(f"commit {self.head.seq} of epoch {self.head.epoch}: another one was applied under it")

    def _growth(self, change: StoredChange) -> int:
        old = self.records.get(change.key)
        before = 0 if old is None else len(change.key) + len(old.value)
        return (0 if change.value is None else len(change.key) + len(change.value)) - before

    def _apply(self, change: StoredChange) -> None:
        if change.value is None:
            del self.records[change.key]
            return
        old = self.records.get(change.key)
        created = self.revision if old is None else old.create_revision
        self.records[change.key] = StoredRecord(change.key, change.value, created, self.revision)

    def restore(self, contents: _Contents) -> None:
        """Nobody leads a restored store, and every position from before it is gone."""
        self.history += 1
        self.revision = self.compacted_revision = contents.revision
        self.records = dict(contents.records)
        self.size_bytes = sum(len(record.key) + len(record.value) for record in self.records.values())
        self.log.clear()
        self.leaders.clear()
        self.incumbent = None
        self.head = Head()
        self.wake()


def _next_after(position: int, log: Sequence[Commit], leaders: Sequence[LeaderSeen]) -> Commit | LeaderSeen | None:
    """Of both, what came first after `position`."""
    found: list[Commit | LeaderSeen] = []
    for items in (log, leaders):
        index = bisect_right(items, position, key=lambda item: item.revision)
        found += items[index : index + 1]
    return min(found, key=lambda item: item.revision, default=None)


def _puts(changes: Sequence[StoredChange]) -> list[StoredChange]:
    return [change for change in changes if change.value is not None]


class MemoryStore:
    """One handle on a `MemoryDisk`; see `controld.store.port.Store` for the contract."""

    def __init__(self, disk: MemoryDisk | None = None, faults: Faults | None = None) -> None:
        self.disk = disk or MemoryDisk()
        self._faults: Faults = faults or NoFaults()
        self._open = False

    async def open(self) -> None:
        self._open = True

    async def close(self) -> None:
        """Also how the simulation crashes a controller: requests already under way (LATE) still arrive."""
        self._open = False
        self.disk.wake()

    async def load(self) -> Loaded:
        return await self._call(Operation.LOAD, self._load)

    def _load(self) -> Loaded:
        records = tuple(self.disk.records[key] for key in sorted(self.disk.records))
        return Loaded(self.disk.history, self.disk.revision, records, self.disk.incumbent)

    async def campaign(self, identity: str) -> Leadership:
        return await self._call(Operation.CAMPAIGN, lambda: self.disk.campaign(identity))

    async def take_over(self, identity: str, address: str, token: int) -> Leadership:
        return await self._call(Operation.CAMPAIGN, lambda: self.disk.take_over(identity, address, token))

    async def resign(self, leadership: Leadership) -> None:
        await self._call(Operation.CAMPAIGN, lambda: self.disk.resign(leadership))

    async def commit(self, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
        kept = tuple(changes)
        guard.require_valid(kept)
        return await self._call(Operation.COMMIT, lambda: self.disk.commit(leadership, seq, kept))

    async def barrier(self, leadership: Leadership) -> None:
        await self._call(Operation.BARRIER, lambda: self.disk.prove(leadership))

    async def watch(self, after_revision: int) -> AsyncGenerator[Commit]:
        async with aclosing(self.follow(after_revision)) as items:
            async for item in items:
                if isinstance(item, Commit):
                    yield item

    async def follow(self, after_revision: int) -> AsyncGenerator[Commit | LeaderSeen]:
        self._require_open()
        disk, history, position = self.disk, self.disk.history, after_revision
        while True:
            changed = disk.changed
            if disk.history != history or not disk.compacted_revision <= position <= disk.revision:
                raise CompactedError(disk.compacted_revision)
            item = _next_after(position, disk.log, disk.leaders)
            if item is not None:
                position = item.revision
                yield item
            else:
                position = disk.revision
                await changed.wait()
            self._require_open()

    async def compact(self, revision: int) -> None:
        self._require_open()
        disk = self.disk
        disk.compacted_revision = max(disk.compacted_revision, min(revision, disk.revision))
        disk.log = [commit for commit in disk.log if commit.revision > disk.compacted_revision]
        disk.leaders = [seen for seen in disk.leaders if seen.revision > disk.compacted_revision]
        disk.wake()

    async def status(self) -> StoreStatus:
        self._require_open()
        disk = self.disk
        return StoreStatus("memory", disk.history, disk.revision, disk.compacted_revision, disk.size_bytes)

    async def backup(self, path: str) -> None:
        """Kept on the disk under `path`; no file is written."""
        self._require_open()
        self.disk.backups[path] = _Contents(self.disk.revision, dict(self.disk.records))

    async def restore(self, path: str) -> None:
        self._require_open()
        contents = self.disk.backups.get(path)
        if contents is None:
            raise FileNotFoundError(2, "no such backup", path)
        self.disk.restore(replace(contents))

    def _require_open(self) -> None:
        if not self._open:
            raise StoreClosedError("the store is closed")

    async def _call(self, operation: Operation, effect: Callable[[], T]) -> T:
        """Run `effect` once, at one moment, with whatever fault is due."""
        self._require_open()
        fault = self._faults.next(operation)
        if fault.before_s:
            await asyncio.sleep(fault.before_s)
            self._require_open()
        match fault.kind:
            case FaultKind.NONE:
                result = effect()
            case FaultKind.LOST_BEFORE:
                raise OutcomeUnknownError(f"{operation}: no answer")
            case FaultKind.LOST_AFTER:
                _unheard(effect)
                raise OutcomeUnknownError(f"{operation}: no answer")
            case FaultKind.LATE:
                asyncio.get_running_loop().call_later(fault.late_s, _unheard, effect)
                raise OutcomeUnknownError(f"{operation}: no answer")
            case FaultKind.STORAGE_FULL:
                if operation in (Operation.CAMPAIGN, Operation.COMMIT):
                    raise StorageFullError(f"{operation}: no space")
                result = effect()
            case FaultKind.DEPOSED:
                if operation is not Operation.LOAD:
                    self.disk.campaign(INTRUDER)
                result = effect()
        if fault.after_s:
            await asyncio.sleep(fault.after_s)
            self._require_open()
        return result


def _unheard(effect: Callable[[], object]) -> None:
    """The request arrives, the answer goes nowhere: also when it is a refusal, as of one that is late."""
    try:
        effect()
    except StoreError:
        return
