"""A damaged database is refused, naming the file and what to do, and nothing is changed; it is never half read."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from controld.store import sqlite_db, sqlite_wal
from controld.store.port import Commit, Loaded, StoreCorruptError, StoreError
from controld.store.sqlite import SqliteStore
from tests.support_store import delete, put

ROUNDS = 400 if os.environ.get("VIRIAL_LONG") else 60
SEED = int(os.environ.get("VIRIAL_SEED", "1"))
COMMITS = 40
DATABASE, LOG = "state.sqlite3", "state.sqlite3-wal"
Contents = tuple[Loaded, list[Commit]]


async def everything(store: SqliteStore) -> Contents:
    """All a store can say: the records and the commits in its log."""
    loaded = await store.load()
    commits: list[Commit] = []
    last = max((record.modify_revision for record in loaded.records), default=0)  # each commit puts something
    watch = store.watch(0)
    while last and (not commits or commits[-1].revision < last):
        commits.append(await anext(watch))
    return loaded, commits


async def write_some(store: SqliteStore) -> None:
    rng = random.Random(SEED)
    leader = await store.campaign("a")
    for seq in range(1, COMMITS + 1):
        changes = [put(f"k/{rng.randrange(60):02d}/{i}", rng.randbytes(rng.randrange(10, 3000))) for i in range(3)]
        await store.commit(leader, seq, [*changes, put("last", b"%d" % seq), delete(f"k/{rng.randrange(60):02d}/0x")])


@pytest.fixture
async def closed(tmp_path: Path) -> Path:
    """A data directory with its database, closed in peace: no log beside it."""
    store = SqliteStore(tmp_path / "closed")
    await store.open()
    await write_some(store)
    await store.close()
    return tmp_path / "closed"


@pytest.fixture
async def crashed(tmp_path: Path) -> Path:
    """A data directory as a power cut leaves it: everything is still in the log."""
    store = SqliteStore(tmp_path / "live")
    await store.open()
    await write_some(store)
    shutil.copytree(tmp_path / "live", tmp_path / "crashed", ignore=shutil.ignore_patterns("*-shm", "lock"))
    await store.close()
    return tmp_path / "crashed"


def snapshot(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}


async def read(directory: Path) -> Contents | StoreCorruptError:
    store = SqliteStore(directory)
    try:
        await store.open()
    except StoreCorruptError as error:
        return error
    try:
        return await everything(store)
    except StoreCorruptError as error:
        return error
    finally:
        await store.close()


def flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


async def flipped(directory: Path, file: str, first: int = 0) -> list[tuple[int, Contents | StoreCorruptError]]:
    """(byte, what is read) after a bit of `file` was flipped, once for each of the first bytes, then anywhere."""
    rng = random.Random(SEED)
    found: list[tuple[int, Contents | StoreCorruptError]] = []
    copy = directory.with_name("copy")
    for number in range(ROUNDS):
        shutil.copytree(directory, copy)
        anywhere = rng.randrange((copy / file).stat().st_size)
        position = number if number < first else anywhere
        flip(copy / file, position, rng.randrange(8))
        before = snapshot(copy)
        found.append((position, await read(copy)))
        if isinstance(found[-1][1], StoreCorruptError) and file == LOG:
            assert snapshot(copy) == before
        shutil.rmtree(copy)
    return found


async def misread(directory: Path) -> list[int]:
    """The bytes of a database whose damage is not refused and changes what is read."""
    truth = await read(directory)
    assert isinstance(truth, tuple)
    assert len(truth[1]) == COMMITS
    outcomes = await flipped(directory, DATABASE)
    return [position for position, found in outcomes if isinstance(found, tuple) and found != truth]


async def lost_in_silence(directory: Path) -> list[int]:
    """The bytes of a log whose damage is not refused and costs more than the commit that was being written."""
    whole = directory.with_name("whole")
    shutil.copytree(directory, whole)
    truth = await read(whole)
    assert isinstance(truth, tuple)
    return [
        position
        for position, found in await flipped(directory, LOG, first=32)
        if isinstance(found, tuple) and found[1] not in (truth[1], truth[1][:-1])
    ]


@pytest.mark.row("H2")
async def test_no_flipped_bit_is_ever_read(closed: Path) -> None:
    assert await misread(closed) == []


@pytest.mark.row("H2")
async def test_a_flipped_bit_in_the_log_never_loses_more_than_the_commit_being_written(crashed: Path) -> None:
    """SQLite itself would drop every commit behind the flipped one without a word."""
    assert (crashed / LOG).stat().st_size > 100_000
    assert await lost_in_silence(crashed) == []


@pytest.mark.row("H2", defect="records_without_checksums")
async def test_records_without_checksums_would_be_misread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> int:
        return 0

    monkeypatch.setattr(sqlite_db, "_checksum", none)
    store = SqliteStore(tmp_path / "closed")
    await store.open()
    await write_some(store)
    await store.close()
    assert await misread(tmp_path / "closed") != []


@pytest.mark.row("H2", defect="log_trusted_to_sqlite")
async def test_a_log_left_to_sqlite_would_lose_commits(crashed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: Path) -> bool:
        return False

    monkeypatch.setattr(sqlite_wal, "drops_commits", never)
    assert await lost_in_silence(crashed) != []


@pytest.mark.row("H2")
async def test_a_truncated_database_is_refused_and_left_alone(closed: Path, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    size = (closed / "state.sqlite3").stat().st_size
    for length in [0, 1, 99, 100, 4096, size - 4096, size - 1, *(rng.randrange(size) for _ in range(ROUNDS // 4))]:
        copy = tmp_path / "copy"
        shutil.copytree(closed, copy)
        os.truncate(copy / "state.sqlite3", length)
        before = snapshot(copy)
        found = await read(copy)
        assert isinstance(found, StoreCorruptError), f"cut to {length} of {size} bytes"
        assert str(copy / "state.sqlite3") in str(found)
        assert "nothing was changed; restore a backup" in str(found)
        assert snapshot(copy) == before
        shutil.rmtree(copy)


async def test_a_torn_last_commit_is_dropped_and_the_rest_is_there(crashed: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(crashed, whole)
    truth = await read(whole)
    assert isinstance(truth, tuple)
    log = crashed / "state.sqlite3-wal"
    os.truncate(log, log.stat().st_size - 100)
    found = await read(crashed)
    assert isinstance(found, tuple)
    assert found[1] == truth[1][:-1]


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00garbage" * 1000)


def another_program(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()


def newer(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(60)
        file.write(struct.pack(">I", 2))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def missing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (garbage, "not a SQLite database"),
        (another_program, "a SQLite database of another program"),
        (newer, "has schema version 2, this controld reads version 1"),
        (emptied, "empty"),
        (missing, "missing, but history shows that the directory was in use"),
    ],
    ids=["garbage", "another program", "newer", "empty", "missing"],
)
async def test_what_is_no_database_of_ours_is_refused(closed: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(closed / "state.sqlite3")
    before = snapshot(closed)
    for _ in range(2):  # the first refusal changes nothing for the second
        with pytest.raises(StoreCorruptError) as refused:
            await SqliteStore(closed).open()
        assert str(refused.value).startswith(f"{closed / 'state.sqlite3'}: ")
        assert words in str(refused.value)
        assert "restore a backup" in str(refused.value)
    assert snapshot(closed) == before


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("DELETE FROM kv WHERE key = 'last'", "records found, not the"),
        ("UPDATE kv SET value = x'00' WHERE key = 'last'", "the record last does not match its checksum"),
        ("UPDATE kv SET create_revision = 1 WHERE key = 'last'", "the record last does not match its checksum"),
        ("UPDATE head SET token = token + 1", "its head row does not match its checksum"),
        ("DELETE FROM head", "without its head row"),
        ("UPDATE log SET changes = x'00' WHERE revision = 5", "the log at revision 5 does not match its checksum"),
    ],
)
async def test_a_row_lost_or_altered_behind_our_back_is_seen(closed: Path, statement: str, words: str) -> None:
    with sqlite3.connect(closed / "state.sqlite3") as connection:
        connection.execute(statement)
    connection.close()
    found = await read(closed)
    assert isinstance(found, StoreCorruptError)
    assert words in str(found)


async def test_a_damaged_database_can_be_restored_over_and_stays_beside(closed: Path, tmp_path: Path) -> None:
    store = SqliteStore(closed)
    await store.open()
    await store.backup(str(tmp_path / "backup"))
    saved = await store.load()
    await store.close()
    os.truncate(closed / "state.sqlite3", 5000)
    store = SqliteStore(closed)
    with pytest.raises(StoreCorruptError):
        await store.open()
    await store.restore(str(tmp_path / "backup"))
    await store.open()
    loaded = await store.load()
    assert (loaded.records, loaded.revision) == (saved.records, saved.revision)
    assert loaded.history == saved.history + 1
    assert (closed / "state.sqlite3.replaced").stat().st_size == 5000
    await store.close()


async def test_a_damaged_backup_is_refused_and_changes_nothing(closed: Path, tmp_path: Path) -> None:
    store = SqliteStore(closed)
    await store.open()
    backup = tmp_path / "backup"
    await store.backup(str(backup))
    truth = await everything(store)
    leader = await store.campaign("b")
    os.truncate(backup, backup.stat().st_size - 4096)
    with pytest.raises(StoreCorruptError, match=f"{backup}: "):
        await store.restore(str(backup))
    await store.commit(leader, 1, [put("x")])
    assert {record.key for record in (await store.load()).records} == {"x", *(r.key for r in truth[0].records)}
    await store.close()


async def test_a_log_of_the_database_before_is_never_played_into_a_restored_one(crashed: Path, tmp_path: Path) -> None:
    other = SqliteStore(tmp_path / "other")
    await other.open()
    leader = await other.campaign("a")
    await other.commit(leader, 1, [put("only", b"this")])
    await other.backup(str(tmp_path / "backup"))
    await other.close()
    flip(crashed / "state.sqlite3-wal", 5000, 1)
    store = SqliteStore(crashed)
    with pytest.raises(StoreError):
        await store.open()
    await store.restore(str(tmp_path / "backup"))
    await store.open()
    assert [(record.key, record.value) for record in (await store.load()).records] == [("only", b"this")]
    await store.close()
