"""Saving a shard: what the task tells, when, and what it does when saving fails. Rows G8, G9 and G20."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.unit.task_support import (
    Fields,
    Handler,
    Refuse,
    answers,
    begins_in,
    guardian,
    in_child,
    managed_task,
    silent,
)
from virial.task import CheckpointError, Deadlines, Shard, Task
from virial.task._channel import CallFailed, Channel
from virial.task._environment import parse_environment
from virial.task._registry import Begun, GangRegistry, LocalRegistry
from virialpb.shardfile import ShardCorrupt, ShardIdentity, read_manifest, verify_shard

SHORT = Deadlines(begin_s=0.05, prepared_s=0.05, commit_s=0.05)


def test_a_save_tells_where_what_and_when(tmp_path: Path) -> None:
    directory = tmp_path / "job" / "c1"
    handlers: dict[str, Handler] = {
        "checkpoint_begin": begins_in(directory),
        "checkpoint_prepared": answers(state="PREPARED"),
    }
    with guardian(tmp_path, **handlers) as fake, managed_task(fake, rank=1, world_size=3) as task:
        with task.checkpoint(20) as shard:
            assert (shard.state, shard.checkpoint_id, shard.directory) == ("WRITING", "c1", str(directory))
            shard.write(b"abc")
            shard.write(memoryview(b"def"))
        assert (shard.state, shard.error) == ("PREPARED", None)
        manifest = verify_shard(directory, 1)
        assert manifest.identity == ShardIdentity("c1", 20, 1, 3, "train", 2)
        assert fake.calls[0].args == {"step": 20}
        assert [call.call for call in fake.calls] == ["checkpoint_begin", "checkpoint_prepared"]
        assert fake.calls[1].args == {
            "checkpoint_id": "c1",
            "step": 20,
            "size_bytes": 6,
            "digest": manifest.digest,
            "file": "rank-00001.shard",
        }
        fake.push(push="checkpoint", checkpoint_id="other", state="ABORTED")
        fake.push(push="checkpoint", checkpoint_id="c1", state="COMMITTED")
        while shard.state == "PREPARED":
            os.sched_yield()
        assert (shard.state, shard.error) == ("COMMITTED", None)


@pytest.mark.parametrize(("state", "reason"), [("COMMITTED", None), ("ABORTED", "ABORTED")])
def test_wait_waits_for_the_gang(tmp_path: Path, state: str, reason: str | None) -> None:
    handlers: dict[str, Handler] = {
        "checkpoint_begin": begins_in(tmp_path / "c1"),
        "checkpoint_prepared": answers(state="PREPARED"),
        "checkpoint_wait": answers(state=state),
    }
    with guardian(tmp_path, **handlers) as fake, managed_task(fake) as task:
        with task.checkpoint(20, wait=True) as shard:
            shard.write(b"x")
        assert shard.state == state
        assert (shard.error.reason if shard.error else None) == reason
        assert fake.wait_for_call("checkpoint_wait").args == {"checkpoint_id": "c1"}
        assert fake.named("checkpoint_failed") == []


def test_the_last_rank_hears_committed_at_once_and_asks_no_more(tmp_path: Path) -> None:
    handlers: dict[str, Handler] = {
        "checkpoint_begin": begins_in(tmp_path / "c1"),
        "checkpoint_prepared": answers(state="COMMITTED"),
    }
    with guardian(tmp_path, **handlers) as fake, managed_task(fake) as task:
        with task.checkpoint(20, wait=True, strict=True) as shard:
            pass
        assert shard.state == "COMMITTED"
        assert fake.named("checkpoint_wait") == []


def test_what_the_block_raises_is_passed_on_and_nothing_is_left(tmp_path: Path) -> None:
    with (
        guardian(tmp_path, checkpoint_begin=begins_in(tmp_path / "c1")) as fake,
        managed_task(fake) as task,
    ):
        shard = task.checkpoint(20)

        def saving_code_with_a_mistake() -> None:
            with shard:
                shard.write(b"half")
                raise KeyError("weights")

        with pytest.raises(KeyError):
            saving_code_with_a_mistake()
        assert shard.state == "FAILED"
        assert fake.wait_for_call("checkpoint_failed").args == {
            "checkpoint_id": "c1",
            "reason": "EXCEPTION",
            "message": "KeyError while the shard was written",
        }
        assert os.listdir(tmp_path / "c1") == []


def test_a_shard_takes_bytes_inside_its_block_only(tmp_path: Path) -> None:
    handlers: dict[str, Handler] = {
        "checkpoint_begin": begins_in(tmp_path / "c1"),
        "checkpoint_prepared": answers(state="PREPARED"),
    }
    with guardian(tmp_path, **handlers) as fake, managed_task(fake) as task:
        shard = task.checkpoint(20)
        with pytest.raises(ValueError, match="inside its block only"):
            shard.write(b"x")
        with shard:
            shard.write(b"x")
        with pytest.raises(ValueError, match="inside its block only"):
            shard.write(b"x")
        with pytest.raises(ValueError, match="written once"):
            shard.__enter__()


def test_a_checkpoint_given_up_meanwhile_is_not_written_to_its_end(tmp_path: Path) -> None:
    with (
        guardian(tmp_path, checkpoint_begin=begins_in(tmp_path / "c1")) as fake,
        managed_task(fake) as task,
        task.checkpoint(20) as shard,
    ):
        fake.push(push="checkpoint", checkpoint_id="c1", state="ABORTED")
        while shard.state == "WRITING":
            shard.write(b"x")
        assert os.listdir(tmp_path / "c1") == []
    assert (shard.state, shard.error.reason if shard.error else None) == ("ABORTED", "ABORTED")
    assert [call.call for call in fake.calls] == ["checkpoint_begin"]


@pytest.mark.parametrize(
    "result",
    [
        {},
        {"checkpoint_id": "c1"},
        {"checkpoint_id": 1, "directory": "/tmp"},
        {"checkpoint_id": "c1", "directory": "c1"},
    ],
)
def test_an_answer_without_sense_fails_the_save(tmp_path: Path, result: Fields) -> None:
    with guardian(tmp_path, checkpoint_begin=answers(**result)) as fake, managed_task(fake) as task:
        with task.checkpoint(20) as shard:
            shard.write(b"x")
        assert shard.error is not None
        assert (shard.state, shard.error.reason) == ("FAILED", "PROTOCOL")


def test_a_stale_generation_is_refused_by_reason(tmp_path: Path) -> None:
    def fenced(args: Fields) -> Fields:
        raise Refuse("FENCED", "generation 3 runs")

    with guardian(tmp_path, checkpoint_begin=fenced) as fake, managed_task(fake) as task:
        with task.checkpoint(20) as shard:
            shard.write(b"x")
        assert str(shard.error) == "FENCED: generation 3 runs"
        with pytest.raises(CheckpointError, match="FENCED: generation 3 runs"), task.checkpoint(20, strict=True):
            pytest.fail("the block must not run")


# G8: a failed save kills training


@contextlib.contextmanager
def small_disk(path: Path) -> Generator[bool]:
    """Mount 4 MiB at `path`; False where that is not allowed."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


