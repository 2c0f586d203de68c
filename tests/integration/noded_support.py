"""A controller that does what a test tells it to, and a noded process to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc import aio

from virialpb.v1 import common_pb2, job_pb2, node_pb2, node_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 30.0
EPOCH = common_pb2.Epoch(history=1, revision=10)


@dataclass
class Session:
    """One control stream, as the fake controller sees it."""

    hello: node_pb2.Hello
    orders: asyncio.Queue[node_pb2.ControlDown | None] = field(
        default_factory=asyncio.Queue["node_pb2.ControlDown | None"]
    )
    beats: list[node_pb2.Beat] = field(default_factory=list[node_pb2.Beat])
    calls: list[node_pb2.TaskCall] = field(default_factory=list[node_pb2.TaskCall])
    drops: list[node_pb2.DropDone] = field(default_factory=list[node_pb2.DropDone])
    ended: bool = False


class FakeController(node_pb2_grpc.NodeServiceServicer):
    """Acknowledges every beat while `acks` is set; everything else is up to the test."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.inventories: list[node_pb2.InventoryReport] = []
        self.chunks: list[node_pb2.LogChunk] = []
        self.bulk: asyncio.Queue[node_pb2.BulkDown] = asyncio.Queue()
        self.acks = True
        self.refuse: node_pb2.SessionRefused | None = None
        self.epoch = EPOCH
        self.cluster_uid = "cluster-1"
        self._changed = asyncio.Event()
        self._server: aio.Server | None = None
        self.address = ""

    async def start(
        self, address: str = "127.0.0.1:0", *, tls: tuple[Path, Path] | None = None, ca: Path | None = None
    ) -> None:
        """`tls`: (key, certificate); callers must then show a certificate that this one, or `ca`, signed."""
        self._server = aio.server(options=[("grpc.so_reuseport", 0)])
        node_pb2_grpc.add_NodeServiceServicer_to_server(self, self._server)
        if tls is None:
            port = self._server.add_insecure_port(address)
        else:
            credentials = credentials_of(*tls, ca)
            port = self._server.add_secure_port(address, credentials)
        assert port
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    @property
    def session(self) -> Session:
        return self.sessions[-1]

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """A hang guard, never a measure."""
        try:
            async with asyncio.timeout(HANG_SECONDS):
                while not condition():
                    self._changed.clear()
                    await asyncio.wait([asyncio.ensure_future(self._changed.wait())], timeout=0.1)
        except TimeoutError:
            last = self.session.beats[-1] if self.sessions and self.session.beats else "no beat"
            raise AssertionError(f"never happened: {what}; the last beat was {last}") from None

    def slot(self, slot: str) -> node_pb2.SlotStatus | None:
        """As the newest beat shows it."""
        session = self.session
        slots = session.beats[-1].slots if session.beats else session.hello.beat.slots
        return next((status for status in slots if status.slot == slot), None)

    async def until_state(self, slot: str, state: str) -> node_pb2.SlotStatus:
        wanted = node_pb2.SlotStatus.State.Value(state)

        def there() -> bool:
            status = self.slot(slot) if self.sessions else None
            return status is not None and status.state == wanted

        await self.until(there, f"{slot} {state}")
        status = self.slot(slot)
        assert status is not None
        return status

    def order(self, **message: object) -> None:
        self.session.orders.put_nowait(node_pb2.ControlDown(leader_epoch=self.epoch, **message))  # type: ignore[arg-type]

    async def Control(  # noqa: N802
        self, request_iterator: AsyncIterator[node_pb2.ControlUp], context: object
    ) -> AsyncIterator[node_pb2.ControlDown]:
        first = await anext(request_iterator)
        if self.refuse is not None:
            yield node_pb2.ControlDown(leader_epoch=self.epoch, session_refused=self.refuse)
            return
        session = Session(first.hello)
        self.sessions.append(session)
        self._changed.set()
        welcome = node_pb2.Welcome(renew_interval_ms=200, cluster_uid=self.cluster_uid)
        yield node_pb2.ControlDown(leader_epoch=self.epoch, welcome=welcome)
        if self.acks:
            ack = node_pb2.BeatAck(seq=first.hello.beat.seq)
            yield node_pb2.ControlDown(leader_epoch=self.epoch, beat_ack=ack)
        reader = asyncio.create_task(self._read(request_iterator, session))
        try:
            while (order := await session.orders.get()) is not None:
                yield order
        finally:
            reader.cancel()
            session.ended = True

    async def _read(self, messages: AsyncIterator[node_pb2.ControlUp], session: Session) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "beat":
                    session.beats.append(message.beat)
                    if self.acks:
                        ack = node_pb2.BeatAck(seq=message.beat.seq)
                        session.orders.put_nowait(node_pb2.ControlDown(leader_epoch=self.epoch, beat_ack=ack))
                case "task_call":
                    session.calls.append(message.task_call)
                case "drop_done":
                    session.drops.append(message.drop_done)
                case other:
                    raise AssertionError(f"unexpected {other}")
            self._changed.set()
        session.orders.put_nowait(None)

    async def Bulk(  # noqa: N802
        self, request_iterator: AsyncIterator[node_pb2.BulkUp], context: object
    ) -> AsyncIterator[node_pb2.BulkDown]:
        async def read() -> None:
            async for message in request_iterator:
                match message.WhichOneof("message"):
                    case "inventory":
                        self.inventories.append(message.inventory)
                        ack = node_pb2.InventoryAck(seq=message.inventory.seq)
                        self.bulk.put_nowait(node_pb2.BulkDown(leader_epoch=self.epoch, inventory_ack=ack))
                    case "log_chunk":
                        self.chunks.append(message.log_chunk)
                    case _:
                        pass
                self._changed.set()

        reader = asyncio.create_task(read())
        try:
            while True:
                yield await self.bulk.get()
        finally:
            reader.cancel()


