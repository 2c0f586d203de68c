"""A wire that loses what it is told to, around the real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import cast

import grpc

from controld.store.etcd import EtcdStore
from controld.store.etcd_session import EtcdTimes
from controld.store.etcd_wire import TXN, Method, Req, Res, WatchStream, Wire, WireError
from tests import support_etcd
from virialpb.etcd.v1 import etcd_pb2 as pb


class Loss(Enum):
    REQUEST = auto()
    ANSWER = auto()
    LATE = auto()
    """The answer is "no answer", and the request arrives afterwards."""


@dataclass
class LossyWire:
    """`losses`: what happens to the next transactions that write; None: nothing. `hook` runs once, after a write."""

    wire: Wire
    losses: list[Loss | None] = field(default_factory=list[Loss | None])
    hook: Callable[[], Awaitable[object]] | None = None
    late_s: float = 0.1
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    late: list[asyncio.Task[pb.TxnResponse]] = field(default_factory=list[asyncio.Task[pb.TxnResponse]])

    async def call(self, method: Method[Req, Res], request: Req, timeout_seconds: float) -> Res:
        writes = isinstance(request, pb.TxnRequest) and any(not op.HasField("request_range") for op in request.success)
        loss = self.losses.pop(0) if writes and self.losses else None
        if loss is not None:
            self.lost.set()
        if loss is Loss.REQUEST:
            raise WireError(grpc.StatusCode.UNAVAILABLE, "lost")
        if loss is Loss.LATE:
            self.late.append(asyncio.ensure_future(self._later(cast("pb.TxnRequest", request))))
            raise WireError(grpc.StatusCode.DEADLINE_EXCEEDED, "lost")
        answer = await self.wire.call(method, request, timeout_seconds)
        if writes and self.hook is not None:
            hook, self.hook = self.hook, None
            await hook()
        if loss is Loss.ANSWER:
            raise WireError(grpc.StatusCode.DEADLINE_EXCEEDED, "lost")
        return answer

    async def _later(self, request: pb.TxnRequest) -> pb.TxnResponse:
        await asyncio.sleep(self.late_s)
        return await self.wire.call(TXN, request, 10.0)

    async def watch(self, create: pb.WatchCreateRequest, *, needs_leader: bool = True) -> WatchStream:
        return await self.wire.watch(create, needs_leader=needs_leader)

    async def keep_alive(self, lease: int, timeout_seconds: float) -> int:
        return await self.wire.keep_alive(lease, timeout_seconds)

    async def close(self) -> None:
        await self.wire.close()


@dataclass
class Lossy:
    """A store on such wires, one each time it is opened, and another controller's on an ordinary one."""

    store: EtcdStore
    wires: list[LossyWire]
    other: EtcdStore

    @property
    def wire(self) -> LossyWire:
        return self.wires[-1]

    def lose(self, *losses: Loss | None) -> None:
        self.wire.losses.extend(losses)


@asynccontextmanager
async def lossy_stores(times: EtcdTimes) -> AsyncGenerator[Lossy]:
    support_etcd.require_etcd()
    prefix = support_etcd.fresh_prefix()
    wires: list[LossyWire] = []

    def wrap(wire: Wire) -> Wire:
        wires.append(LossyWire(wire))
        return wires[-1]

    process = support_etcd.shared().processes[0]
    store = support_etcd.make_store(process, prefix=prefix, times=times, wrap=wrap)
    other = support_etcd.make_store(process, prefix=prefix)
    for each in (store, other):
        await each.open()
    yield Lossy(store, wires, other)
    for each in (store, other):
        await each.close()
