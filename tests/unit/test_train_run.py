"""examples/train.py as plain processes: the same bits with and without a loss, and a lost rank is told and left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.task_support import (
    ROOT,
    Fields,
    Gang,
    Handler,
    answers,
    begins_in,
    guardian,
)
from virialpb.shardfile import read_manifest

STEPS = ("--steps", "12", "--log-every", "1")


def digests(results: list[tuple[int, str, str]]) -> set[str]:
    """The final digests that the ranks print; all must have ended well."""
    assert [status for status, _, _ in results] == [0] * len(results), results
    return {match for _, out, _ in results for match in re.findall(r"have sha256 ([0-9a-f]{64})", out)}


@pytest.fixture(scope="module")
def straight() -> str:
    """The digest of a run without a fault or a checkpoint."""
    (digest,) = digests(Gang.start(*STEPS, "--checkpoint-every", "0").finish())
    return digest


def test_the_result_is_written_whole_and_the_loss_falls(tmp_path: Path, straight: str) -> None:
    result = tmp_path / "result"
    gang = Gang.start(*STEPS, "--checkpoint-every", "4", "--directory", str(tmp_path / "c"), "--result", str(result))
    results = gang.finish()
    assert digests(results) == {straight}
    assert result.read_text() == straight + "\n"
    assert sorted(os.listdir(tmp_path)) == ["c", "result"]
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", results[0][1])]
    assert len(losses) == 12
    assert losses[0] > 4 > losses[-1]


@pytest.mark.parametrize("lost", [0, 2])
def test_killed_and_restored_it_ends_with_the_same_bits(tmp_path: Path, straight: str, lost: int) -> None:
    options = (*STEPS, "--checkpoint-every", "4", "--directory", str(tmp_path))
    gang = Gang.start(*options, "--step-ms-min", "50")
    out = gang.processes[0].stdout
    assert out is not None
    for line in out:
        if line.startswith("step 6:"):
            gang.processes[lost].send_signal(signal.SIGKILL)
            break
    results = gang.finish()
    assert [status for status, _, _ in results] == [-signal.SIGKILL if rank == lost else 3 for rank in range(3)]
    for rank in {0, 1, 2} - {lost}:
        # Rank 0 names the lost rank; the others hang on rank 0, which leaves when it notices.
        says = rf"train: rank {rank}: rank {lost if rank == 0 else 0} (closed its connection|is lost) at step \d+.*\n"
        assert re.fullmatch(says, results[rank][2]), results[rank]
    again = Gang.start(*options).finish()
    assert digests(again) == {straight}
    (started,) = {match for _, out, _ in again for match in re.findall(r"starts after step (\d+)", out)}
    assert int(started) in (4, 8)


def test_one_flipped_bit_in_one_ranks_gradient_changes_the_digest(straight: str) -> None:
    corrupted = digests(Gang.start(*STEPS, "--checkpoint-every", "0", "--corrupt-gradient", "2:9").finish())
    assert len(corrupted) == 1
    assert corrupted != {straight}


def test_a_disk_that_takes_nothing_costs_no_training(tmp_path: Path, straight: str) -> None:
    (tmp_path / "file").write_text("")
    results = Gang.start(*STEPS, "--checkpoint-every", "4", "--directory", str(tmp_path / "file")).finish()
    assert digests(results) == {straight}
    assert results[1][1].count("FAILED: IO_ERROR: ") == 3


def test_a_rank_of_another_generation_is_refused() -> None:
    environs = {0: {"VIRIAL_GENERATION": "2"}, 1: {"VIRIAL_GENERATION": "1"}}
    results = Gang.start(*STEPS, "--peer-timeout-s", "2", world_size=2, environs=environs).finish()
    assert [status for status, _, _ in results] == [3, 3]
    assert "refused a connection: rank 1 has generation 1, this gang has 2" in results[0][1]
    assert results[0][2] == "train: rank 0: rank 1 did not connect within 2 s\n"
    assert re.fullmatch(
        r"train: rank 1: rank 0 at .* refused this rank: rank 1 has generation 1, .* 2\n", results[1][2]
    )


def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    options = ("--steps", "2", "--checkpoint-every", "2", "--directory", str(tmp_path))
    digests(Gang.start(*options, world_size=1).finish())
    (shard,) = tmp_path.glob("*/rank-00000.shard")
    with open(shard, "r+b") as file:
        file.seek(600_000)
        file.write(b"\xff\xff\xff\xff")
    ((status, _, err),) = Gang.start(*options, world_size=1).finish()
    assert status == 4
    assert err.startswith(f"train: rank 0: cannot start from the checkpoint: {shard}: stripe 0: ")
    assert err.count("\n") == 1


def test_another_seed_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    options = ("--steps", "2", "--checkpoint-every", "2", "--directory", str(tmp_path))
    digests(Gang.start(*options, world_size=1).finish())
    ((status, _, err),) = Gang.start(*options, "--seed", "7", world_size=1).finish()
    assert status == 4
    assert "'seed': 1" in err
    assert "'seed': 7" in err


@pytest.mark.parametrize(
    ("options", "environ", "says"),
    [
        (["--corrupt-gradient", "2"], {}, "'2' is not RANK:STEP"),
        (["--steps", "0"], {}, "'0' is not a whole number >= 1"),
        (["--step", "5"], {}, "unrecognized arguments: --step 5"),
        ([], {"RANK": "3", "WORLD_SIZE": "3"}, "train: rank ?: rank 3 does not fit WORLD_SIZE 3"),
    ],
)
def test_wrong_use_gets_one_message(options: list[str], environ: dict[str, str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train.py"), *options],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_under_virial_it_reports_saves_when_asked_and_starts_from_the_named_checkpoint(
    tmp_path: Path, straight: str
) -> None:
    """Two ranks, a guardian each; only rank 1's is told to ask for a save, and both save the same step."""

    def progress(args: Fields) -> Fields:
        if args["step"] == 3:
            two.push(push="save_now", step=5, reason="DRAIN")
        return {}

    handlers: dict[str, Handler] = {
        "checkpoint_begin": begins_in(tmp_path / "c1"),
        "checkpoint_prepared": answers(state="PREPARED"),
    }
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    with guardian(tmp_path / "1", **handlers) as one, guardian(tmp_path / "2", **handlers, progress=progress) as two:

        def environs(**more: str) -> dict[int, dict[str, str]]:
            common = {"VIRIAL_JOB": "train", "VIRIAL_GENERATION": "2", "VIRIAL_EPOCH": "1.7", **more}
            sockets = [one.path, two.path]
            return {rank: {"VIRIAL_SOCK": str(sockets[rank]), "VIRIAL_RANK": str(rank), **common} for rank in range(2)}

        options = (*STEPS, "--checkpoint-every", "0", "--step-ms-min", "20")
        (whole,) = digests(Gang.start(*options, world_size=2, environs=environs()).finish())
        saved = [call.args["step"] for fake in (one, two) for call in fake.named("checkpoint_begin")]
        assert len(saved) == 2
        assert len(set(saved)) == 1
        assert int(str(saved[0])) >= 5
        assert one.named("progress")[-1].args["step"] == 12
        manifests = [read_manifest(tmp_path / "c1", rank) for rank in range(2)]
        assert [call.args["digest"] for fake in (one, two) for call in fake.named("checkpoint_prepared")] == [
            manifest.digest for manifest in manifests
        ]
        step = str(saved[0])
        named = environs(
            VIRIAL_CHECKPOINT_DIR=str(tmp_path / "c1"), VIRIAL_CHECKPOINT_ID="c1", VIRIAL_CHECKPOINT_STEP=step
        )
        results = Gang.start(*STEPS, "--checkpoint-every", "0", world_size=2, environs=named).finish()
        assert digests(results) == {whole}
        assert f"starts after step {step}" in results[1][1]
        assert whole != straight  # two ranks are another run than three