def saves_and_goes_on(save: Callable[[Task, int, int], Shard], folder: Path) -> bool:
    """Whether a full disk costs one save and no more: no exception, an event, older intact, the next one works."""
    folder.mkdir()
    names: dict[object, str] = {}

    def begin(args: Fields) -> Fields:
        name = names.setdefault(args["step"], f"c{args['step']}")
        return {"checkpoint_id": name, "directory": str(folder / "disk" / name), "tier": "shared"}

    handlers: dict[str, Handler] = {"checkpoint_begin": begin, "checkpoint_prepared": answers(state="PREPARED")}
    with small_disk(folder / "disk") as mounted, guardian(folder, **handlers) as fake, managed_task(fake) as task:
        too_much = (8 << 20) if mounted else (2 << 20)
        if not mounted:
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # EFBIG instead; ends with this child
        try:
            save(task, 1, 300_000)
            failed = save(task, 2, too_much)
            save(task, 3, 300_000)
            intact = [verify_shard(folder / "disk" / f"c{step}", 0).identity.step for step in (1, 3)]
        except (CheckpointError, ShardCorrupt, OSError):
            return False
        told = [(call.args["checkpoint_id"], call.args["reason"]) for call in fake.named("checkpoint_failed")]
        left = os.listdir(folder / "disk" / "c2")
        return intact == [1, 3] and failed.state == "FAILED" and told == [("c2", "STORAGE_FULL")] and left == []


