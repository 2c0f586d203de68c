"""Three `controld` processes on one etcd, and a writer to each that is never sent on to another."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

import grpc
from grpc import aio

from controld.core.ids import Epoch
from tests import support_etcd
from tests.support_service import job_spec
from virial import Client
from virialpb.ids import parse_epoch
from virialpb.v1 import job_pb2, job_pb2_grpc

ROOT: Final = Path(__file__).resolve().parents[1]
HANG_SECONDS: Final = 60.0
JOB: Final = "train"
CONTROLD: Final = "import sys; from controld.__main__ import main; sys.exit(main(sys.argv[1:]))"


@dataclass
class Ack:
    """`number`: of the job that was made, in order of commits. `by`: the controller that said so."""

    number: int
    by: str


class Controllers:
    """Three `controld` on one etcd, and a writer to each that is never sent on to another.

    `program` is what each runs, `controld` itself or one with a defect.
    """

    def __init__(self, directory: Path, endpoint: str, program: str) -> None:
        self._directory = directory
        self._store = ["--store-kind", "etcd", "--store-endpoints", endpoint]
        self._store += ["--store-prefix", support_etcd.fresh_prefix()]
        self._program = program
        self.names = ("c0", "c1", "c2")
        ports = support_etcd.free_ports(3)
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in zip(self.names, ports, strict=True)}
        # Of each, beside this process's own.
        self.environments: dict[str, dict[str, str]] = {name: {} for name in self.names}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.acks: list[Ack] = []
        self.writing: list[asyncio.Task[None]] = []

    def start(self, name: str, *flags: str) -> None:
        argv = [sys.executable, "-c", self._program, "--identity", name, "--metrics-listen", "off", *self._store]
        argv += ["--data-dir", str(self._directory / name), "--listen", self.addresses[name], *flags]
        if "--peers" not in flags:
            argv += ["--peers", ",".join(self.addresses.values())]
        with self.log_file(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                argv, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **self.environments[name]}
            )

    def serves(self, name: str) -> bool:
        return (self._directory / name / "ports.json").exists()

    def log_file(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    async def write(self, name: str) -> None:
        """Until cancelled. A request whose answer is unknown is given up: what it did is nobody's."""
        number = 0
        while True:
            async with aio.insecure_channel(self.addresses[name]) as channel:
                jobs = job_pb2_grpc.JobServiceStub(channel)
                with suppress(grpc.RpcError):
                    while True:
                        number += 1
                        request = job_pb2.SubmitJobRequest(request_id=f"{name}-{number}", spec=job_spec(name=JOB))
                        answer = await jobs.SubmitJob(request, timeout=10)
                        self.acks.append(Ack(int(answer.name.rpartition("-")[2]), name))
                        await asyncio.sleep(0.05)
            await asyncio.sleep(0.05)

    async def acked_by(self, *names: str) -> str:
        """Who of them it is that acknowledges something from now on."""
        seen = len(self.acks)
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                for task in self.writing:
                    if task.done():
                        task.result()
                found = [ack.by for ack in self.acks[seen:] if ack.by in names]
                if found:
                    return found[0]
                await asyncio.sleep(0.02)

    def leaderships(self) -> list[tuple[Epoch, str]]:
        """As the controllers told of them: (epoch, by whom)."""
        entries = [
            (json.loads(line), name)
            for name in self.names
            for line in self.log_file(name).read_text().splitlines()
            if '"leader.started"' in line
        ]
        return [(parse_epoch(entry["epoch"]), name) for entry, name in entries]

    def leaders(self) -> list[str]:
        """By whom commits were made, in their order: once each leadership, unless two led at a time."""
        return [by for by, _ in groupby(ack.by for ack in sorted(self.acks, key=lambda ack: ack.number))]

    async def listened_to(self) -> None:
        """Until both others listen to the leader, so that either may take its place at once."""
        async with asyncio.timeout(HANG_SECONDS), Client([*self.addresses.values()], timeout_s=HANG_SECONDS) as client:
            while any("does not listen" in problem for problem in (await client.get_status()).problems):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
