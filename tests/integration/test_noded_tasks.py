"""What a task sees of the agent: its environment, its checkpoints, its logs; and what is refused in words."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.integration.noded_support import ROOT, FakeController, controller, go, noded, prepare, token
from virialpb.shardfile import ShardIdentity, ShardWriter
from virialpb.v1 import node_pb2

PYTHONPATH = os.pathsep.join(str(ROOT / part) for part in (".", "client", "protos"))
SAVES = """
from virial import task
t = task.current()
with t.checkpoint(7) as shard:
    shard.write(b"weights")
print("STATE", shard.state, flush=True)
assert shard.state == "COMMITTED", shard.error
"""
LOADS = """
from virial import task
t = task.current()
restored = t.restore()
print("RESTORED", restored.step, restored.read().decode(), flush=True)
"""


async def start(fake: FakeController, wanted: node_pb2.Prepare) -> None:
    await fake.until(lambda: fake.sessions, "hello")
    fake.order(prepare=wanted)
    await fake.until_state(wanted.slot, "READY")
    fake.order(go=go(wanted.slot, wanted.token))


async def log_of(fake: FakeController, slot: str, **fields: object) -> bytes:
    fake.chunks.clear()
    request = node_pb2.LogRequest(request_id=9, slot=slot, stream="stdout", **fields)  # type: ignore[arg-type]
    fake.bulk.put_nowait(node_pb2.BulkDown(log_request=request))
    await fake.until(lambda: any(chunk.end for chunk in fake.chunks), "end of the log")
    assert not fake.chunks[-1].error, fake.chunks[-1].error
    return b"".join(chunk.data for chunk in fake.chunks)


def python(script: str, **fields: object) -> node_pb2.Prepare:
    wanted = prepare([sys.executable, "-c", script], **fields)  # type: ignore[arg-type]
    wanted.task.env["PYTHONPATH"] = PYTHONPATH
    return wanted


async def answer(fake: FakeController, body: str, **reply: object) -> node_pb2.TaskCall:
    """Wait for the next call of that kind and answer it."""
    calls = fake.session.calls
    await fake.until(lambda: any(call.WhichOneof("call") == body for call in calls), body)
    call = next(call for call in calls if call.WhichOneof("call") == body)
    fake.order(task_reply=node_pb2.TaskReply(call_id=call.call_id, slot=call.slot, **reply))  # type: ignore[arg-type]
    return call


async def test_a_checkpoint_is_saved_in_this_nodes_tier_restored_from_it_and_dropped(tmp_path: Path) -> None:
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]):
        await start(fake, python(SAVES))
        begin = await answer(fake, "checkpoint_begin", checkpoint="c1", tier="local", state="BEGUN")
        assert begin.checkpoint_begin.step == 7
        call = (await answer(fake, "checkpoint_prepared", checkpoint="c1", state="COMMITTED")).checkpoint_prepared
        exited = await fake.until_state("j.1.0", "EXITED")
        assert (exited.exit.reason, exited.exit.code) == ("EXITED", 0), exited.exit.stderr_tail
        assert await log_of(fake, "j.1.0") == b"STATE COMMITTED\n"
        directory = tmp_path / "n1/checkpoints/j/c1"
        assert sorted(os.listdir(directory)) == ["rank-00000.json", "rank-00000.shard"]
        assert directory.stat().st_mode & 0o777 == 0o700

        owner = token(generation=2, revision=30)
        wanted = python(LOADS, slot="j.2.0", owner=owner)
        restore = node_pb2.Restore(
            checkpoint="c1", step=7, tier="local", file=call.file, digest=call.digest, size_bytes=call.size_bytes
        )
        wanted.restore.CopyFrom(restore)
        await start(fake, wanted)
        exited = await fake.until_state("j.2.0", "EXITED")
        assert (exited.exit.reason, exited.exit.code) == ("EXITED", 0), exited.exit.stderr_tail
        assert await log_of(fake, "j.2.0") == b"RESTORED 7 weights\n"

        (directory / "notes.txt").write_text("not a shard")
        fake.order(drop_checkpoint=node_pb2.DropCheckpoint(job="j", checkpoint="c1", tier="local"))
        await fake.until(lambda: fake.session.drops, "drop done")
        assert os.listdir(directory) == ["notes.txt"]


@pytest.mark.parametrize("damage", ["flip", "missing"])
async def test_case_f1_a_rank_is_never_started_from_a_damaged_shard(tmp_path: Path, damage: str) -> None:
    directory = tmp_path / "shared/c1"
    directory.mkdir(parents=True)
    writer = ShardWriter(directory, ShardIdentity("c1", 7, 0, 1, "j", 1))
    writer.write(b"weights" * 1000)
    manifest = writer.finish()
    shard = directory / manifest.file
    if damage == "flip":
        data = bytearray(shard.read_bytes())
        data[100] ^= 1
        shard.write_bytes(data)
    else:
        shard.unlink()
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]):
        await fake.until(lambda: fake.sessions, "hello")
        wanted = python(LOADS)
        restore = node_pb2.Restore(
            checkpoint="c1",
            step=7,
            directory=str(directory),
            tier="shared",
            file=manifest.file,
            digest=manifest.digest,
            size_bytes=manifest.size_bytes,
        )
        wanted.restore.CopyFrom(restore)
        fake.order(prepare=wanted)
        failed = await fake.until_state("j.1.0", "PREPARE_FAILED")
        assert failed.failure == {"flip": "SHARD_CORRUPT", "missing": "SHARD_MISSING"}[damage]
        assert str(shard) in failed.failure_detail
        fake.order(release=node_pb2.Release(slot="j.1.0", token=token()))
        await fake.until(lambda: fake.slot("j.1.0") is None, "release")


async def test_save_now_reaches_the_task(tmp_path: Path) -> None:
    script = """
