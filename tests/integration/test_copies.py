"""`controld backup` and `controld restore`, as an operator types them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controld.__main__ import main
from controld.store.port import StoredChange
from controld.store.sqlite import SqliteStore


async def commit(directory: Path, value: bytes, number: int) -> int:
    """Commit one value in a store of its own; returns the history counter."""
    store = SqliteStore(directory)
    await store.open()
    try:
        leadership = await store.campaign(f"r{number}")
        await store.commit(leadership, 1, [StoredChange("jobs/a", value)])
        return (await store.load()).history
    finally:
        await store.close()


async def read(directory: Path) -> tuple[int, dict[str, bytes]]:
    store = SqliteStore(directory)
    await store.open()
    try:
        loaded = await store.load()
        return loaded.history, {r.key: r.value for r in loaded.records}
    finally:
        await store.close()


def test_a_backup_comes_back_with_a_higher_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy.db"
    data.mkdir()
    before = asyncio.run(commit(data, b"then", 1))
    assert main(["backup", str(copy), "--data-dir", str(data)]) == 0
    asyncio.run(commit(data, b"now", 2))
    assert main(["restore", str(copy), "--data-dir", str(data)]) == 0
    history, records = asyncio.run(read(data))
    assert records["jobs/a"] == b"then"
    assert history > before
    assert "stays as *.replaced" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["backup", "restore"])
def test_what_is_not_there_is_said_in_one_line(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    assert main([word, str(tmp_path / "missing.db"), "--data-dir", str(data)]) == 4
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert "missing.db" in told.err or "data" in told.err
