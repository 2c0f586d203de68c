"""A controller with real gRPC on a free port of this machine, and agents and callers played by hand."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from controld.app import App
from controld.config import Config, LeaseConfig, StoreConfig, StoreKind
from controld.matching.engine import plan
from controld.ports import Ports
from controld.replica.planner import InlinePlanner
from controld.service.telemetry import make_log
from virialpb.errors import ErrorDetails, details_from
from virialpb.v1 import cluster_pb2_grpc, common_pb2, job_pb2, job_pb2_grpc, node_pb2, node_pb2_grpc, rdl_pb2

GIB = 1 << 30
T = TypeVar("T")
HANG_SECONDS = 20.0


@dataclass
class Served:
    """A running controller and one channel to it."""

    app: App
    ports: Ports
    channel: grpc.aio.Channel
    jobs: job_pb2_grpc.JobServiceAsyncStub
    cluster: cluster_pb2_grpc.ClusterServiceAsyncStub
    log: io.StringIO


@asynccontextmanager
async def serve(directory: Path, config: Config | None = None) -> AsyncGenerator[Served]:
    log = io.StringIO()
    app = App(config or quick_config(directory), log=make_log(log, level="debug"), planner=InlinePlanner(plan))
    ports = await app.start()
    try:
        async with grpc.aio.insecure_channel(ports.grpc_address) as channel:
            jobs: job_pb2_grpc.JobServiceAsyncStub = job_pb2_grpc.JobServiceStub(channel)
            cluster: cluster_pb2_grpc.ClusterServiceAsyncStub = cluster_pb2_grpc.ClusterServiceStub(channel)
            yield Served(app, ports, channel, jobs, cluster, log)
    finally:
        await app.stop()


def quick_config(directory: Path) -> Config:
    """Everything on free ports, nothing on disk, beats five times a second."""
    return Config(
        data_dir=str(directory),
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
        identity="controld-test",
        store=StoreConfig(kind=StoreKind.MEMORY),
        lease=LeaseConfig(renew_interval_ns=200_000_000),
    )


def job_spec(ranks: int = 1, name: str = "train", cpu_millis: int = 500) -> job_pb2.JobSpec:
    return job_pb2.JobSpec(
        name=name,
        gang=job_pb2.GangSpec(ranks=ranks),
        resources=common_pb2.Resources(cpu_millis=cpu_millis, memory_bytes=GIB),
        task=job_pb2.TaskSpec(command=["sleep", "1"]),
    )


async def failure(call: grpc.aio.UnaryUnaryCall[Any, Any] | grpc.aio.UnaryStreamCall[Any, Any]) -> ErrorDetails:
    """What a call that must fail says: a unary one, or a stream that is read to its end."""
    try:
        async with asyncio.timeout(HANG_SECONDS):
            if isinstance(call, grpc.aio.UnaryStreamCall):
                async for _ in call:
                    pass
            else:
                await call
    except grpc.aio.AioRpcError as error:
        return details_from(error)
    raise AssertionError("the call did not fail")


class FakeAgent:
    """One node: says hello and what it has, beats, and writes down what it is told."""

    def __init__(
        self,
        served: Served,
        name: str,
        *,
        uid: str = "",
        nonce: str = "g1",
        boot_id: str = "boot-1",
        cpu_millis: int = 4_000,
    ) -> None:
        self._stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(served.channel)
        self.name = name
        self.incarnation = common_pb2.Incarnation(node_uid=uid or f"uid-{name}", boot_id=boot_id, guardian_nonce=nonce)
        self._cpu_millis = cpu_millis
        self.slots: dict[str, node_pb2.SlotStatus] = {}
        self.told: list[node_pb2.ControlDown] = []
        self.bulk_told: list[node_pb2.BulkDown] = []
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._up: asyncio.Queue[node_pb2.ControlUp] = asyncio.Queue()
        self._bulk_up: asyncio.Queue[node_pb2.BulkUp] = asyncio.Queue()
        self.control = self._stub.Control(_drain(self._up))
        self._seq = 0

    def hello(self) -> node_pb2.ControlUp:
        return node_pb2.ControlUp(
            hello=node_pb2.Hello(
                incarnation=self.incarnation,
                name=self.name,
                advertise_address="127.0.0.1",
                fencing="pidns",
                cpu_millis=self._cpu_millis,
                memory_bytes=8 * GIB,
                beat=node_pb2.Beat(seq=0, guardian_ok=True),
                version="test",
            )
        )

    async def join(self, *, bulk: bool = True) -> FakeAgent:
        """Return once the controller has welcomed it and, with `bulk`, taken its inventory."""
        self._up.put_nowait(self.hello())
        self._tasks.append(asyncio.create_task(self._read_control()))
        await self.until(lambda: any(m.WhichOneof("message") == "welcome" for m in self.told))
        if bulk:
            self._bulk_up.put_nowait(node_pb2.BulkUp(hello=node_pb2.BulkHello(incarnation=self.incarnation)))
            self.report_inventory(1)
            self._tasks.append(asyncio.create_task(self._read_bulk()))
            await self.until(lambda: any(m.WhichOneof("message") == "inventory_ack" for m in self.bulk_told))
        self._tasks.append(asyncio.create_task(self._beat()))
        return self

    def report_inventory(self, seq: int) -> None:
        inventory = rdl_pb2.Inventory(devices=[rdl_pb2.Device(key="gpu-1", kind="accelerator")])
        self._bulk_up.put_nowait(node_pb2.BulkUp(inventory=node_pb2.InventoryReport(seq=seq, inventory=inventory)))

    def send(self, message: node_pb2.ControlUp) -> None:
        self._up.put_nowait(message)

    def send_bulk(self, message: node_pb2.BulkUp) -> None:
        self._bulk_up.put_nowait(message)

    def beat(self) -> None:
        self._seq += 1
        beat = node_pb2.Beat(seq=self._seq, slots=list(self.slots.values()), guardian_ok=True)
        self._up.put_nowait(node_pb2.ControlUp(beat=beat))

    def orders(self, kind: str) -> list[node_pb2.ControlDown]:
        return [message for message in self.told if message.WhichOneof("message") == kind]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.control.cancel()

    async def _read_control(self) -> None:
        with suppress(grpc.aio.AioRpcError):
            async for message in self.control:
                self._obey(message)
                self.told.append(message)
                self._changed.set()

    def _obey(self, message: node_pb2.ControlDown) -> None:
        """Ready at once, running at GO, gone at once."""
        match message.WhichOneof("message"):
            case "prepare":
                order = message.prepare
                self._put(order.slot, order.token, node_pb2.SlotStatus.READY)
            case "go":
                self._put(message.go.slot, message.go.token, node_pb2.SlotStatus.RUNNING, progress_step=3)
            case "stop":
                exit_ = job_pb2.TaskExit(reason="STOPPED", signal=15)
                self._put(message.stop.slot, message.stop.token, node_pb2.SlotStatus.EXITED, exit_=exit_)
            case "release":
                self.slots.pop(message.release.slot, None)
            case _:
                return
        self.beat()

    def _put(
        self,
        slot: str,
        token: common_pb2.Token,
        state: node_pb2.SlotStatus.State.ValueType,
        *,
        progress_step: int = -1,
        exit_: job_pb2.TaskExit | None = None,
    ) -> None:
        self.slots[slot] = node_pb2.SlotStatus(
            slot=slot, token=token, state=state, port=29_500, progress_step=progress_step, exit=exit_
        )

    def exit(self, slot: str, *, code: int = 0, stderr_tail: str = "") -> None:
        exit_ = job_pb2.TaskExit(reason="EXITED", code=code, stderr_tail=stderr_tail)
        status = self.slots[slot]
        self._put(slot, status.token, node_pb2.SlotStatus.EXITED, progress_step=status.progress_step, exit_=exit_)
        self.beat()

    async def _read_bulk(self) -> None:
        with suppress(grpc.aio.AioRpcError):
            async for message in self._stub.Bulk(_drain(self._bulk_up)):
                self.bulk_told.append(message)
                self._changed.set()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            self.beat()


async def _drain(queue: asyncio.Queue[T]) -> AsyncIterator[T]:
    while True:
        yield await queue.get()
