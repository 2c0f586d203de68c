"""However a cluster ends, and whoever of it is killed, no process is left: the starter, its parts, their tasks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator
from pathlib import Path

import pytest

import virial
from tests.chaos.rack import LONG, MARK, PATHS, RANK, SECOND_NS, SEED, marked, until
from virial.models import Gang, JobSpec, Resources, TaskSpec

pytestmark = pytest.mark.timeout(900)


@contextlib.contextmanager
def started(base: Path, mark: str) -> Generator[subprocess.Popen[str]]:
    """`virial up`, as a user has it in a terminal of their own."""
    env = {**os.environ, MARK: mark, "PYTHONPATH": PATHS, "TMPDIR": str(base), "XDG_RUNTIME_DIR": str(base / "run")}
    command = [sys.executable, "-m", "virial.cli", "--output", "json", "up", "--nodes", "2"]
    with (base / "up.log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def base() -> Generator[Path]:
    made = Path(tempfile.mkdtemp(prefix="vl-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def run_escaping_job(address: str, base: Path, mark: str) -> None:
    """A rank, and a child of it that has left its session."""
    env = (("PYTHONPATH", PATHS), ("PATH", os.environ["PATH"]), (MARK, mark))
    command = (sys.executable, str(RANK), str(base), "--escape", "--deaf")
    task = TaskSpec(command, env, working_directory=str(base), grace_ns=SECOND_NS // 2)
    spec = JobSpec("escapes", task, Resources(cpu_millis=100, memory_bytes=128 << 20), Gang(ranks=2))
    with virial.SyncClient(address) as client:
        client.submit_job(spec)
    until(
        lambda: sum(command.startswith("sleep 612") for command in marked(mark, str(base)).values()) == 2,
        "children escaped",
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, *([signal.SIGTERM] if LONG else [])])
def test_nothing_is_left_of_a_cluster_whose_starter_ends(base: Path, number: signal.Signals) -> None:
    mark = f"left-{uuid.uuid4().hex}"
    with started(base, mark) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (base / "up.log").read_text()
        run_escaping_job(json.loads(line)["address"], base, mark)
        processes = marked(mark, str(base))
        assert len(processes) >= 3 + 4 + 4, (
            processes
        )  # starter, controller, planner; noded and guardian; ranks and escapees
        process.send_signal(number)
        process.wait(60)
        until(lambda: not marked(mark, str(base)), f"all gone: {marked(mark, str(base))}")
        if number is not signal.SIGKILL:
            assert [path.name for path in base.iterdir() if path.name.startswith("virial-")] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_cluster_that_is_ended_while_it_starts(base: Path, number: signal.Signals) -> None:
    rng = random.Random(f"{SEED}/{number}")
    for _ in range(20 if LONG else 2):
        mark = f"left-{uuid.uuid4().hex}"
        with started(base, mark) as process:
            time.sleep(rng.uniform(0.1, 3.0))
            process.send_signal(number)
            process.wait(60)
            until(lambda mark=mark: not marked(mark, str(base)), f"all gone: {marked(mark, str(base))}")
            if number is signal.SIGINT:
                assert [path.name for path in base.iterdir() if path.name.startswith("virial-")] == []
