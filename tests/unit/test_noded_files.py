"""The agent's own files, directories of checkpoints, and logs of tasks: on a real disk, with no process behind them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from noded.core.messages import Restore, Tier
from noded.core.slots import record_of
from noded.files import DataDirProblem, NodeFiles
from noded.link.logfiles import LogFiles
from noded.run.logs import RotatingFile
from noded.shards.directories import DirectoryProblem, Owner, drop, find_owner, make_local, make_shared
from noded.shards.verify import check_shard
from tests.unit.noded_builders import PREPARE, RESTORE
from virialpb.ids import NO_EPOCH, CheckpointId, Epoch
from virialpb.reasons import PrepareFailure
from virialpb.shardfile import ShardIdentity, ShardWriter

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act for another user")


def opened(path: Path, uid: str = "u1") -> NodeFiles:
    files = NodeFiles(path)
    assert files.open(lambda: uid)
    return files


# -- the data directory


def test_the_uid_is_made_once(tmp_path: Path) -> None:
    first = NodeFiles(tmp_path / "d")
    assert first.open(lambda: "u1") == "u1"
    first.close()
    assert NodeFiles(tmp_path / "d").open(lambda: "u2") == "u1"
    assert (tmp_path / "d/node.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o711


def test_case_c9_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    first = opened(tmp_path / "d")
    with pytest.raises(DataDirProblem, match=f"in use by a noded that runs .pid {os.getpid()}."):
        NodeFiles(tmp_path / "d").open(lambda: "u2")
    first.close()
    opened(tmp_path / "d").close()


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"node_uid": 3}', "{"])
def test_a_damaged_identity_is_never_replaced_in_silence(tmp_path: Path, body: str) -> None:
    opened(tmp_path / "d").close()
    (tmp_path / "d/node.json").write_text(body)
    with pytest.raises(DataDirProblem, match=r"node\.json is damaged"):
        NodeFiles(tmp_path / "d").open(lambda: "u2")


def test_the_highest_leader_is_kept(tmp_path: Path) -> None:
    files = opened(tmp_path / "d")
    assert files.leader() == (NO_EPOCH, "")
    files.save_leader(Epoch(2, 7), "c")
    assert files.leader() == (Epoch(2, 7), "c")
    (tmp_path / "d/leader.json").write_text("{}")
    assert files.leader() == (NO_EPOCH, "")


def test_records_survive_and_a_damaged_one_costs_only_itself(tmp_path: Path) -> None:
    files = opened(tmp_path / "d")
    record = record_of(PREPARE)
    files.remember(record)
    assert files.records() == (record,)
    (tmp_path / "d/slots/bad.json").write_text('{"slot": 3}')
    assert files.records() == (record,)
    files.forget(record.slot)
    files.forget(record.slot)
    assert files.records() == ()


def test_a_record_keeps_no_value_of_the_users_environment(tmp_path: Path) -> None:
    files = opened(tmp_path / "d")
    files.remember(record_of(PREPARE))
    assert json.loads((tmp_path / f"d/slots/{PREPARE.slot}.json").read_text())["user_env"] == ["HOME"]


# -- directories of checkpoints


def test_a_local_directory_is_for_its_owner_and_its_parents_only_passed_through(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    make_local(root, root / "j/c1", None)
    make_local(root, root / "j/c1", None)
    assert [path.stat().st_mode & 0o777 for path in (root, root / "j", root / "j/c1")] == [0o711, 0o711, 0o700]


@ROOT_ONLY
def test_a_local_directory_belongs_to_the_tasks_user(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    make_local(root, root / "j/c1", Owner(65534, 65534))
    assert (root / "j/c1").stat().st_uid == 65534
    assert (root / "j").stat().st_uid == 0


@ROOT_ONLY
def test_case_h12_a_shared_directory_is_made_with_the_tasks_rights_only(tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents[:-2]):
        parent.chmod(0o755)
    owner = Owner(65534, 65534, (65534,))
    with pytest.raises(DirectoryProblem, match="Permission denied"):
        make_shared(tmp_path / "root-only/c1", owner)
    assert not (tmp_path / "root-only").exists()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    make_shared(tmp_path / "open/a/c1", owner)
    make_shared(tmp_path / "open/a/c1", owner)
    status = (tmp_path / "open/a/c1").stat()
    assert (status.st_uid, status.st_mode & 0o777) == (65534, 0o700)


def test_an_unknown_user_is_named() -> None:
    assert find_owner("", "") is None
    with pytest.raises(DirectoryProblem, match="nobody-of-that-name"):
        find_owner("nobody-of-that-name", "")


def test_drop_deletes_shards_and_nothing_else(tmp_path: Path) -> None:
    directory = tmp_path / "c1"
    directory.mkdir()
    for name in ("rank-00000.shard", "rank-00000.json", ".rank-00001.shard.tmp", "notes.txt", "rank-1.shard"):
        (directory / name).touch()
    (tmp_path / "precious").touch()
    (directory / "rank-00007.shard").symlink_to(tmp_path / "precious")
    assert drop(directory, "c1") == 3
    assert sorted(os.listdir(directory)) == ["notes.txt", "rank-00007.shard", "rank-1.shard"]
    for name in os.listdir(directory):
        (directory / name).unlink()
    assert drop(directory, "c1") == 0
    assert not directory.exists()
    assert drop(directory, "c1") == 0
    assert (tmp_path / "precious").exists()


def test_drop_refuses_a_directory_that_is_not_the_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the directory of checkpoint c1"):
        drop(tmp_path, "c1")
    (tmp_path / "real").mkdir()
    (tmp_path / "real/rank-00000.shard").touch()
    (tmp_path / "c1").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="c1"):
        drop(tmp_path / "c1", "c1")
    assert (tmp_path / "real/rank-00000.shard").exists()


# -- shards


def test_a_shard_is_checked_against_the_registry(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, ShardIdentity("c1", 7, 0, 2, "j", 1))
    writer.write(b"x" * 10)
    digest = writer.finish().digest
    right = Restore(CheckpointId("c1"), 7, str(tmp_path), Tier.SHARED, "rank-00000.shard", digest, 10)
    assert check_shard(str(tmp_path), right) is None
    for wrong, failure in (
        (RESTORE, PrepareFailure.SHARD_CORRUPT),  # another digest
        (Restore(CheckpointId("c2"), 7, "", Tier.LOCAL, right.file, digest, 10), PrepareFailure.SHARD_CORRUPT),
        (Restore(CheckpointId("c1"), 8, "", Tier.LOCAL, right.file, digest, 10), PrepareFailure.SHARD_CORRUPT),
        (Restore(CheckpointId("c1"), 7, "", Tier.LOCAL, "rank-00001.shard", digest, 10), PrepareFailure.SHARD_MISSING),
    ):
        found = check_shard(str(tmp_path), wrong)
        assert found is not None
        assert found[0] is failure
    (tmp_path / "rank-00000.shard").write_bytes(b"x" * 9 + b"y")
    found = check_shard(str(tmp_path), right)
    assert found is not None
    assert found[0] is PrepareFailure.SHARD_CORRUPT


@pytest.mark.parametrize(
    ("tier", "directory", "failure"),
    [
        # Nothing is mounted there, as far as this node can see: no word about the checkpoint.
        (Tier.SHARED, "not-mounted/c1", PrepareFailure.CHECKPOINT_DIRECTORY),
        (Tier.SHARED, "a-file/c1", PrepareFailure.CHECKPOINT_DIRECTORY),
        (Tier.SHARED, "emptied", PrepareFailure.SHARD_MISSING),
        # The node's own disk has the only copy.
        (Tier.LOCAL, "not-mounted/c1", PrepareFailure.SHARD_MISSING),
    ],
)
def test_a_directory_that_is_out_of_reach_condemns_no_checkpoint(
    tmp_path: Path, tier: Tier, directory: str, failure: PrepareFailure
) -> None:
    (tmp_path / "emptied").mkdir()
    (tmp_path / "a-file").touch()
    restore = Restore(CheckpointId("c1"), 7, str(tmp_path / directory), tier, "rank-00000.shard", "d" * 64, 10)
    found = check_shard(restore.directory, restore)
    assert found is not None
    assert found[0] is failure


# -- logs


def log_of(tmp_path: Path, *, bytes_max: int = 10, files_max: int = 3) -> tuple[LogFiles, RotatingFile]:
    (tmp_path / "j.1.0").mkdir()
    return LogFiles(tmp_path), RotatingFile(tmp_path / "j.1.0/stdout.log", bytes_max, files_max)


def read_all(logs: LogFiles, offset: int = 0, bytes_max: int = 4) -> tuple[bytes, int]:
    found = b""
    while True:
        data, offset = logs.read("j.1.0", "stdout", offset, bytes_max)
        if not data:
            return found, offset
        found += data


def test_offsets_count_over_rotations(tmp_path: Path) -> None:
    logs, log = log_of(tmp_path)
    written = b"".join(b"line %d\n" % number for number in range(3))
    log.write(written)
    assert len(logs.parts("j.1.0", "stdout")) > 1
    assert read_all(logs) == (written, len(written))
    assert read_all(logs, 9) == (written[9:], len(written))


def test_a_reader_goes_on_where_it_was_while_files_rotate(tmp_path: Path) -> None:
    logs, log = log_of(tmp_path)
    found, offset, written = b"", 0, b""
    for number in range(30):
        line = b"line %d\n" % number
        log.write(line)
        written += line
        data, offset = read_all(logs, offset)
        found += data
    assert found == written
    assert offset == len(written)


def test_what_was_rotated_away_is_skipped_and_never_repeated(tmp_path: Path) -> None:
    logs, log = log_of(tmp_path)
    log.write(b"aaaaaaaa\n")
    assert read_all(logs) == (b"aaaaaaaa\n", 9)
    for _ in range(10):
        log.write(b"bbbbbbbb\n")
    data, offset = read_all(logs, 9)
    assert data == b"bbbbbbbb\n" * 3
    assert read_all(logs, offset) == (b"", offset)


def test_the_tail_begins_at_the_end(tmp_path: Path) -> None:
    logs, log = log_of(tmp_path)
    log.write(b"0123456\n89012345\n")
    assert logs.start("j.1.0", "stdout", 0, 3) == 14
    assert logs.start("j.1.0", "stdout", 0, 1000) == 0
    assert logs.start("j.1.0", "stdout", 5, 3) == 5


def test_a_log_that_does_not_exist_yet_is_empty(tmp_path: Path) -> None:
    (tmp_path / "j.1.0").mkdir()
    assert read_all(LogFiles(tmp_path)) == (b"", 0)