import time
from virial import task
t = task.current()
t.progress(3)
while (request := t.save_requested()) is None:
    time.sleep(0.01)
print("SAVE", request.reason, flush=True)
"""
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]):
        await start(fake, python(script))
        await fake.until(lambda: (status := fake.slot("j.1.0")) and status.progress_step == 3, "progress")
        fake.order(save_now=node_pb2.SaveNow(slot="j.1.0", token=token(), step=-1, reason="DRAIN"))
        exited = await fake.until_state("j.1.0", "EXITED")
        assert exited.exit.code == 0, exited.exit.stderr_tail
        assert await log_of(fake, "j.1.0") == b"SAVE DRAIN\n"


async def test_case_h14_a_value_the_user_set_is_not_overwritten_and_h10_no_device_is_shown(tmp_path: Path) -> None:
    script = "import os; e = os.environ; print(e['MASTER_ADDR'], e['VIRIAL_RANK'], repr(e['CUDA_VISIBLE_DEVICES']))"
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]):
        wanted = python(script)
        wanted.task.env["MASTER_ADDR"] = "mine"
        await start(fake, wanted)
        await fake.until_state("j.1.0", "EXITED")
        assert await log_of(fake, "j.1.0") == b"mine 0 ''\n"


async def test_a_log_is_followed_until_its_task_is_over_and_tailed(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"""
import os, time
print("one", flush=True)
while not os.path.exists({str(gate)!r}):
    time.sleep(0.01)
print("two", flush=True)
"""
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]):
        await start(fake, python(script))
        following = asyncio.create_task(log_of(fake, "j.1.0", follow=True))
        await fake.until(lambda: following.done() or any(c.data == b"one\n" for c in fake.chunks), "first line")
        assert not following.done(), fake.chunks
        gate.touch()
        assert await following == b"one\ntwo\n"
        assert await log_of(fake, "j.1.0", tail_bytes=3) == b"wo\n"
        assert await log_of(fake, "j.1.0", offset=4) == b"two\n"


async def test_what_cannot_be_prepared_says_why(tmp_path: Path) -> None:
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]):
        await fake.until(lambda: fake.sessions, "hello")
        bad_user = prepare(["/bin/true"], slot="a.1.0", owner=token("a"))
        bad_user.task.user = "nobody-of-that-name"
        bad_directory = prepare(["/bin/true"], slot="b.1.0", owner=token("b"))
        bad_directory.task.working_directory = "/no/such/directory"
        bad_command = prepare(["/no/such/command"], slot="c.1.0", owner=token("c"))
        expected = {
            "a.1.0": "USER_UNKNOWN",
            "b.1.0": "WORKING_DIRECTORY_MISSING",
            "c.1.0": "COMMAND_NOT_FOUND",
        }
        for wanted in (bad_user, bad_directory, bad_command):
            fake.order(prepare=wanted)
        for slot, failure in expected.items():
            failed = await fake.until_state(slot, "PREPARE_FAILED")
            assert failed.failure == failure
            assert failed.failure_detail


@pytest.mark.skipif(os.geteuid() != 0, reason="only root would run tasks as root")
async def test_case_h12_a_task_without_a_user_is_refused_by_a_root_agent(tmp_path: Path) -> None:
    async with controller() as fake, noded(tmp_path / "n1", [fake.address], "--allow-root-tasks", "false"):
        await fake.until(lambda: fake.sessions, "hello")
        fake.order(prepare=prepare(["/bin/true"]))
        failed = await fake.until_state("j.1.0", "PREPARE_FAILED")
        assert failed.failure == "USER_REQUIRED"
        assert "user" in failed.failure_detail
