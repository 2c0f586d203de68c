"""The same through a gRPC client: a controld process, and jobs that this one submits to it and cancels in turn."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import grpc.aio

from benchmarks.backends import Backend
from benchmarks.clients import Figures, drive
from virialpb.v1 import common_pb2, job_pb2, job_pb2_grpc

START_SECONDS = 60.0
CALL_SECONDS = 60.0
CHANNELS = 4


async def rpc_figures(made: Backend, *, inflight: int, seconds: float) -> Figures:
    directory = made.folder / "controld"
    command = [
        *(sys.executable, "-m", "controld", "--data-dir", str(directory), "--log-level", "warning"),
        *("--listen", "127.0.0.1:0", "--metrics-listen", "off", *made.arguments),
    ]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        address = await _address(process, directory / "ports.json")
        return await _submit(address, inflight=inflight, seconds=seconds)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _address(process: asyncio.subprocess.Process, ports: Path) -> str:
    async with asyncio.timeout(START_SECONDS):
        while (address := _read(ports)) is None:
            if process.returncode is not None:
                sys.exit("benchmarks.commit: controld did not start (see above)")
            await asyncio.sleep(0.05)
    return address


def _read(ports: Path) -> str | None:
    return json.loads(ports.read_text())["grpc_address"] if ports.exists() else None


async def _submit(address: str, *, inflight: int, seconds: float) -> Figures:
    spec = job_pb2.JobSpec(
        name="benchmark",
        gang=job_pb2.GangSpec(ranks=1),
        resources=common_pb2.Resources(cpu_millis=1_000, memory_bytes=1 << 30),
        task=job_pb2.TaskSpec(command=["true"]),
    )
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(CHANNELS)]
    stubs = [job_pb2_grpc.JobServiceStub(channel) for channel in channels]

    submitted: dict[int, str] = {}

    async def call(client: int, turn: int) -> None:
        stub, request_id = stubs[client % CHANNELS], f"{client}.{turn}"
        if (name := submitted.pop(client, None)) is None:
            request = job_pb2.SubmitJobRequest(request_id=request_id, spec=spec)
            submitted[client] = (await stub.SubmitJob(request, timeout=CALL_SECONDS)).name
        else:  # else every tick would look at all that wait: this is about commits
            await stub.CancelJob(job_pb2.CancelJobRequest(request_id=request_id, name=name), timeout=CALL_SECONDS)

    try:
        return await drive(call, inflight=inflight, seconds=seconds)
    finally:
        for channel in channels:
            await channel.close()
