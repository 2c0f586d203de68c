"""The memory store with faults: each is what it says, and the guards keep what they promise under any mix of them."""

from __future__ import annotations

import asyncio
import random

import pytest

from controld.store.faults import Fault, FaultKind, Faults, Operation
from controld.store.memory import MemoryDisk, MemoryStore
from controld.store.port import (
    DeposedError,
    Leadership,
    OutcomeUnknownError,
    StorageFullError,
    StoreClosedError,
    StoredChange,
)
from tests.support_store import contents, put


class Script:
    """These faults, in this order, for the operations of one kind; then none."""

    def __init__(self, operation: Operation, *faults: Fault) -> None:
        self._operation = operation
        self._faults = list(faults)

    def next(self, operation: Operation) -> Fault:
        return self._faults.pop(0) if operation is self._operation and self._faults else Fault()


async def opened(disk: MemoryDisk, faults: Faults | None = None) -> MemoryStore:
    store = MemoryStore(disk, faults)
    await store.open()
    return store


@pytest.mark.parametrize(
    ("kind", "applied"),
    [(FaultKind.LOST_BEFORE, False), (FaultKind.LOST_AFTER, True), (FaultKind.LATE, False)],
)
async def test_an_unknown_outcome_and_the_same_commit_again(kind: FaultKind, applied: bool) -> None:
    disk = MemoryDisk()
    store = await opened(disk, Script(Operation.COMMIT, Fault(kind, late_s=0.01)))
    leader = await store.campaign("a")
    with pytest.raises(OutcomeUnknownError):
        await store.commit(leader, 1, [put("x", b"1")])
    assert ("x" in await contents(store)) is applied
    revision = await store.commit(leader, 1, [put("x", b"1")])
    await asyncio.sleep(0.02)  # the late one arrives, and finds itself applied
    assert disk.revision == revision == leader.epoch.revision + 1
    assert [commit.revision for commit in disk.log] == [revision]


async def test_a_late_commit_arrives_whole_when_nobody_was_quicker() -> None:
    disk = MemoryDisk()
    store = await opened(disk, Script(Operation.COMMIT, Fault(FaultKind.LATE, late_s=0.01)))
    leader = await store.campaign("a")
    with pytest.raises(OutcomeUnknownError):
        await store.commit(leader, 1, [put("x"), put("y")])
    await store.close()  # the crash of the controller does not call it back
    await asyncio.sleep(0.02)
    assert set(disk.records) == {"x", "y"}


async def test_a_late_commit_of_a_deposed_leadership_never_applies() -> None:
    disk = MemoryDisk()
    store = await opened(disk, Script(Operation.COMMIT, Fault(FaultKind.LATE, late_s=0.01)))
    old = await store.campaign("a")
    with pytest.raises(OutcomeUnknownError):
        await store.commit(old, 1, [put("x", b"old")])
    new = await (other := await opened(disk)).campaign("b")
    await other.commit(new, 1, [put("x", b"new")])
    await asyncio.sleep(0.02)
    assert await contents(other) == {"x": b"new"}
    with pytest.raises(DeposedError):
        await store.commit(old, 1, [put("x", b"old")])


async def test_no_space_applies_nothing_and_stops_no_barrier() -> None:
    disk = MemoryDisk()
    store = await opened(disk, Script(Operation.COMMIT, Fault(FaultKind.STORAGE_FULL)))
    leader = await store.campaign("a")
    with pytest.raises(StorageFullError):
        await store.commit(leader, 1, [put("x")])
    assert disk.records == {}
    await (await opened(disk, Script(Operation.BARRIER, Fault(FaultKind.STORAGE_FULL)))).barrier(leader)
    await store.commit(leader, 1, [put("x")])


@pytest.mark.parametrize("operation", [Operation.COMMIT, Operation.BARRIER])
async def test_one_deposed_by_a_fault_is_deposed_for_good(operation: Operation) -> None:
    disk = MemoryDisk()
    store = await opened(disk, Script(operation, Fault(FaultKind.DEPOSED)))
    leader = await store.campaign("a")
    for _ in range(2):
        with pytest.raises(DeposedError):
            await (store.commit(leader, 1, [put("x")]) if operation is Operation.COMMIT else store.barrier(leader))
    assert disk.records == {}


async def test_a_crash_before_the_request_arrives_applies_nothing_and_after_it_all() -> None:
    for fault, applied in ((Fault(before_s=0.02), False), (Fault(after_s=0.02), True)):
        disk = MemoryDisk()
        store = await opened(disk, Script(Operation.COMMIT, fault))
        leader = await store.campaign("a")
        commit = asyncio.ensure_future(store.commit(leader, 1, [put("x")]))
        await asyncio.sleep(0.005)
        await store.close()
        with pytest.raises(StoreClosedError):
            await commit
        assert bool(disk.records) is applied


class Mixed:
    """Any fault at any time, seeded."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def next(self, operation: Operation) -> Fault:
        kind = self._rng.choices(list(FaultKind), weights=[10, 1, 1, 1, 1, 0.3])[0]
        if operation is Operation.LOAD:
            kind = FaultKind.NONE
        delays = [self._rng.choice([0.0, 0.0, 0.0005]) for _ in range(2)]
        return Fault(kind, delays[0], delays[1], late_s=self._rng.choice([0.0, 0.001, 0.003]))


async def controller(name: str, disk: MemoryDisk, rng: random.Random, acknowledged: dict[str, int]) -> None:
    """Leads over and over; tries an unknown commit again with the same number; notes what was acknowledged."""
    store = await opened(disk, Mixed(rng))
    for _ in range(10):
        await asyncio.sleep(rng.choice([0, 0.002, 0.01]))  # leads for a while, if it can, before another comes
        try:
            leader = await store.campaign(name)
        except (OutcomeUnknownError, StorageFullError):
            continue
        for seq in range(1, 12):
            key = f"{leader.epoch}/{seq:02d}"
            try:
                acknowledged[key] = await once(store, leader, seq, [put(key, name.encode()), put("last", key.encode())])
                await store.barrier(leader)
            except (DeposedError, OutcomeUnknownError, StorageFullError):
                break
            await asyncio.sleep(rng.choice([0, 0, 0.0005]))


async def once(store: MemoryStore, leader: Leadership, seq: int, changes: list[StoredChange]) -> int:
    try:
        return await store.commit(leader, seq, changes)
    except OutcomeUnknownError:
        return await store.commit(leader, seq, changes)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_an_acknowledged_commit_is_there_once_and_leaderships_do_not_interleave(
    seed: int,
) -> None:
    rng = random.Random(seed)
    disk, acknowledged = MemoryDisk(), dict[str, int]()
    await asyncio.gather(*(controller(name, disk, random.Random(rng.random()), acknowledged) for name in "abc"))
    await asyncio.sleep(0.01)  # what is late has arrived
    assert len(acknowledged) > 3
    by_key = {commit.changes[0].key: commit.revision for commit in disk.log}
    assert len(by_key) == len(disk.log), f"seed {seed}: a commit was applied twice"
    assert acknowledged.items() <= by_key.items(), f"seed {seed}: an acknowledged commit is lost or moved"
    order = [tuple(int(part) for part in key.replace("/", ".").split(".")) for key in by_key]
    assert order == sorted(order), f"seed {seed}: a deposed leadership wrote, or out of turn"
