"""gRPC's two ends on a simulated connection: what the agent's link and the controller's servicer hold in hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

import grpc
from grpc import aio

from controld.replica.errors import OverloadedError, RefusedError, SessionClosedError
from controld.service.convert.messages import BulkUp, ControlUp
from controld.service.failures import CallError, details_of
from controld.service.node import NodeServicer
from controld.store.port import StoreError
from noded.link import stream as link_stream
from noded.link.convert import BulkDown, ControlDown
from tests.sim.loop import PROCESS, Process
from tests.sim.network import Connection, DialFailed, End, Network, Way
from virialpb.errors import trailing_metadata


class ClientCall:
    """As much of `aio.StreamStreamCall` as `noded.link.stream.Stream` uses."""

    def __init__(self, connection: Connection, parse: Callable[[bytes], object]) -> None:
        self._connection = connection
        self._parse = parse
        self._done = False

    async def write(self, message: Any) -> None:
        if self._done:
            raise asyncio.InvalidStateError("the call is over")
        self._connection.up.send(message.SerializeToString())
        await self._connection.up.room.wait()

    async def read(self) -> object:
        item = await self._connection.down.take()
        if isinstance(item, bytes):
            return self._parse(item)
        self._done = True
        self._connection.open = False
        if item.why is not None:
            trailing = aio.Metadata(*trailing_metadata(item.why))
            raise aio.AioRpcError(item.why.code, aio.Metadata(), trailing, details=item.why.message)
        if item.reset:
            none = aio.Metadata()
            raise aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details="the connection broke")
        return aio.EOF

    def cancel(self) -> bool:
        if not self._done:
            self._done = True
            self._connection.open = False
            self._connection.hang_up(Way.UP, reset=True)
        return True

    def done(self) -> bool:
        return self._done


class ClientChannel:
    async def close(self) -> None:
        return


class _Methods:
    """Stands in for a stub: tells which method was asked for."""

    @staticmethod
    def Control() -> str:  # noqa: N802
        return "Control"

    @staticmethod
    def Bulk() -> str:  # noqa: N802
        return "Bulk"


_PARSE: dict[str, Callable[[bytes], object]] = {"Control": ControlDown.FromString, "Bulk": BulkDown.FromString}


class SimDialer(link_stream.Dialer):
    """Dials on the network of the host that it is used on."""

    async def open(self, address: str, method: Any) -> link_stream.Stream[Any, Any]:
        """Raises DialFailed, as the real one does."""
        process = PROCESS.get()
        name = method(_Methods)()
        network = cast("Network", process.host.network)
        try:
            connection = await network.dial(process, process.host.name, address, name)
        except DialFailed as failure:
            raise link_stream.DialFailed(str(failure)) from None
        call = ClientCall(connection, _PARSE[name])
        stream = link_stream.Stream[Any, Any](address, cast("Any", ClientChannel()), cast("Any", call))
        stream.start()
        return stream


class ServerEnd:
    """Runs the real servicer for each connection that comes in."""

    def __init__(self, process: Process, servicer: NodeServicer) -> None:
        self._process = process
        self._servicer = servicer

    def accept(self, connection: Connection) -> None:
        serving = self._process.spawn(self._serve(connection), f"{connection.method} {connection.host}")
        self._process.spawn(self._watch(connection, serving), f"watch {connection.host}")

    async def _serve(self, connection: Connection) -> None:
        reset, why = False, None
        requests = self._requests(connection)
        handler: Any = self._servicer.Control if connection.method == "Control" else self._servicer.Bulk
        try:
            async with aclosing(cast("AsyncGenerator[Any]", handler(requests, None))) as messages:
                async for message in messages:
                    connection.down.send(message.SerializeToString())
                    await connection.down.room.wait()
        except (CallError, StoreError, OverloadedError, RefusedError, SessionClosedError) as error:
            reset, why = True, details_of(error)  # the interceptor makes a status of it
        finally:
            connection.hang_up(Way.DOWN, reset=reset, why=why)

    async def _requests(self, connection: Connection) -> AsyncIterator[object]:
        parse = ControlUp.FromString if connection.method == "Control" else BulkUp.FromString
        while not isinstance(item := await connection.up.take(), End):
            yield parse(item)

    @staticmethod
    async def _watch(connection: Connection, serving: asyncio.Task[None]) -> None:
        """A client that is gone cancels its call, as gRPC does, even while nothing is being read."""
        while not connection.up.ended_for_reader():
            connection.up.arrived.clear()
            await connection.up.arrived.wait()
        serving.cancel()
