"""What simulated controllers say to each other: `controld.replica.peers.Peers` over the fabric."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar, cast

from controld.replica.election import Verdict
from controld.replica.errors import NotLeaderError
from controld.replica.peers import HandedOver, HandOver, PeerLostError, Ping
from controld.replica.survey import Told
from tests.sim.fabric import Fabric, Port
from tests.sim.loop import Process

if TYPE_CHECKING:
    from tests.sim.replicas import Parts, SimReplica

T = TypeVar("T")
CONNECT_ROUNDS = 2


class SimPeers:
    """Those of one life of a controller; also its `controld.replica.survey.Colleagues`."""

    def __init__(self, owner: SimReplica, process: Process, others: dict[str, SimReplica], fabric: Fabric) -> None:
        self._owner = owner
        self._process = process
        self._others = others
        self._fabric = fabric

    async def ask(self, address: str, token: int) -> Verdict:
        async def answer(peer: Parts) -> Verdict:
            return peer.replica.judge(token)

        return await self._call(address, answer)

    async def hand_over(self, address: str, request: HandOver) -> HandedOver:
        async def answer(peer: Parts) -> HandedOver:
            return await peer.replica.take(request)

        return await self._call(address, answer)

    async def look(self, address: str) -> Told:
        async def answer(peer: Parts) -> Told:
            return await peer.survey.own()

        return await self._call(address, answer)

    async def defragment(self, address: str) -> int:
        async def answer(peer: Parts) -> int:
            return await peer.store.members.defragment()

        return await self._call(address, answer)

    async def close(self) -> None:
        return

    async def pings(self, address: str) -> AsyncGenerator[Ping]:
        stream = _PingStream(self._owner.name)
        peer = self._others[address]
        self._send(address, lambda: self._begin(peer, stream))
        self._process.on_death.append(lambda: self._send(address, stream.leave))
        try:
            while True:
                said = await stream.take()
                if said is None:
                    raise PeerLostError(f"{address} sends no pings any more")
                self._owner.world.judge.heard(self._owner.name, said)
                yield said
        finally:
            self._send(address, stream.leave)

    def _begin(self, peer: SimReplica, stream: _PingStream) -> None:
        """At the other end."""
        process, parts = peer.process, peer.parts
        if process is None or not process.alive or parts is None:
            self._reply(peer.name, lambda: stream.put(None))
            return
        last_s = 0.0
        loop = process.loop

        def tell(said: Ping | None) -> None:
            # One stream: in order.
            nonlocal last_s
            last_s = max(last_s, loop.time() + self._fabric.delay_s(peer.name, self._owner.name))
            loop.after(last_s - loop.time(), self._pass_on, peer.name, stream, said)

        async def serve() -> None:
            try:
                async with aclosing(parts.replica.pings(self._owner.name)) as pings:
                    async for ping in pings:
                        peer.pinged(ping)
                        tell(ping)
            except NotLeaderError:
                tell(None)

        process.post(0.0, lambda: stream.serve(process.spawn(serve(), "pings")))
        process.on_death.append(lambda: tell(None))

    def _pass_on(self, source: str, stream: _PingStream, said: Ping | None) -> None:
        if self._fabric.is_cut((source, self._owner.name, Port.PEERS)):
            stream.held.append(said)
            self._fabric.send((source, self._owner.name, Port.PEERS), lambda: self._flush(stream))
        elif stream.held:
            stream.held.append(said)
        else:
            self._process.post(0.0, stream.put, said)

    def _flush(self, stream: _PingStream) -> None:
        while stream.held:
            self._process.post(0.0, stream.put, stream.held.popleft())

    async def _call(self, address: str, work: Callable[[Parts], Coroutine[Any, Any, T]]) -> T:
        """A call that goes into a cut is lost or late; a peer that is not there refuses."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        peer = self._others[address]

        def settle(result: object) -> None:
            if answer.done():
                return
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(cast("T", result))

        def reply(result: object) -> None:
            self._reply(peer.name, lambda: settle(result))

        def arrive() -> None:
            process, parts = peer.process, peer.parts
            if process is None or not process.alive or parts is None:
                reply(PeerLostError(f"{address}: nobody listens"))
                return

            async def serve() -> None:
                try:
                    result: object = await work(parts)
                except Exception as error:
                    result = PeerLostError(repr(error))
                reply(result)

            process.post(0.0, lambda: process.spawn(serve(), "peer's question"))
            process.on_death.append(lambda: reply(PeerLostError(f"{address}: the connection broke")))

        self._send(address, arrive)
        return await answer

    def _send(self, address: str, arrive: Callable[[], None]) -> None:
        self._fabric.send((self._owner.name, address, Port.PEERS), arrive)

    def _reply(self, source: str, deliver: Callable[[], None]) -> None:
        self._fabric.send((source, self._owner.name, Port.PEERS), lambda: self._process.post(0.0, deliver))


class _PingStream:
    """Of one listener."""

    def __init__(self, listener: str) -> None:
        self.listener = listener
        self.held: deque[Ping | None] = deque()
        self._came: deque[Ping | None] = deque()
        self._arrived = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._left = False

    def put(self, said: Ping | None) -> None:
        self._came.append(said)
        self._arrived.set()

    async def take(self) -> Ping | None:
        while not self._came:
            self._arrived.clear()
            await self._arrived.wait()
        return self._came.popleft()

    def serve(self, serving: asyncio.Task[None]) -> None:
        self._serving = serving
        if self._left:
            serving.cancel()

    def leave(self) -> None:
        """The listener is gone, and the other end has heard of it."""
        self._left = True
        if self._serving is not None:
            self._serving.cancel()