def credentials_of(key: Path, certificate: Path, ca: Path | None) -> grpc.ServerCredentials:
    pair = key.read_bytes(), certificate.read_bytes()
    trusted = pair[1] if ca is None else ca.read_bytes()
    return grpc.ssl_server_credentials([pair], trusted, require_client_auth=True)


@contextlib.asynccontextmanager
async def controller() -> AsyncGenerator[FakeController]:
    fake = FakeController()
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()


def noded_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "client", "protos"))}


class Noded:
    """A noded process over a data directory of its own."""

    def __init__(self, data_dir: Path, addresses: list[str], *flags: str) -> None:
        self.data_dir = data_dir
        self._argv = [
            sys.executable, "-m", "noded",
            "--data-dir", str(data_dir), "--name", "n1", "--controllers", ",".join(addresses),
            "--advertise-address", "127.0.0.1", "--cpu", "1", "--memory", "64MiB",
            "--allow-root-tasks", "true", "--log-format", "json", *flags,
        ]  # fmt: skip
        self._process: asyncio.subprocess.Process | None = None
        self.log = data_dir.with_name(f"{data_dir.name}.log")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv, stderr=log, stdout=log, env=noded_env(), cwd="/"
            )

    async def stop(self, signum: int = signal.SIGTERM) -> int:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(signum)
        async with asyncio.timeout(HANG_SECONDS):
            return await self._process.wait()

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    def guardian_pid(self) -> int:
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line["pid"] for line in lines if line.get("event") == "guardian.connected"][-1]


@contextlib.asynccontextmanager
async def noded(data_dir: Path, addresses: list[str], *flags: str) -> AsyncGenerator[Noded]:
    """Started, and at the end stopped together with its guardian and tasks."""
    agent = Noded(data_dir, addresses, "--kill-tasks-on-exit", *flags)
    await agent.start()
    try:
        yield agent
    finally:
        if await agent.stop() < 0:  # it was killed by the test: a new one takes its guardian down
            await agent.start()
            await asyncio.sleep(1)
            await agent.stop()


def token(job: str = "j", generation: int = 1, revision: int = 20, history: int = 1) -> common_pb2.Token:
    return common_pb2.Token(job=job, generation=generation, epoch=common_pb2.Epoch(history=history, revision=revision))


def prepare(
    command: list[str], *, slot: str = "j.1.0", rank: int = 0, owner: common_pb2.Token | None = None, **fields: object
) -> node_pb2.Prepare:
    return node_pb2.Prepare(
        slot=slot,
        token=owner or token(),
        rank=rank,
        world_size=1,
        task=job_pb2.TaskSpec(command=command, env={"PATH": os.environ["PATH"]}, grace_ms=1000),
        fence_after_ms=30_000,
        **fields,  # type: ignore[arg-type]
    )


def go(slot: str = "j.1.0", owner: common_pb2.Token | None = None) -> node_pb2.Go:
    return node_pb2.Go(slot=slot, token=owner or token(), world_size=1, master_address="127.0.0.1", master_port=29500)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


__all__ = ["FakeController", "Noded", "alive", "controller", "go", "noded", "noded_env", "prepare", "token"]
