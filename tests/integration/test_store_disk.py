"""The embedded store and its disk: full, failing, read-only, not ours; what lies where with which mode."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from controld.store.port import (
    OutcomeUnknownError,
    StorageFullError,
    StoreClosedError,
    StoreCorruptError,
    StoredChange,
    StoreLockedError,
)
from controld.store.sqlite import SqliteStore
from tests.support_store import contents, delete, put

ROOT = Path(__file__).resolve().parents[2]
RESERVE_BYTES = 5 << 20
FREE_PORTS = ("--listen", "127.0.0.1:0", "--metrics-listen", "off")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def written_by(directory: Path, who: str) -> tuple[set[int], str]:
    """The numbers of the committer's commits that are there, and what it counted up to."""
    store = SqliteStore(directory)
    await store.open()
    stored = await contents(store)
    await store.close()
    counter = stored.get("counter", b"").rstrip(b".").decode()
    return {int(key.partition("/")[2]) for key in stored if key.startswith(who)}, counter


@contextlib.contextmanager
def disk_of(size_mib: int, tmp_path: Path) -> Generator[Path]:
    """A file system of that size."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with disk_of(2, tmp_path) as disk:
        yield disk


@pytest.mark.root
async def test_a_full_disk_refuses_whole_commits_and_loses_none(small_disk: Path) -> None:
    store = SqliteStore(small_disk / "data")
    await store.open()
    leader = await store.campaign("a")
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (512 << 10))
    seq, refused = 0, 0
    for number in range(600):
        try:
            await store.commit(leader, seq + 1, [put(f"k/{number:04d}", b"x" * 8000), put("last", b"%d" % (seq + 1))])
        except StorageFullError:
            refused += 1
            if refused == 3:
                break
        else:
            seq += 1
    assert refused == 3
    assert seq > 10
    assert len(await contents(store)) == seq + 1
    await store.barrier(leader)  # it still leads: reading needs no space
    ballast.unlink()
    await store.commit(leader, seq + 1, [put("after", b"1"), put("last", b"%d" % (seq + 1))])
    await store.close()
    run(["mount", "-o", "remount,size=8m", str(small_disk)])
    store = SqliteStore(small_disk / "data")
    await store.open()
    stored = await contents(store)
    assert len(stored) == seq + 2
    assert stored["last"] == b"%d" % (seq + 1)
    await store.close()


@pytest.mark.root
async def test_a_backup_that_finds_no_space_leaves_nothing_behind(small_disk: Path, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "data")
    await store.open()
    leader = await store.campaign("a")
    await store.commit(leader, 1, [put(f"k/{i}", b"x" * 100_000) for i in range(30)])
    with pytest.raises(StorageFullError):
        await store.backup(str(small_disk / "backup"))
    assert names(small_disk) == []
    await store.close()


@pytest.mark.root
async def test_a_full_disk_at_the_first_start_is_one_clear_error(small_disk: Path) -> None:
    (small_disk / "data").mkdir()
    with contextlib.suppress(OSError):
        (small_disk / "ballast").write_bytes(b"x" * (4 << 20))
    with pytest.raises((OSError, StorageFullError), match=r"[Nn]o space|full"):
        await SqliteStore(small_disk / "data").open()
    (small_disk / "ballast").unlink()
    store = SqliteStore(small_disk / "data")  # and nothing half made stands in the way
    await store.open()
    await store.close()


@pytest.mark.root
async def test_a_store_opens_on_a_disk_that_filled_up_and_takes_what_ends_work(tmp_path: Path) -> None:
    with disk_of(48, tmp_path) as disk:
        store = SqliteStore(disk / "data", reserve_bytes=RESERVE_BYTES)
        await store.open()
        leader = await store.campaign("a")
        await store.commit(leader, 1, [put(f"k/{number}", b"x" * 4000) for number in range(100)])
        fill(disk)
        await store.close()
        fill(disk)  # what closing gave back is taken too
        again = SqliteStore(disk / "data", reserve_bytes=RESERVE_BYTES)
        await again.open()
        leader = await again.campaign("b")
        await again.commit(leader, 1, [delete("k/0"), put("k/1", b"stopped")])
        assert len(await contents(again)) == 99
        await again.close()
        assert not (disk / "data" / "reserve").exists()
        (disk / "ballast").unlink()
        await again.open()
        await again.close()
        assert (disk / "data" / "reserve").stat().st_size == RESERVE_BYTES


@pytest.mark.root
async def test_a_start_that_finds_no_room_at_all_says_so_and_what_to_do(tmp_path: Path) -> None:
    with disk_of(48, tmp_path) as disk:
        store = SqliteStore(disk / "data")
        await store.open()
        await store.commit(await store.campaign("a"), 1, [put("k")])
        await store.close()
        fill(disk)
        command = [sys.executable, "-m", "controld", "--data-dir", str(disk / "data"), *FREE_PORTS]
        done = await asyncio.to_thread(run, command)
        assert done.returncode == 4
        (line,) = done.stderr.splitlines()
        assert "the disk is full" in line
        assert "nothing was lost: free at least 4 MiB there and start controld again" in line
        (disk / "ballast").unlink()
        await store.open()
        assert list(await contents(store)) == ["k"]
        await store.close()


def fill(disk: Path) -> None:
    """To the last byte: a full disk has no room for a small file either."""
    with (disk / "ballast").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * (64 << 10))


@pytest.fixture(scope="session")
def failing_sync(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, to make syncing fail")
    library = tmp_path_factory.mktemp("shim") / "failing_sync.so"
    source = Path(__file__).with_name("failing_sync.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def committer(directory: Path, who: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support_committer", str(directory), who, "3000"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **environment})


async def test_a_failed_sync_is_an_unknown_outcome_and_the_same_commit_again_is_applied_once(
    failing_sync: Path, tmp_path: Path
) -> None:
    flag = tmp_path / "fail"
    process = committer(tmp_path / "data", "w", LD_PRELOAD=str(failing_sync), FAIL_SYNC=str(flag))
    assert process.stdout is not None
    said = [process.stdout.readline().split() for _ in range(30)]
    flag.touch()
    said += [line.split() for line in process.stdout.readlines()]  # it tries twice, then ends
    process.wait()
    process.stdout.close()
    acknowledged = [int(line[1]) for line in said[1:] if line[2].isdecimal()]
    failed = [(int(line[1]), line[2]) for line in said if line[2] == "OutcomeUnknownError"]
    unknown = acknowledged[-1] + 1
    assert failed == [(unknown, "OutcomeUnknownError")] * 2
    flag.unlink()
    there, counter = await written_by(tmp_path / "data", "w")
    expected = {seq for seq in range(1, unknown) if seq % 3 != 2 or seq == unknown - 1}
    if counter == f"w/{unknown}":  # unknown means that it may be there, but then all of it
        expected = {seq for seq in range(1, unknown + 1) if seq % 3 != 2 or seq == unknown}
    else:
        assert counter == f"w/{unknown - 1}"
    assert there == expected


async def test_a_file_that_may_grow_no_more_is_an_unknown_outcome_and_loses_none(tmp_path: Path) -> None:
    """Not out of space but a failed write, such as of a broken disk."""
    script = (
        "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); "
        "sys.argv = ['', sys.argv[1], 'w', '3000']; runpy.run_module('tests.support_committer', run_name='__main__')"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "data")]
    done = run(command)
    said = [line.split() for line in done.stdout.splitlines()]
    acknowledged = [int(line[1]) for line in said[1:] if line[2].isdecimal()]
    assert [line[2] for line in said[-2:]] == ["OutcomeUnknownError"] * 2, done.stderr
    _, counter = await written_by(tmp_path / "data", "w")
    assert counter == f"w/{acknowledged[-1]}"


async def test_somebody_else_holding_the_database_is_an_unknown_outcome_and_passes(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    await store.open()
    leader = await store.campaign("a")
    with contextlib.closing(sqlite3.connect(tmp_path / "state.sqlite3", isolation_level=None)) as shell:
        shell.execute("BEGIN IMMEDIATE")
        with pytest.raises(OutcomeUnknownError, match="locked"):
            await store.commit(leader, 1, [put("x")])
        shell.execute("ROLLBACK")
    await store.commit(leader, 1, [put("x")])
    assert set(await contents(store)) == {"x"}
    await store.close()


async def test_only_the_owner_may_read_what_is_stored(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        store = SqliteStore(tmp_path / "a" / "data")
        await store.open()
        leader = await store.campaign("a")
        await store.commit(leader, 1, [put("x")])
        await store.backup(str(tmp_path / "backup"))
        files = sorted((tmp_path / "a" / "data").iterdir())
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [*files, tmp_path / "backup"]}
        await store.close()
    finally:
        os.umask(umask)
    assert modes == dict.fromkeys(
        ["backup", "history", "lock", "state.sqlite3", "state.sqlite3-shm", "state.sqlite3-wal"], 0o600
    )
    assert stat.S_IMODE((tmp_path / "a" / "data").stat().st_mode) == 0o700


async def test_closing_leaves_one_file(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    await store.open()
    await store.commit(await store.campaign("a"), 1, [put("x")])
    await store.close()
    assert names(tmp_path) == ["history", "lock", "state.sqlite3"]


async def test_every_commit_is_synced(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    await store.open()
    pragmas = await store._run(  # the one promise that no test without pulling the plug can see
        lambda database: [
            database._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")
        ]
    )
    assert pragmas == [2, "wal"]
    await store.close()


async def test_a_directory_that_cannot_be_used_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match=f"cannot use the data directory {tmp_path / 'file'}: File exists"):
        await SqliteStore(tmp_path / "file").open()
    with pytest.raises(NotADirectoryError, match=r"Not a directory .*make it a directory that user id \d+ may write"):
        await SqliteStore(tmp_path / "file" / "data").open()


@pytest.mark.root
def test_a_directory_that_we_may_not_write_is_one_clear_error() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody who may not write there")
    script = (
        "import asyncio, os, sys\nfrom pathlib import Path\nfrom controld.store.sqlite import SqliteStore\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try:\n    asyncio.run(SqliteStore(Path(sys.argv[1])).open())\n"
        "except PermissionError as error:\n    print(error)\n"
    )
    with tempfile.TemporaryDirectory() as name:  # not tmp_path: others may not even look into that
        directory = Path(name)
        directory.chmod(0o755)
        done = run([sys.executable, "-c", script, name])
        assert f"cannot use the data directory {name}: Permission denied" in done.stdout, done.stderr
        assert "user id 65534 may write" in done.stdout
        assert names(directory) == []


async def test_an_old_database_copied_back_by_hand_brings_no_epoch_back(tmp_path: Path) -> None:
    data, old = tmp_path / "data", tmp_path / "old.sqlite3"
    store = SqliteStore(data)
    await store.open()
    await store.backup(str(tmp_path / "backup"))
    await store.close()
    shutil.copy(data / "state.sqlite3", old)
    await store.restore(str(tmp_path / "backup"))
    await store.open()
    used = await store.campaign("a")
    await store.close()
    shutil.copy(old, data / "state.sqlite3")
    await store.open()
    again = await store.campaign("a")
    assert again.epoch > used.epoch
    assert again.epoch.history == used.epoch.history + 1
    await store.close()


async def test_commits_go_on_during_a_backup_which_is_of_one_moment(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "data")
    await store.open()
    leader = await store.campaign("a")
    await store.commit(leader, 1, [put(f"k/{i}", b"x" * 100_000) for i in range(50)])
    backup = asyncio.ensure_future(store.backup(str(tmp_path / "backup")))
    seq = 1
    while not backup.done():
        seq += 1
        value = b"%d" % seq
        await store.commit(leader, seq, [put("left", value), put("right", value), delete(f"k/{seq % 50}")])
    await backup
    assert seq > 2
    await store.close()
    copy = SqliteStore(tmp_path / "copy")
    await copy.restore(str(tmp_path / "backup"))
    await copy.open()
    stored = await contents(copy)
    assert stored.get("left") == stored.get("right")
    await copy.close()


@pytest.mark.parametrize("name", ["state.sqlite3", "backup"])
async def test_a_backup_into_the_data_directory_is_refused(tmp_path: Path, name: str) -> None:
    store = SqliteStore(tmp_path)
    await store.open()
    await store.commit(await store.campaign("a"), 1, [put("x")])
    with pytest.raises(OSError, match="does not belong into the data directory"):
        await store.backup(str(tmp_path / name))
    assert set(await contents(store)) == {"x"}
    await store.close()


async def test_the_event_loop_never_waits_for_the_disk(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    await store.open()
    leader = await store.campaign("a")
    task = asyncio.ensure_future(store.commit(leader, 1, [StoredChange(f"k/{i}", b"x" * 1000) for i in range(500)]))
    turns = 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 1
    await store.close()


async def test_closing_waits_for_what_is_under_way(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    await store.open()
    leader = await store.campaign("a")
    commit = asyncio.ensure_future(store.commit(leader, 1, [put(f"k/{i}", b"x" * 1000) for i in range(500)]))
    await asyncio.sleep(0)
    await store.close()
    await commit
    with pytest.raises(StoreClosedError):
        await store.load()
    await store.open()
    assert len(await contents(store)) == 500
    await store.close()


async def test_a_cancelled_opening_gives_everything_back(tmp_path: Path) -> None:
    for turns in range(4):
        store = SqliteStore(tmp_path)
        opening = asyncio.ensure_future(store.open())
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await store.close()
        again = SqliteStore(tmp_path)
        for _ in range(500):  # the thread may still be at it
            try:
                await again.open()
                break
            except StoreLockedError:
                await asyncio.sleep(0.01)
        assert (await again.load()).records == ()
        await again.close()


@pytest.mark.parametrize("name", ["state.sqlite3", "state.sqlite3-wal"])
@pytest.mark.parametrize("replaced", [False, True])
async def test_nothing_is_acknowledged_once_the_file_has_lost_its_name(
    tmp_path: Path, name: str, *, replaced: bool
) -> None:
    """What is written to a removed file succeeds until the process ends, and is nowhere then."""
    store = SqliteStore(tmp_path)
    await store.open()
    leadership = await store.campaign("one")
    await store.commit(leadership, 1, [put("a", b"1")])
    (tmp_path / name).rename(tmp_path / "elsewhere")
    if replaced:
        shutil.copy(tmp_path / "elsewhere", tmp_path / name)
    with pytest.raises(StoreCorruptError, match=f"{name}: removed or replaced"):
        await store.commit(leadership, 2, [put("b", b"2")])
    with pytest.raises(StoreCorruptError, match="removed or replaced"):
        await store.barrier(leadership)
    assert await contents(store) == {"a": b"1"}
    await store.close()
