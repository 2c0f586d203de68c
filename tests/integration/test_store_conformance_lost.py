"""What every store that can be out of reach keeps (the majority is gone, or its answers are): nothing is acknowledged
that is not there, and what is given again afterwards is applied once.

SQLite has no majority to lose; its outcomes in doubt are those of the disk (test_store_disk.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
import pytest

from controld.store.etcd_session import EtcdTimes
from controld.store.etcd_wire import STATUS, Method, Req, Res, WatchStream, Wire, WireError
from controld.store.faults import Fault, FaultKind, Operation
from controld.store.memory import MemoryStore
from controld.store.port import OutcomeUnknownError, SharedStore
from tests import support_etcd
from tests.support_store import contents, put
from virialpb.etcd.v1 import etcd_pb2 as pb

QUICK = EtcdTimes(attempt=0.05, commit=0.3, campaign=0.3, barrier=0.3, read=0.3)


@dataclass
class Outage:
    """`requests`: nothing arrives, as without a majority. `answers`: all takes effect, and nobody hears of it."""

    requests: bool = False
    answers: bool = False

    def next(self, operation: Operation) -> Fault:
        del operation
        if self.requests:
            return Fault(FaultKind.LOST_BEFORE)
        return Fault(FaultKind.LOST_AFTER if self.answers else FaultKind.NONE)


@dataclass
class Cut:
    """A wire to a member that has lost its majority, or whose answers do not come."""

    wire: Wire
    outage: Outage

    async def call(self, method: Method[Req, Res], request: Req, timeout_seconds: float) -> Res:
        if self.outage.requests and method is not STATUS:
            raise WireError(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
        response = await self.wire.call(method, request, timeout_seconds)
        if self.outage.answers:
            raise WireError(grpc.StatusCode.DEADLINE_EXCEEDED, "etcdserver: request timed out")
        return response

    async def watch(self, create: pb.WatchCreateRequest, *, needs_leader: bool = True) -> WatchStream:
        return await self.wire.watch(create, needs_leader=needs_leader)

    async def keep_alive(self, lease: int, timeout_seconds: float) -> int:
        return await self.wire.keep_alive(lease, timeout_seconds)

    async def close(self) -> None:
        await self.wire.close()


def memory(outage: Outage) -> SharedStore:
    return MemoryStore(faults=outage)


def etcd(outage: Outage) -> SharedStore:
    support_etcd.require_etcd()

    def cut(wire: Wire) -> Wire:
        return Cut(wire, outage)

    return support_etcd.shared().store(prefix=support_etcd.fresh_prefix(), times=QUICK, wrap=cut)


@pytest.fixture
def outage() -> Outage:
    return Outage()


@pytest.fixture(params=[memory, etcd], ids=["memory", "etcd"])
async def store(request: pytest.FixtureRequest, outage: Outage) -> AsyncIterator[SharedStore]:
    make: Callable[[Outage], SharedStore] = request.param
    made = make(outage)
    await made.open()
    yield made
    await made.close()


async def test_out_of_reach_nothing_is_acknowledged_proved_or_read(store: SharedStore, outage: Outage) -> None:
    leader = await store.take_over("a", "h:1", 0)
    first = await store.commit(leader, 1, [put("x", b"1")])
    outage.requests = True
    for attempt in (
        lambda: store.commit(leader, 2, [put("x", b"2")]),
        lambda: store.barrier(leader),
        lambda: store.take_over("b", "h:2", leader.token),
        store.load,
    ):
        with pytest.raises(OutcomeUnknownError):
            await attempt()
    outage.requests = False
    assert await contents(store) == {"x": b"1"}
    await store.barrier(leader)
    assert await store.commit(leader, 2, [put("x", b"2")]) > first


async def test_what_took_effect_unheard_is_applied_once_when_it_is_given_again(
    store: SharedStore, outage: Outage
) -> None:
    leader = await store.take_over("a", "h:1", 0)
    await store.commit(leader, 1, [put("x", b"1")])
    outage.answers = True
    with pytest.raises(OutcomeUnknownError):
        await store.commit(leader, 2, [put("x", b"2")])
    outage.answers = False
    assert await contents(store) == {"x": b"2"}
    revision = (await store.load()).revision
    assert await store.commit(leader, 2, [put("x", b"2")]) == revision
    assert (await store.load()).revision == revision