def run_apart(check: Callable[[], bool]) -> bool:
    """Run in a child, because a file size limit cannot be taken back by an ordinary user."""

    def body() -> None:
        os._exit(10 if check() else 11)

    status = in_child(body)
    assert status in (10, 11), status
    return status == 10


def save_plain(task: Task, step: int, size: int) -> Shard:
    with task.checkpoint(step) as shard:
        for start in range(0, size, 100_000):
            shard.write(bytes(min(100_000, size - start)))
    return shard


@pytest.mark.row("G8")
def test_case_g8_a_full_disk_fails_the_save_and_training_goes_on(tmp_path: Path) -> None:
    assert run_apart(lambda: saves_and_goes_on(save_plain, tmp_path / "run"))


@pytest.mark.row("G8")
def test_case_g8_catches_each_seeded_defect(tmp_path: Path) -> None:
    def strict_by_default(task: Task, step: int, size: int) -> Shard:
        with task.checkpoint(step, strict=True) as shard:
            shard.write(bytes(size))
        return shard

    def tells_nobody(task: Task, step: int, size: int) -> Shard:
        task._registry.failed = lambda begun, reason, message: None
        return save_plain(task, step, size)

    def leaves_the_half_of_it(task: Task, step: int, size: int) -> Shard:
        with task.checkpoint(step) as shard:
            writer = shard._writer
            assert writer is not None
            writer.discard = lambda: os.close(writer._fd)
            shard.write(bytes(size))
        return shard

    for defect in (strict_by_default, tells_nobody, leaves_the_half_of_it):
        assert not run_apart(lambda defect=defect: saves_and_goes_on(defect, tmp_path / defect.__name__)), (
            defect.__name__
        )


# G9: ranks derive the directory from their own clock; a shard is silently missing


def all_shards_or_no_restore(registry: Callable[[str, int], LocalRegistry], folder: Path) -> bool:
    """Whether ranks agree on the directory without a clock, and a set that lacks a shard is never restored."""

    def gang() -> list[Task]:
        tasks: list[Task] = []
        for rank in range(3):
            task = Task(parse_environment({"RANK": str(rank), "WORLD_SIZE": "3"}), folder)
            local = registry(str(folder), rank)
            task._registry, task._restore = local, local.newest()
            tasks.append(task)
        return tasks

    first = gang()
    for step, ranks in ((10, first), (20, first[:2])):  # the third rank's shard of step 20 never comes
        for task in ranks:
            with task.checkpoint(step) as shard:
                shard.write(b"%d" % step)
    try:
        restored = [task.restore() for task in gang()]
    except ShardCorrupt:
        return False
    return [each.step if each else None for each in restored] == [10, 10, 10]


@pytest.mark.row("G9")
def test_case_g9_all_shards_in_one_named_directory_or_no_restore(tmp_path: Path) -> None:
    assert all_shards_or_no_restore(lambda folder, rank: LocalRegistry(folder, 3), tmp_path)


@pytest.mark.row("G9")
def test_case_g9_under_virial_only_the_controllers_directory_is_written(tmp_path: Path) -> None:
    directory = tmp_path / "named by the controller"
    handlers: dict[str, Handler] = {
        "checkpoint_begin": begins_in(directory, "c9"),
        "checkpoint_prepared": answers(state="PREPARED"),
    }
    with guardian(tmp_path, **handlers) as fake:
        for rank in range(3):
            with managed_task(fake, rank, 3) as task, task.checkpoint(10) as shard:
                shard.write(b"%d" % rank)
        assert {read_manifest(directory, rank).identity.checkpoint_id for rank in range(3)} == {"c9"}
        assert sorted(os.listdir(tmp_path)) == ["named by the controller", "sock"]
        assert len(os.listdir(directory)) == 6


