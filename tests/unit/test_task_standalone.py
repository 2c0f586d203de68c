"""The same script by hand: checkpoints in a directory, no controller."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from virial.task import CheckpointError, ShardCorrupt, Task, _task, current
from virial.task._environment import parse_environment


def rank_of(directory: Path, rank: int = 0, world_size: int = 1) -> Task:
    return Task(parse_environment({"RANK": str(rank), "WORLD_SIZE": str(world_size)}), directory)


def save(task: Task, step: int, data: bytes) -> None:
    with task.checkpoint(step, strict=True) as shard:
        shard.write(data)


def test_a_new_directory_starts_from_zero(tmp_path: Path) -> None:
    task = rank_of(tmp_path / "new")
    assert (task.managed, task.restore(), task.save_requested()) == (False, None, None)
    task.progress(1, loss=1.0)
    task.clear_save_request()
    task.close()
    assert not (tmp_path / "new").exists()


def test_the_newest_complete_step_is_restored(tmp_path: Path) -> None:
    first = rank_of(tmp_path)
    for step in (5, 10, 15):
        save(first, step, b"%d" % step)
    (tmp_path / "step-000000000015.run-0001" / "rank-00000.json").unlink()
    (tmp_path / "step-000000000020.run-0001").mkdir()
    (tmp_path / "notes").write_text("of no interest")
    restored = rank_of(tmp_path).restore()
    assert restored is not None
    assert (restored.step, restored.read()) == (10, b"10")


def test_a_later_run_saves_the_same_step_anew_and_it_counts(tmp_path: Path) -> None:
    save(rank_of(tmp_path), 5, b"first run")
    save(rank_of(tmp_path), 5, b"second run")
    assert sorted(os.listdir(tmp_path)) == ["step-000000000005.run-0001", "step-000000000005.run-0002"]
    restored = rank_of(tmp_path).restore()
    assert restored is not None
    assert restored.read() == b"second run"


def test_a_mix_of_two_runs_is_never_restored(tmp_path: Path) -> None:
    save(rank_of(tmp_path, 0, 2), 5, b"run 1")
    save(rank_of(tmp_path, 1, 2), 5, b"run 2")
    assert [rank_of(tmp_path, rank, 2).restore() for rank in range(2)] == [None, None]


def test_a_gang_of_another_size_is_not_restored_from(tmp_path: Path) -> None:
    save(rank_of(tmp_path), 5, b"alone")
    assert rank_of(tmp_path, 0, 2).restore() is None


def test_the_last_of_the_ranks_sees_committed(tmp_path: Path) -> None:
    states: list[str] = []
    for task in [rank_of(tmp_path, rank, 3) for rank in range(3)]:
        with task.checkpoint(5) as shard:
            shard.write(b"x")
        states.append(shard.state)
    assert states == ["PREPARED", "PREPARED", "COMMITTED"]


def test_a_damaged_shard_is_an_error_not_a_start_from_zero(tmp_path: Path) -> None:
    save(rank_of(tmp_path), 5, b"weights")
    (tmp_path / "step-000000000005.run-0001" / "rank-00000.shard").write_bytes(b"weighTs")
    restored = rank_of(tmp_path).restore()
    assert restored is not None
    with pytest.raises(ShardCorrupt, match=r"rank-00000\.shard: stripe 0"):
        restored.read()


def test_without_a_directory_or_with_one_that_cannot_be_the_save_fails_by_reason(tmp_path: Path) -> None:
    task = Task(parse_environment({}))
    with task.checkpoint(5) as shard:
        shard.write(b"x")
    assert shard.error is not None
    assert (shard.state, shard.error.reason) == ("FAILED", "NO_DIRECTORY")
    with pytest.raises(CheckpointError, match="NO_DIRECTORY"), task.checkpoint(5, strict=True):
        pytest.fail("the block must not run")
    (tmp_path / "file").write_text("")
    with rank_of(tmp_path / "file").checkpoint(5) as shard:
        shard.write(b"x")
    assert shard.error is not None
    assert shard.error.reason == "IO_ERROR"
    assert str(tmp_path / "file") in shard.error.message


def test_current_is_one_task_also_for_a_library_that_knows_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VIRIAL_SOCK", "RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_task, "_current", {})
    script = current(tmp_path)
    assert current() is script
    assert current(str(tmp_path)) is script
    assert (script.rank, script.world_size, script.generation, script.master_port) == (0, 1, 0, 0)
