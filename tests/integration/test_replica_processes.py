"""Three controld processes on a real etcd: killed, stopped, told to end; nothing that was acknowledged is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import support_etcd
from virial import Client
from virial.models import JobSpec, Resources, TaskSpec

ROOT = Path(__file__).resolve().parents[2]
JOB = JobSpec(name="train", resources=Resources(cpu_millis=100, memory_bytes=1 << 20), task=TaskSpec(("true",)))
HANG_SECONDS = 60.0


@dataclass
class Rack:
    """`acked`: the job of each submission that was answered, by request id."""

    directory: Path
    addresses: list[str]
    endpoint: str
    prefix: str
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, subprocess.Popen[bytes]])
    acked: dict[str, str] = field(default_factory=dict[str, str])

    def start(self, name: str) -> None:
        index = int(name[1:])
        argv = [sys.executable, "-m", "controld", "--data-dir", str(self.directory / name), "--identity", name]
        argv += ["--listen", self.addresses[index], "--peers", ",".join(self.addresses), "--metrics-listen", "off"]
        argv += ["--store-kind", "etcd", "--store-endpoints", self.endpoint, "--store-prefix", self.prefix]
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log, env={**os.environ})

    async def leader(self, client: Client, *, but: str = "") -> str:
        async with asyncio.timeout(HANG_SECONDS):
            while (found := (await client.get_status()).leader) == but:  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.05)
            return found

    async def settled(self, client: Client) -> str:
        """The leader, once both others listen to it: either of them can then agree with the other."""
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                status = await client.get_status()
                if not any("does not listen" in problem for problem in status.problems):
                    return status.leader
                await asyncio.sleep(0.05)

    async def write(self, client: Client) -> None:
        """Until cancelled."""
        while True:
            request_id = f"w-{len(self.acked)}"
            self.acked[request_id] = (await client.submit_job(JOB, request_id=request_id)).id
            await asyncio.sleep(0.01)

    async def more(self) -> None:
        """Until some more was acknowledged."""
        enough = len(self.acked) + 5
        async with asyncio.timeout(HANG_SECONDS):
            while len(self.acked) < enough:  # noqa: ASYNC110 - whatever comes first
                await asyncio.sleep(0.02)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()


@pytest.fixture
async def rack() -> AsyncIterator[Rack]:
    support_etcd.require_etcd()
    with ExitStack() as stack:
        member = support_etcd.shared()
        await member.ready()
        directory = support_etcd.short_directory(stack)
        addresses = [f"127.0.0.1:{port}" for port in support_etcd.free_ports(3)]
        made = Rack(directory, addresses, member.processes[0].config.endpoint, support_etcd.fresh_prefix())
        try:
            for name in ("c0", "c1", "c2"):
                made.start(name)
            yield made
        finally:
            for process in made.processes.values():
                process.kill()
                process.wait()


async def test_nothing_acknowledged_is_lost_whatever_befalls_the_leader(rack: Rack) -> None:
    async with Client(rack.addresses, timeout_s=HANG_SECONDS) as client, Client(rack.addresses) as looking:
        writing = asyncio.create_task(rack.write(client))
        await rack.more()
        killed = await rack.settled(looking)
        rack.processes[killed].kill()
        rack.processes[killed].wait()
        await rack.more()
        rack.start(killed)
        # A process that is stopped says nothing and closes nothing; when it goes on, it still believes to lead.
        stopped = await rack.settled(looking)
        rack.processes[stopped].send_signal(signal.SIGSTOP)
        await asyncio.sleep(2)
        rack.processes[stopped].send_signal(signal.SIGCONT)
        await rack.more()
        ended = await rack.leader(looking, but=stopped)
        rack.processes[ended].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(rack.processes[ended].wait, HANG_SECONDS) == 0
        assert '"handover.done"' in rack.log(ended)
        await rack.more()
        writing.cancel()
        jobs = {job.id for job in await looking.list_jobs()}
        assert set(rack.acked.values()) <= jobs
        assert len(set(rack.acked.values())) == len(rack.acked), "each request made a job of its own"
        again = next(iter(rack.acked))
        assert (await looking.submit_job(JOB, request_id=again)).id == rack.acked[again]
        for name in ("c0", "c1", "c2"):
            assert not rack.log(name).partition("Traceback")[2]
