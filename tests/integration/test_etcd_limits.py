"""Where an etcd ends: what it takes in a transaction, its space, its history, and who may open it."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from controld.store.etcd import EtcdStore
from controld.store.etcd_client import GrpcWire
from controld.store.etcd_endpoint import parse_endpoint
from controld.store.etcd_session import EtcdTimes
from controld.store.port import (
    CommitTooLargeError,
    CompactedError,
    DeposedError,
    Leadership,
    StorageFullError,
    StoreCorruptError,
    StoreLockedError,
    StoreUnavailableError,
)
from controld.store.sqlite import SqliteStore
from tests import support_etcd
from tests.support_etcd_wire import Loss, Lossy, lossy_stores
from tests.support_store import KIB, contents, put


@dataclass
class Own:
    """A member of its own, made with whatever etcd is to be told."""

    stack: ExitStack
    members: support_etcd.Members | None = None

    def store(
        self,
        extra: Mapping[str, object] | None = None,
        *,
        store_bytes_max: int = 8 << 30,
        directory: Path | None = None,
    ) -> EtcdStore:
        self.members = support_etcd.start(self.stack, extra=extra or {})
        return self.members.store(size_bytes_max=store_bytes_max, directory=directory)


@pytest.fixture
def own() -> Iterator[Own]:
    with ExitStack() as stack:
        yield Own(stack)


@pytest.fixture
async def lossy() -> AsyncIterator[Lossy]:
    async with lossy_stores(EtcdTimes()) as made:
        yield made


class TestLimits:
    async def test_those_of_a_foreign_etcd_are_found_and_kept(self, own: Own) -> None:
        store = own.store({"max-txn-ops": 128, "max-request-bytes": 1_536 * KIB})
        await store.open()
        status = await store.status()
        assert (status.commit_operations_max, status.commit_bytes_max) == (127, 1_480 * KIB)
        leader = await store.campaign("a")
        before = await store.load()
        with pytest.raises(CommitTooLargeError, match="--max-txn-ops"):
            await store.commit(leader, 1, [put(f"k/{i}") for i in range(128)])
        with pytest.raises(CommitTooLargeError, match="--max-request-bytes"):
            await store.commit(leader, 1, [put("x", bytes(1_600 * KIB))])
        assert await store.load() == before, "not even the probe wrote anything"
        await store.commit(leader, 1, [put(f"k/{i}") for i in range(127)])
        await store.commit(leader, 2, [put("x", bytes(1_400 * KIB))])
        await store.close()

    async def test_the_largest_that_is_promised_is_taken(self, own: Own) -> None:
        store = own.store()
        await store.open()
        status = await store.status()
        operations, size_bytes = status.commit_operations_max, status.commit_bytes_max
        assert operations is not None
        assert size_bytes is not None
        assert operations >= 512
        leader = await store.campaign("a")
        value = bytes(size_bytes // operations - 9)
        await store.commit(leader, 1, [put(f"k/{i:07d}", value) for i in range(operations)])
        await store.close()


async def filled(store: EtcdStore, leader: Leadership, size_bytes: int) -> int:
    """The number of the commit that was refused."""
    for seq in range(1, 2000):
        try:
            await store.commit(leader, seq, [put("x", bytes(size_bytes))])
        except StorageFullError:
            return seq
    pytest.fail("it never was full")


class TestSpace:
    async def test_etcds_own_alarm_is_told_as_full_and_goes_away_by_itself(self, own: Own) -> None:
        """What fills it is history, as far as the store is concerned: nothing is refused before etcd refuses it."""
        store = own.store({"quota-backend-bytes": 4 << 20})
        await store.open()
        leader = await store.campaign("a")
        seq = await filled(store, leader, 64 * KIB)
        await store.barrier(leader)
        async with asyncio.timeout(60):
            while True:  # compacted, defragmented and disarmed in the background
                try:
                    await store.commit(leader, seq, [put("x", b"again")])
                    break
                except StorageFullError:
                    await asyncio.sleep(0.05)
        assert await contents(store) == {"x": b"again"}
        status = await store.status()
        assert not any("space alarm" in problem for problem in status.problems)
        assert status.size_bytes < 1 << 20
        await store.close()

    async def test_a_store_below_its_limit_never_sets_off_the_alarm(self, own: Own) -> None:
        store = own.store({"quota-backend-bytes": 8 << 20}, store_bytes_max=2 << 20)
        await store.open()
        leader = await store.campaign("a")
        seq, refused = 1, 0
        for number in range(200):
            try:
                await store.commit(leader, seq, [put(f"k/{number}", bytes(32 * KIB))])
                seq += 1
            except StorageFullError:
                refused += 1
        assert refused > 0
        assert not any("space alarm" in problem for problem in (await store.status()).problems)
        assert 10 < len(await contents(store)) < 100
        await store.close()


class TestHistory:
    async def test_a_snapshot_put_back_behind_our_back_raises_the_counter(self, own: Own, tmp_path: Path) -> None:
        store = own.store(directory=tmp_path / "controld")
        assert own.members is not None
        process = own.members.processes[0]
        await store.open()
        await store.commit(await store.campaign("a"), 1, [put("x", b"1")])
        await store.close()
        process.stop()
        shutil.copytree(process.config.directory / "data", tmp_path / "saved")
        process.start()
        await store.open()
        await store.campaign("a")
        old = await store.campaign("a")
        await store.commit(old, 1, [put("x", b"2")])
        position = (await store.load()).revision
        await store.close()
        process.stop()
        shutil.rmtree(process.config.directory / "data")
        shutil.copytree(tmp_path / "saved", process.config.directory / "data")
        process.start()
        await store.open()
        loaded = await store.load()
        assert loaded.history == 2
        assert [record.value for record in loaded.records] == [b"1"]
        assert loaded.incumbent is None
        with pytest.raises(DeposedError):
            await store.commit(old, 2, [put("x", b"3")])
        new = await store.campaign("b")
        assert new.epoch > old.epoch
        assert new.token == old.token  # the same revision has come up again
        with pytest.raises(DeposedError):
            await store.commit(old, 2, [put("x", b"3")])
        with pytest.raises(DeposedError):
            await store.commit(old, 1, [put("x", b"2")])
        with pytest.raises(DeposedError):
            await store.barrier(old)
        with pytest.raises(CompactedError):
            await anext(store.watch(min(position, loaded.revision - 1)))
        await store.close()

    async def test_one_machine_grows_to_several_and_shrinks_again(self, lossy: Lossy, tmp_path: Path) -> None:
        small = SqliteStore(tmp_path / "small")
        await small.open()
        leader = await small.campaign("a")
        for seq in range(1, 20):
            await small.commit(leader, seq, [put(f"k/{100 - seq}", b"%d" % seq)])
        saved = await small.load()
        await small.backup(str(tmp_path / "one"))
        await lossy.store.restore(str(tmp_path / "one"))
        grown = await lossy.store.load()
        assert grown.history > saved.history
        assert {r.key: r.value for r in grown.records} == {r.key: r.value for r in saved.records}
        by_key = {r.key: r.create_revision for r in grown.records}
        order = sorted(saved.records, key=lambda r: r.create_revision)
        created = [by_key[r.key] for r in order]
        assert created == sorted(created), "no later lease has a smaller epoch"
        await lossy.store.backup(str(tmp_path / "three"))
        await small.restore(str(tmp_path / "three"))
        shrunk = await small.load()
        assert shrunk.records == grown.records
        assert (shrunk.history, shrunk.revision) == (max(grown.history, saved.history) + 1, grown.revision)
        await small.close()

    async def test_a_restore_cut_short_is_no_store_until_it_is_run_to_its_end(
        self, lossy: Lossy, tmp_path: Path
    ) -> None:
        leader = await lossy.store.campaign("a")
        await lossy.store.commit(leader, 1, [put(f"k/{i}") for i in range(50)])
        await lossy.store.backup(str(tmp_path / "backup"))
        lossy.lose(None, *[Loss.REQUEST] * 1000)
        task = asyncio.ensure_future(lossy.store.restore(str(tmp_path / "backup")))
        await lossy.wire.lost.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        lossy.wire.losses.clear()
        for attempt in (lossy.other.load, lambda: lossy.other.campaign("b")):
            with pytest.raises(StoreCorruptError, match="run `controld restore` to its end"):
                await attempt()
        await lossy.other.restore(str(tmp_path / "backup"))
        assert len(await contents(lossy.store)) == 50
        await lossy.other.commit(await lossy.other.campaign("b"), 1, [put("x")])


class TestOpen:
    async def test_a_data_directory_has_one_controller(self, tmp_path: Path) -> None:
        support_etcd.require_etcd()
        process = support_etcd.shared().processes[0]
        prefix = support_etcd.fresh_prefix()
        first = support_etcd.make_store(process, prefix=prefix, directory=tmp_path)
        second = support_etcd.make_store(process, prefix=prefix, directory=tmp_path)
        await first.open()
        with pytest.raises(StoreLockedError):
            await second.open()
        await first.close()
        await second.open()
        await second.close()

    async def test_nobody_there_is_told_after_a_while(self, tmp_path: Path) -> None:
        endpoint = parse_endpoint(f"unix:{tmp_path.parent}/c:0")
        store = EtcdStore(lambda: GrpcWire([endpoint]), rng=random.Random(1), times=EtcdTimes(open=0.3))
        with pytest.raises(StoreUnavailableError, match=r"no answer from etcd in 0\.3 s"):
            await store.open()
        await store.close()
