"""Where a watch goes on after its stream broke: at what was delivered, whatever the headers say."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import cast

import grpc
import pytest

from controld.store.etcd_keys import Keys, history_text
from controld.store.etcd_session import EtcdTimes, Session
from controld.store.etcd_watch import follow
from controld.store.etcd_wire import Method, Req, Res, WireError
from controld.store.port import CompactedError, OutcomeUnknownError, StoreClosedError
from virialpb.etcd.v1 import etcd_pb2 as pb

KEYS = Keys("t")
QUICK = EtcdTimes(follow=0.05, pause=0.001, pause_max=0.002)
BROKEN = WireError(grpc.StatusCode.UNAVAILABLE, "broken")


@dataclass
class ScriptedWire:
    """Streams that give what they are told and then break; `started` says where each was to begin."""

    streams: deque[list[pb.WatchResponse]]
    history_modified: int = 2
    started: list[int] = field(default_factory=list[int])
    down: bool = False

    async def call(self, method: Method[Req, Res], request: Req, timeout_seconds: float) -> Res:
        del method, request, timeout_seconds
        if self.down:
            raise BROKEN
        kv = pb.KeyValue(key=KEYS.history, value=history_text(1), mod_revision=self.history_modified)
        found = pb.RangeResponse(kvs=[kv])
        answers = [pb.ResponseOp(response_range=found), pb.ResponseOp(), pb.ResponseOp()]
        return cast("Res", pb.TxnResponse(header=pb.ResponseHeader(revision=999), succeeded=True, responses=answers))

    async def watch(self, create: pb.WatchCreateRequest, *, needs_leader: bool = True) -> ScriptedStream:
        assert needs_leader
        assert not create.fragment
        self.started.append(create.start_revision)
        return ScriptedStream(deque(self.streams.popleft() if self.streams else []))

    async def keep_alive(self, lease: int, timeout_seconds: float) -> int:
        raise NotImplementedError

    async def close(self) -> None:
        return


@dataclass
class ScriptedStream:
    responses: deque[pb.WatchResponse]

    async def read(self) -> pb.WatchResponse:
        await asyncio.sleep(0)
        if not self.responses:
            raise BROKEN
        return self.responses.popleft()

    def cancel(self) -> None:
        self.responses.clear()


def said(*revisions: int, header: int = 999) -> pb.WatchResponse:
    events = [pb.Event(kv=pb.KeyValue(key=KEYS.record("x"), mod_revision=revision)) for revision in revisions]
    return pb.WatchResponse(header=pb.ResponseHeader(revision=header), events=events)


async def test_it_goes_on_at_the_last_revision_that_was_delivered() -> None:
    # The second stream breaks after an answer without events, whose header is far ahead: it moves nothing.
    wire = ScriptedWire(deque([[said(11, 12)], [said(12, 13), said()], [], [said(13, 14)]]))
    watch = follow(Session(wire, KEYS, QUICK), 10)
    assert [(await anext(watch)).revision for _ in range(4)] == [11, 12, 13, 14]
    assert wire.started == [10, 12, 13, 13]
    await watch.aclose()


async def test_without_a_stream_for_too_long_it_says_so() -> None:
    wire = ScriptedWire(deque([[said(11)]]))
    watch = follow(Session(wire, KEYS, QUICK), 10)
    assert (await anext(watch)).revision == 11
    wire.down = True
    with pytest.raises(OutcomeUnknownError, match="the watch of etcd broke"):
        await anext(watch)


async def test_a_restore_meanwhile_is_not_passed_over() -> None:
    wire = ScriptedWire(deque([[said(11)], [said(12)]]))
    watch = follow(Session(wire, KEYS, QUICK), 10)
    await anext(watch)
    wire.history_modified = 12
    with pytest.raises(CompactedError):
        await anext(watch)


async def test_the_end_of_the_store_ends_it() -> None:
    session = Session(ScriptedWire(deque()), KEYS, EtcdTimes(pause=60.0, pause_max=60.0))
    waiting = asyncio.ensure_future(anext(follow(session, 10)))
    await asyncio.sleep(0)
    await session.close()
    with pytest.raises(StoreClosedError):
        await waiting