@pytest.mark.row("G9")
def test_case_g9_catches_each_seeded_defect(tmp_path: Path) -> None:
    class OwnClock(LocalRegistry):
        """Each rank's clock is a little off: each names another directory."""

        def __init__(self, directory: str, rank: int) -> None:
            super().__init__(directory, 3)
            self._run += rank

    class MissesAShard(LocalRegistry):
        """Counts a set as complete when any shard is there."""

        def _complete(self, path: str) -> bool:
            return any(name.endswith(".json") for name in os.listdir(path))

    def misses_a_shard(directory: str, rank: int) -> LocalRegistry:
        del rank
        return MissesAShard(directory, 3)

    defects: dict[str, Callable[[str, int], LocalRegistry]] = {"own clock": OwnClock, "misses a shard": misses_a_shard}
    for name, defect in defects.items():
        assert not all_shards_or_no_restore(defect, tmp_path / name), name


# G20: load or save hangs for ever


class Recorder(Channel):
    """Nobody ever answers; remembers for how long each call would have waited."""

    def __init__(self) -> None:
        super().__init__("", lambda push: None)
        self.waits: list[tuple[str, float]] = []
        self.answers: dict[str, Fields] = {}

    def call(self, call: str, args: object, timeout_s: float) -> Fields:
        self.waits.append((call, timeout_s))
        if call in self.answers:
            return self.answers[call]
        if timeout_s > 1:
            # A hang, in a test that does not wait for it.
            raise CallFailed("HANGS", f"{call} would wait {timeout_s} s")
        raise CallFailed("TIMEOUT", call)

    def notify(self, call: str, args: object) -> None:
        del args
        self.waits.append((call, 0.0))


def every_phase_ends(make: Callable[[Channel], GangRegistry], deadlines: Deadlines, folder: Path) -> bool:
    """Whether a save ends when nobody answers begin, or prepared, or wait, or the disk is too slow."""
    identity = ShardIdentity("", 20, 0, 1)
    for answered in range(4):
        channel = Recorder()
        if answered > 0:
            channel.answers["checkpoint_begin"] = {"checkpoint_id": "c1", "directory": str(folder / str(answered))}
        if answered > 1:
            channel.answers["checkpoint_prepared"] = {"state": "PREPARED"}
        write_s = 0.0 if answered == 3 else deadlines.write_s
        phases = Deadlines(deadlines.begin_s, write_s, deadlines.prepared_s, deadlines.commit_s)
        shard = Shard(make(channel), identity, wait=True, strict=False, deadlines=phases)
        with shard:
            shard.write(b"x")
        if shard.error is None or shard.error.reason != "TIMEOUT":
            return False
    return True


@pytest.mark.row("G20")
def test_case_g20_every_phase_of_a_save_has_a_deadline(tmp_path: Path) -> None:
    assert every_phase_ends(GangRegistry, SHORT, tmp_path)
    defaults = Deadlines()
    assert all(0 < each < 3600 for each in (defaults.begin_s, defaults.write_s, defaults.prepared_s, defaults.commit_s))


@pytest.mark.row("G20")
@pytest.mark.parametrize("quiet", ["checkpoint_begin", "checkpoint_prepared", "checkpoint_wait"])
def test_case_g20_a_save_ends_although_nobody_answers(tmp_path: Path, quiet: str) -> None:
    handlers: dict[str, Handler] = {
        "checkpoint_begin": begins_in(tmp_path / "c1"),
        "checkpoint_prepared": answers(state="PREPARED"),
        "checkpoint_wait": answers(state="COMMITTED"),
        quiet: silent,
    }
    with guardian(tmp_path, **handlers) as fake, managed_task(fake) as task:
        with task.checkpoint(20, wait=True, deadlines=SHORT) as shard:
            shard.write(b"x")
        assert shard.error is not None
        assert shard.error.reason == "TIMEOUT"
        assert shard.state == ("PREPARED" if quiet == "checkpoint_wait" else "FAILED")
        if quiet == "checkpoint_begin":
            return
        # Durable and only the answer is lost: it is left alone, and what became of it is heard later.
        assert verify_shard(tmp_path / "c1", 0).size_bytes == 1
        fake.push(push="checkpoint", checkpoint_id="c1", state="COMMITTED")
        while shard.state != "COMMITTED":
            os.sched_yield()
        assert shard.error is None


