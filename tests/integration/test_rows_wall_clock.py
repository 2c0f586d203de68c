"""Row F5 with real processes: the wall clocks of three controllers and of an agent are set while a task runs.

tests/integration/test_rows_clocks.py has the same in virtual time, with what a step does to elections.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from tests import support_etcd
from tests.integration.noded_support import noded_env
from tests.support_controllers import CONTROLD, HANG_SECONDS, ROOT, Controllers
from virial import Client
from virial.models import JobSpec, JobState, Resources, TaskSpec

HOUR_S = 3600
FENCE_S = 20
# After each step. What one does shows at once, but for a silence, which shows by the end of all of them.
SETTLE_SECONDS = 10.0 if os.environ.get("VIRIAL_LONG") else 2.5
JOB = JobSpec(
    name="train",
    resources=Resources(cpu_millis=100, memory_bytes=16 << 20),
    task=TaskSpec(("sleep", "600"), env=(("PATH", os.environ["PATH"]),)),
    fence_after_ns=FENCE_S * 1_000_000_000,
)
NODED = "import sys; from noded.__main__ import main; sys.exit(main(sys.argv[1:]))"
# A lease that starts by the right clock and runs by the wrong one.
LEASE_BY_THE_WALL_CLOCK = f"""
import time, noded.app
AHEAD_NS = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.time_ns()
noded.app.boottime_ns = lambda: time.time_ns() + AHEAD_NS
{NODED}"""


class WallClocks:
    """A clock for each process, that can be set."""

    def __init__(self, directory: Path, shim: Path) -> None:
        self._directory = directory
        self._shim = shim
        self._ahead_s: dict[str, int] = {}

    def environment(self, name: str) -> dict[str, str]:
        self.set(name, 0)
        return {"LD_PRELOAD": str(self._shim), "WALL_CLOCK": str(self._directory / f"{name}.clock")}

    def set(self, name: str, by_s: int) -> None:
        self._ahead_s[name] = self._ahead_s.get(name, 0) + by_s
        path = self._directory / f"{name}.clock"
        with path.open("r+b" if path.exists() else "wb") as file:
            file.write(struct.pack("q", self._ahead_s[name]))


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("shim") / "wall_clock.so"
    source = Path(__file__).with_name("wall_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return library


@contextmanager
def agent(directory: Path, controllers: list[str], program: str, clock: dict[str, str]) -> Generator[None]:
    argv = [sys.executable, "-c", program, "--name", "n1", "--advertise-address", "127.0.0.1", "--log-format", "json"]
    argv += ["--data-dir", str(directory / "n1"), "--runtime-dir", str(directory / "run"), "--kill-tasks-on-exit"]
    argv += ["--controllers", ",".join(controllers), "--cpu", "1", "--memory", "64MiB", "--allow-root-tasks", "true"]
    with (directory / "n1.log").open("ab") as log:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log, env={**noded_env(), **clock})
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(HANG_SECONDS)


async def set_all_clocks(directory: Path, shim: Path, program: str) -> None:
    """A gang runs, and every clock is set by an hour and back: nothing may come of it."""
    member = support_etcd.shared()
    await member.ready()
    clocks = WallClocks(directory, shim)
    controllers = Controllers(directory, member.processes[0].config.endpoint, CONTROLD)
    addresses = [*controllers.addresses.values()]
    try:
        for name in controllers.names:
            controllers.environments[name] = clocks.environment(name)
            controllers.start(name, "--election-takeover", "3s")
        with agent(directory, addresses, program, clocks.environment("n1")):
            leader = await set_in_turn(controllers, clocks)
    finally:
        controllers.end()
    assert moments_span_hours(controllers.log_file(leader)), "its clock was set"


async def set_in_turn(controllers: Controllers, clocks: WallClocks) -> str:
    """Returns who leads."""
    addresses = [*controllers.addresses.values()]
    async with Client(addresses, timeout_s=HANG_SECONDS) as client:
        job = await client.submit_job(JOB)
        async with asyncio.timeout(HANG_SECONDS):
            while (await client.get_job(job.id)).state is not JobState.RUNNING:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await controllers.listened_to()
        leader = (await client.get_status()).leader
        standbys = [name for name in controllers.names if name != leader]
        for names, by_s in (
            (["n1"], HOUR_S),
            ([leader], HOUR_S),
            (standbys, -HOUR_S),
            (["n1", leader], -2 * HOUR_S),
        ):
            for name in names:
                clocks.set(name, by_s)
            await asyncio.sleep(SETTLE_SECONDS)
            now = await client.get_job(job.id)
            assert (now.state, now.generation) == (JobState.RUNNING, 1), f"after {names} by {by_s} s"
            assert (await client.get_status()).leader == leader
        assert len(controllers.leaderships()) == 1
        # A node that is suspect for a moment may be a busy machine's; one that has expired is no accident.
        kinds = {event.kind for event in await client.list_events()}
        assert not kinds & {"node.expired", "lease.expired"}
        return leader


def moments_span_hours(log: Path) -> bool:
    stamps = [json.loads(line)["timestamp"] for line in log.read_text().splitlines() if line.startswith("{")]
    moments = [datetime.fromisoformat(stamp) for stamp in stamps]
    return (max(moments) - min(moments)).total_seconds() > HOUR_S / 2


@pytest.mark.row("F5")
async def test_clocks_are_set_and_nothing_ends_and_nobody_takes_over(tmp_path: Path, shim: Path) -> None:
    support_etcd.require_etcd()
    await set_all_clocks(tmp_path, shim, NODED)


@pytest.mark.skipif(not os.environ.get("VIRIAL_LONG"), reason="long: VIRIAL_LONG=1")
@pytest.mark.row("F5", defect="lease_by_the_wall_clock")
async def test_a_lease_by_the_wall_clock_is_seen_to_end(tmp_path: Path, shim: Path) -> None:
    support_etcd.require_etcd()
    with pytest.raises(AssertionError, match="after "):
        await set_all_clocks(tmp_path, shim, LEASE_BY_THE_WALL_CLOCK)
