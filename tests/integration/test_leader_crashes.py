"""Killed at any step of the commit path, a controller loses nothing it has acknowledged."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from controld.core.commands import CancelJob, SubmitJob
from controld.core.ids import JobId
from controld.core.invariants import check
from controld.core.model import JobState
from controld.replica.writer import Writer
from controld.store.faults import Fault, FaultKind, Operation
from controld.store.memory import MemoryDisk
from tests.support_core import spec
from tests.support_replica import lead, run, run_until_killed

JOBS = 12
ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 110.0


class Rough:
    """Every third commit loses its answer, and each takes a while on both sides of its effect."""

    def __init__(self) -> None:
        kinds = (FaultKind.NONE, FaultKind.NONE, FaultKind.LOST_AFTER)
        self.commits = deque(Fault(kind, before_s=0.001, after_s=0.001) for _ in range(200) for kind in kinds)

    def next(self, operation: Operation) -> Fault:
        return self.commits.popleft() if operation is Operation.COMMIT else Fault(before_s=0.001)


async def _work(disk: MemoryDisk, acknowledged: list[str]) -> None:
    """Submits jobs and cancels the even ones, several at a time; `acknowledged` is what a client was told."""
    rig = await lead(disk, faults=Rough())

    async def one(n: int) -> None:
        await asyncio.sleep(0.0007 * n)
        await rig.submit(SubmitJob(f"submit-{n}", spec(), f"job-{n}"))
        acknowledged.append(f"job-{n}")
        if n % 2 == 0:
            await rig.submit(CancelJob(f"cancel-{n}", JobId(f"job-{n}")))
            acknowledged.append(f"cancelled job-{n}")

    await asyncio.gather(*(one(n) for n in range(JOBS)))
    await rig.stop()


async def _inspect(disk: MemoryDisk, acknowledged: list[str], kill_at: int) -> None:
    rig = await lead(disk)
    state = rig.leader.state
    assert check(state) == (), kill_at
    for told in acknowledged:
        cancelled, _, job = told.rpartition(" ")
        assert JobId(job) in state.jobs, (kill_at, told)
        if cancelled:
            assert state.jobs[JobId(job)].state is JobState.CANCELLED, (kill_at, told)
    # Whatever was under way: asking again with the same request id does it once.
    for n in range(JOBS):
        await rig.submit(SubmitJob(f"submit-{n}", spec(), f"job-{n}"))
        if n % 2 == 0:
            await rig.submit(CancelJob(f"cancel-{n}", JobId(f"job-{n}")))
    assert len(state.jobs) == JOBS
    assert sum(e.kind == "job.submitted" for e in state.events.values()) == JOBS
    assert sorted(state.events) == list(range(1, len(state.events) + 1))
    await rig.stop()


def _kill_at_every_step() -> int:
    """How many of the kills hit the middle of the work."""
    kill_at, partly = 1, 0
    while True:
        disk = MemoryDisk()
        acknowledged: list[str] = []
        killed = run_until_killed(lambda disk=disk, told=acknowledged: _work(disk, told), kill_at)
        run(lambda disk=disk, told=acknowledged, at=kill_at: _inspect(disk, told, at))
        if not killed:
            assert len(acknowledged) == JOBS + JOBS // 2
            return partly
        partly += 0 < len(acknowledged) < JOBS + JOBS // 2
        kill_at += 1


def test_killed_at_every_step_nothing_acknowledged_is_lost() -> None:
    assert _kill_at_every_step() > 50


async def _answer_first(writer: Writer, batch: Any) -> None:
    writer._answer(batch)
    await _finish(writer, batch)


_finish = Writer._finish


def test_the_kills_catch_a_writer_that_answers_before_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writer, "_finish", _answer_first)
    with pytest.raises(AssertionError, match="job-"):
        _kill_at_every_step()


def _kill_real_processes(directory: Path, *flags: str) -> dict[str, Any]:
    """The same over the SQLite store, each life a process of its own: see tests/support_crasher.py."""
    command = [sys.executable, "-m", "tests.support_crasher", str(directory), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_killed_at_every_step_nothing_acknowledged_is_lost_from_the_disk(tmp_path: Path) -> None:
    result = _kill_real_processes(tmp_path)
    assert not result["lost"]
    assert result["kills"] > 50
    assert result["partly"] > 10


def test_the_kills_of_processes_catch_an_answer_before_the_commit(tmp_path: Path) -> None:
    assert "lost: " in _kill_real_processes(tmp_path, "--answer-first", "--first-step=40")["lost"]
