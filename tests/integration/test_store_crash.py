"""kill -9 at any moment: every commit that was acknowledged is there, whole, and in order."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from controld.store.port import Commit, StoreLockedError
from controld.store.sqlite import SqliteStore
from tests.support_store import put, take

ROUNDS = 150 if os.environ.get("VIRIAL_LONG") else 12
SEED = int(os.environ.get("VIRIAL_SEED", "1"))


def start(directory: Path, who: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support_committer", str(directory), who, "2000"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def killed_after(process: subprocess.Popen[str], lines: int, delay_s: float) -> list[list[str]]:
    """What it said, all of it, when it was killed a moment after so many lines."""
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(lines)]
    try:
        process.wait(delay_s)  # the moment of the kill falls anywhere in a commit
    except subprocess.TimeoutExpired:
        process.kill()
    said += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    return [line.split() for line in said if line.endswith("\n")]


async def test_every_acknowledged_commit_is_there(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    revision_before, acknowledged_all = 0, 0
    for number in range(ROUNDS):
        who = f"w{number:03d}"
        said = killed_after(start(tmp_path / "data", who), rng.randrange(1, 80), rng.uniform(0, 0.02))
        assert said, "it could not even campaign"
        acknowledged = {int(seq): int(revision) for _, seq, revision in said[1:]}
        acknowledged_all += len(acknowledged)

        store = SqliteStore(tmp_path / "data")
        await store.open()
        loaded = await store.load()
        last = max(acknowledged, default=0)
        assert loaded.revision >= acknowledged.get(last, revision_before), f"seed {SEED}, round {number}: lost"
        records = {record.key: record for record in loaded.records}
        written = last
        if f"{who}/{last + 1:06d}" in records:  # durable, and killed before it could say so
            written = last + 1
        for seq in range(1, written + 1):
            record = records.get(f"{who}/{seq:06d}")
            if seq % 3 == 2 and seq + 1 <= written:
                assert record is None
            else:
                assert record is not None, f"seed {SEED}, round {number}: commit {seq} is lost"
                assert record.create_revision == acknowledged.get(seq, loaded.revision)
        if written:  # half a commit is none: the counter is that of the last one
            assert records["counter"].value.rstrip(b".") == f"{who}/{written}".encode()
        commits = await take(store.watch(revision_before), written) if written else []
        assert [commit.revision for commit in commits] == sorted({*acknowledged.values(), loaded.revision})[-written:]
        revision_before = loaded.revision
        await store.close()
    assert acknowledged_all > ROUNDS * 10  # it was at work


async def test_a_second_opener_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    process = start(tmp_path / "data", "first")
    assert process.stdout is not None
    try:
        assert process.stdout.readline()
        with pytest.raises(StoreLockedError, match=rf"in use by another controld \(pid {process.pid}\)"):
            await SqliteStore(tmp_path / "data").open()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    store = SqliteStore(tmp_path / "data")  # the lock dies with its holder, however it dies
    await store.open()
    await store.close()


async def test_a_second_handle_in_the_same_process_is_refused_too(tmp_path: Path) -> None:
    first, second = SqliteStore(tmp_path), SqliteStore(tmp_path)
    await first.open()
    with pytest.raises(StoreLockedError, match=f"pid {os.getpid()}"):
        await second.open()
    leader = await first.campaign("a")
    await first.commit(leader, 1, [put("x")])
    await first.close()
    await second.open()
    commits = await asyncio.wait_for(take(second.watch(leader.epoch.revision), 1), 30)
    assert commits == [Commit(leader.epoch.revision + 1, (put("x"),))]
    await second.close()
