"""NodeService: the two streams of each agent.

Nothing here decides: reports go into the leader's session, orders come out of it. A stream that ends, however it ends,
ends its session and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TypeVar

from controld.core.agent import Hello, SessionRefused
from controld.core.ids import Incarnation, NodeUid
from controld.replica.errors import SessionClosedError, SessionRefusedError
from controld.replica.session import NodeSession
from controld.service.backend import Backend, Context
from controld.service.convert import messages as m
from controld.service.convert.agent import hello_from_proto, order_to_proto, report_from_proto
from controld.service.convert.bulk import (
    InventoryAck,
    InventoryReport,
    bulk_from_proto,
    bulk_hello_from_proto,
    bulk_to_proto,
)
from controld.service.convert.common import NODES, node_name
from controld.service.failures import CallError, invalid_field
from controld.service.gate import CALLER, check_node
from controld.service.log_reads import BulkLink, LogRoutes
from virialpb.errors import details_for
from virialpb.reasons import Reason
from virialpb.v1 import node_pb2_grpc

T = TypeVar("T")

CONTROL_BYTES_MAX = 64 * 1024
FIRST_MESSAGE_SECONDS = 10.0
SESSION_WAIT_SECONDS = 5.0


class NodeServicer(node_pb2_grpc.NodeServiceServicer):
    def __init__(self, backend: Backend, routes: LogRoutes) -> None:
        self._leader = backend.leader
        self._routes = routes
        self._sessions: dict[NodeUid, NodeSession] = {}
        self._opened = asyncio.Event()

    async def Control(  # noqa: N802
        self, request_iterator: AsyncIterator[m.ControlUp], context: Context
    ) -> AsyncIterator[m.ControlDown]:
        first = await _first(request_iterator)
        _check_size(first)
        if first.WhichOneof("message") != "hello":
            raise invalid_field("hello", "must be the first message of a control stream")
        try:
            session = await self._leader.open_session(_certified(hello_from_proto(first.hello)))
        except SessionRefusedError as error:
            yield order_to_proto(SessionRefused(error.reason, error.message), self._leader.epoch)
            return
        epoch = self._leader.epoch  # of the leadership that this session is one of, whatever comes after it
        self._sessions[session.uid] = session
        self._opened.set()
        self._opened = asyncio.Event()
        reader = asyncio.create_task(_read_control(request_iterator, session), name=f"control {session.uid}")
        try:
            while True:
                yield order_to_proto(await session.next_order(), epoch)
        except SessionClosedError as error:
            if reader.done() and not reader.cancelled() and reader.exception() is None:
                return  # the agent closed the stream itself
            if reader.done():
                await reader  # a malformed message ended it: say so
            yield order_to_proto(SessionRefused(error.reason, error.message, error.leader), epoch)
        finally:
            await _end(reader)
            session.close()
            if self._sessions.get(session.uid) is session:
                del self._sessions[session.uid]

    async def Bulk(  # noqa: N802
        self, request_iterator: AsyncIterator[m.BulkUp], context: Context
    ) -> AsyncIterator[m.BulkDown]:
        incarnation = bulk_hello_from_proto(await _first(request_iterator))
        session = await self._session(incarnation)
        name = node_name(session.uid, self._leader.state)
        check_node(CALLER.get(), name.removeprefix(NODES))
        link = self._routes.attach(session.uid, name)
        reader = asyncio.create_task(_read_bulk(request_iterator, session, link), name=f"bulk {session.uid}")
        try:
            while (order := await link.next_order()) is not None:
                yield bulk_to_proto(order, self._leader.epoch)
            if reader.done():
                await reader
        finally:
            await _end(reader)
            self._routes.detach(session.uid, link)

    async def _session(self, incarnation: Incarnation) -> NodeSession:
        """The control session this bulk stream belongs to; the two may arrive in any order. Raises CallError."""
        try:
            async with asyncio.timeout(SESSION_WAIT_SECONDS):
                while True:
                    session = self._sessions.get(incarnation.node_uid)
                    if session is not None and session.incarnation == incarnation:
                        return session
                    await self._opened.wait()
        except TimeoutError:
            details = details_for(
                Reason.STALE,
                subject=f"the session of node {incarnation.node_uid}",
                detail="no control stream of this incarnation is open",
                todo="open the control stream first",
            )
            raise CallError(details) from None


def _certified(hello: Hello) -> Hello:
    """Raises CallError where a certificate names another node than the hello does."""
    caller = CALLER.get()
    if caller.identity is None:
        return hello
    check_node(caller, hello.name)
    return replace(hello, certified=True)


async def _read_control(messages: AsyncIterator[m.ControlUp], session: NodeSession) -> None:
    try:
        async for message in messages:
            _check_size(message)
            report = report_from_proto(message)
            if report is not None:
                session.receive(report)
    finally:
        session.close()


async def _read_bulk(messages: AsyncIterator[m.BulkUp], session: NodeSession, link: BulkLink) -> None:
    try:
        async for message in messages:
            match bulk_from_proto(message):
                case InventoryReport(seq, inventory):
                    await session.report_inventory(inventory)
                    link.put(InventoryAck(seq))
                case None:
                    pass
                case chunk:
                    link.received(chunk)
    finally:
        link.close()


async def _first(messages: AsyncIterator[T]) -> T:
    try:
        async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
            return await anext(messages)
    except (TimeoutError, StopAsyncIteration):
        raise invalid_field("hello", f"did not come within {FIRST_MESSAGE_SECONDS:g} s; it opens a stream") from None


async def _end(reader: asyncio.Task[None]) -> None:
    """Wait for it too: nothing may reach a session after its stream is over."""
    reader.cancel()
    await asyncio.wait([reader])
    if not reader.cancelled():
        reader.exception()  # told already, or of no interest any more


def _check_size(message: m.ControlUp) -> None:
    size_bytes = message.ByteSize()
    if size_bytes > CONTROL_BYTES_MAX:
        raise invalid_field(
            "message",
            f"has {size_bytes} bytes, the most on a control stream is {CONTROL_BYTES_MAX}; use the bulk stream",
        )
