"""Rows H2 and H3 on the stores as they are: restart after compaction, loud corruption, bytes of every version load."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from controld.core import keys
from controld.core.model import Cluster, Record
from controld.core.state import State
from controld.replica.states import restore_in_slices
from controld.store import codec, codec_values, etcd_watch, sqlite_db, sqlite_file
from controld.store.etcd_client import GrpcWire
from controld.store.etcd_endpoint import parse_endpoint
from controld.store.etcd_keys import Keys
from controld.store.etcd_session import Session
from controld.store.etcd_wire import TXN
from controld.store.port import (
    CompactedError,
    Loaded,
    RecordError,
    Store,
    StoreCorruptError,
    StoredChange,
    StoredRecord,
)
from controld.store.sqlite import SqliteStore
from tests import support_etcd
from tests.support_store import put, take
from virialpb.etcd.v1 import etcd_pb2 as pb
from virialpb.store.v1 import records_pb2

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "records"
# Name of a file -> first part of the key.
KINDS = {
    "cluster": "cluster",
    "node": "nodes",
    "job": "jobs",
    "generation": "generations",
    "checkpoint": "checkpoints",
    "request": "requests",
    "event": "events",
    "join-token": "joins",
    "request-pack": "answered",
    "event-pack": "told",
}
READERS = dict(codec._READERS)
CLUSTER = records_pb2.Cluster(uid="c-1", job_counter=3).SerializeToString()


@dataclass
class Ground:
    """A store whose process can be started again, and whose bytes can be changed behind its back."""

    directory: Path
    member: support_etcd.Members | None = None
    stack: ExitStack = field(default_factory=ExitStack)

    def store(self) -> Store:
        if self.member is not None:
            return self.member.store(directory=self.directory)
        return SqliteStore(self.directory)

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Store]:
        store = self.store()
        await store.open()
        try:
            yield store
        finally:
            await store.close()

    async def restart(self) -> None:
        if self.member is not None:
            self.member.processes[0].kill()
            self.member.processes[0].start()
            await self.member.ready()

    async def damage(self, key: str) -> None:
        """One record is not what was written any more."""
        if self.member is None:
            with contextlib.closing(sqlite3.connect(self.directory / sqlite_file.DATABASE)) as connection:
                changed = connection.execute("UPDATE kv SET value = x'ffff' WHERE key = ?", (key,)).rowcount
                connection.commit()
            assert changed == 1
            return
        # As whoever writes past the controllers, under their keys.
        wire = GrpcWire([parse_endpoint(self.member.processes[0].config.endpoint)])
        vandal = pb.RequestOp(request_put=pb.PutRequest(key=Keys("virial").record(key), value=b"\xff\xff"))
        assert (await wire.call(TXN, pb.TxnRequest(success=[vandal]), 10.0)).succeeded
        await wire.close()


@pytest.fixture(params=["sqlite", "etcd"])
async def ground(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ground]:
    made = Ground(tmp_path / "data")
    with made.stack:
        if request.param == "etcd":
            made.member = support_etcd.start(made.stack)
        yield made


async def restarts_after_compaction(ground: Ground) -> None:
    async with ground.opened() as store:
        leader = await store.campaign("a")
        revisions = [await store.commit(leader, seq, [put("x", b"%d" % seq)]) for seq in range(1, 21)]
        await store.compact(revisions[9])
        before = await store.load()
    await ground.restart()
    async with ground.opened() as store:
        assert await store.load() == before
        with pytest.raises(CompactedError):
            await anext(aiter(store.watch(revisions[0])))
        seen = await take(aiter(store.watch(revisions[9])), 10)
        assert [commit.revision for commit in seen] == revisions[10:]
        again = await store.campaign("b")
        assert await store.commit(again, 1, [put("x", b"on")]) > revisions[-1]


def forgets_the_purge_point(patch: pytest.MonkeyPatch) -> None:
    """SQLite: it is not written down. etcd: a watch that comes too late begins where the history does."""
    write = sqlite_db._write_head

    def without(connection: sqlite3.Connection, head: sqlite_db.HeadRow) -> None:
        head.compacted_revision = 0
        write(connection, head)

    follow = etcd_watch.follow

    async def anyway(session: Session, after_revision: int) -> AsyncGenerator[etcd_watch.Seen]:
        try:
            async for item in follow(session, after_revision):
                yield item
        except CompactedError as error:
            async for item in follow(session, error.revision):
                yield item

    patch.setattr(sqlite_db, "_write_head", without)
    patch.setattr(etcd_watch, "follow", anyway)


async def loaded_state(ground: Ground) -> State:
    async with ground.opened() as store:
        return await restore_in_slices(await store.load())


async def corruption_is_loud(ground: Ground) -> None:
    async with ground.opened() as store:
        await store.commit(await store.campaign("a"), 1, [put("cluster", CLUSTER), put("jobs/a", CLUSTER)])
    await ground.damage("cluster")
    with pytest.raises((StoreCorruptError, RecordError), match="cluster"):
        await loaded_state(ground)


def skips_corrupt_records(patch: pytest.MonkeyPatch) -> None:
    """The rest is loaded as if they had never been."""

    def load(connection: sqlite3.Connection, path: Path) -> Loaded:
        head = sqlite_db._read_head(connection, path)
        rows = connection.execute("SELECT key, value, create_revision, modify_revision, checksum FROM kv")
        kept = [StoredRecord(*row[:4]) for row in rows if sqlite_db._checksum(*row[:4]) == row[4]]
        return Loaded(head.history, head.revision, tuple(kept))

    decode = codec.decode

    def lenient(key: str, value: bytes) -> Record:
        try:
            return decode(key, value)
        except RecordError:
            return Cluster(uid="", job_counter=0, event_sequence=0)

    patch.setattr(sqlite_db, "_load", load)
    patch.setattr(codec, "decode", lenient)


async def every_version_loads(ground: Ground) -> None:
    for version in sorted(GOLDEN.iterdir()):
        stored: dict[str, StoredChange] = {}
        for path in sorted(version.glob("*.binpb"), key=lambda path: path.stem):
            change = _stored(path)
            stored.setdefault(change.key, change)  # the oldest of those under one key
        async with ground.opened() as store:
            leader = await store.campaign("a")
            await store.commit(leader, 1, list(stored.values()))
        await ground.restart()
        state = await loaded_state(ground)
        assert state.cluster is not None
        assert (state.cluster.uid, state.cluster.job_counter) == ("c-1", 12)
        assert set(state.created) == set(stored), version.name
        assert state.jobs
        assert state.nodes
        assert state.generations


def _stored(path: Path) -> StoredChange:
    """Under the key that belongs to it, which readers check."""
    data = path.read_bytes()
    kind = next(kind for stem, kind in KINDS.items() if path.stem in (stem, f"{stem}-2", f"{stem}-defaults"))
    return StoredChange(keys.of(READERS[kind](data)), data)


def needs_the_new_field(patch: pytest.MonkeyPatch) -> None:
    """A field that was added later has no default: what was stored before it does not load."""
    readers = dict(codec._READERS)
    read = readers["cluster"]

    def strict(data: bytes) -> Record:
        if not records_pb2.Cluster.FromString(data).request_sequence:
            raise codec_values.FieldError("request_sequence: missing")
        return read(data)

    patch.setitem(codec._READERS, "cluster", strict)


@pytest.mark.row("H2")
async def test_case_h2_a_store_restarts_after_compaction(ground: Ground) -> None:
    await restarts_after_compaction(ground)


@pytest.mark.row("H2")
async def test_case_h2_a_corrupt_record_is_named_and_never_skipped(ground: Ground) -> None:
    await corruption_is_loud(ground)


@pytest.mark.row("H3")
async def test_case_h3_what_any_version_stored_loads(ground: Ground) -> None:
    await every_version_loads(ground)


SEEDED: dict[str, tuple[Callable[[Ground], Awaitable[None]], Callable[[pytest.MonkeyPatch], None]]] = {
    "purge_point_forgotten": (restarts_after_compaction, forgets_the_purge_point),
    "corrupt_records_skipped": (corruption_is_loud, skips_corrupt_records),
}


@pytest.mark.row("H2")
@pytest.mark.parametrize("defect", SEEDED)
async def test_case_h2_catches_its_defects(defect: str, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, seed = SEEDED[defect]
    seed(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await scenario(ground)


@pytest.mark.row("H3", defect="new_field_without_default")
async def test_case_h3_catches_a_field_without_default(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_the_new_field(monkeypatch)
    with pytest.raises(RecordError, match="request_sequence"):
        await every_version_loads(ground)