@pytest.mark.row("G20")
def test_case_g20_catches_each_seeded_defect(tmp_path: Path) -> None:
    class ForeverBegin(GangRegistry):
        def begin(self, step: int, timeout_s: float) -> Begun:
            del timeout_s
            return super().begin(step, float("inf"))

    class ForeverWait(GangRegistry):
        def wait(self, begun: Begun, timeout_s: float) -> str:
            del timeout_s
            return super().wait(begun, float("inf"))

    for defect in (ForeverBegin, ForeverWait):
        assert not every_phase_ends(defect, SHORT, tmp_path / defect.__name__), defect.__name__


# Restore


def test_restore_reads_the_named_checkpoint_and_says_when_it_is_another(tmp_path: Path) -> None:
    handlers: dict[str, Handler] = {
        "checkpoint_begin": begins_in(tmp_path / "c1"),
        "checkpoint_prepared": answers(state="COMMITTED"),
    }
    data = bytes(range(256)) * 5000
    with guardian(tmp_path, **handlers) as fake:
        for rank in range(2):
            with managed_task(fake, rank, 2) as task, task.checkpoint(20) as shard:
                shard.write(data + bytes([rank]))
        named = {"VIRIAL_CHECKPOINT_DIR": str(tmp_path / "c1"), "VIRIAL_CHECKPOINT_ID": "c1"}
        with managed_task(fake, 1, 2, **named, VIRIAL_CHECKPOINT_STEP="20") as task:
            restored = task.restore()
            assert restored is not None
            assert (restored.step, restored.checkpoint_id, restored.world_size) == (20, "c1", 2)
            assert restored.read() == data + b"\1"
            assert restored.read(rank=0) == data + b"\0"
            with restored.open() as file:
                file.seek(-1, os.SEEK_END)
                assert file.read() == b"\1"
        for rank, differs, says in (
            (1, {"VIRIAL_CHECKPOINT_STEP": "40"}, r"rank-00001\.json: step 20, not the 40 to restore"),
            (1, {"VIRIAL_CHECKPOINT_ID": "c2"}, "of checkpoint 'c1', not 'c2'"),
            (2, {}, r"rank-00002\.json: no such file"),
        ):
            with (
                managed_task(fake, rank, 3, **{**named, "VIRIAL_CHECKPOINT_STEP": "20", **differs}) as task,
                pytest.raises(ShardCorrupt, match=says),
            ):
                task.restore()
        with managed_task(fake) as task:
            assert task.restore() is None


def test_restore_names_the_file_and_the_stripe_that_is_bad(tmp_path: Path) -> None:
    handlers: dict[str, Handler] = {
        "checkpoint_begin": begins_in(tmp_path / "c1"),
        "checkpoint_prepared": answers(state="COMMITTED"),
    }
    named = {"VIRIAL_CHECKPOINT_DIR": str(tmp_path / "c1"), "VIRIAL_CHECKPOINT_STEP": "20"}
    with guardian(tmp_path, **handlers) as fake, managed_task(fake, 0, 1, **named) as task:
        with task.checkpoint(20) as shard:
            shard.write(bytes(3 << 20))
        path = tmp_path / "c1" / "rank-00000.shard"
        with open(path, "r+b") as file:
            file.seek((1 << 20) + 5)
            file.write(b"\1")
        restored = task.restore()
        assert restored is not None
        with restored.open() as opened:
            assert opened.read(1 << 20) == bytes(1 << 20)
        with pytest.raises(ShardCorrupt) as caught:
            restored.read()
        assert (caught.value.file, caught.value.stripe) == (str(path), 1)
