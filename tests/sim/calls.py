"""Calls of users to a simulated controller: they take a little, and what breaks leaves them in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from tests.sim.loop import Process, SimLoop

RPC_S = (0.0003, 0.004)
RPC_TIMEOUT_S = 10.0


class Unreachable(Exception):
    """The controller did not answer: what became of the request is not known."""


class Calls:
    """Those under way to one controller."""

    def __init__(self, loop: SimLoop, rng: Random) -> None:
        self._loop = loop
        self._rng = rng
        self._owners: dict[asyncio.Future[Any], Process] = {}

    async def make(self, process: Process | None, work: Callable[[], Coroutine[Any, Any, Any]] | None) -> Any:
        """What `work` returns or raises in `process`. Raises Unreachable."""
        if process is None or not process.alive or work is None:
            raise Unreachable("nobody listens")
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._owners[answer] = process

        async def serve() -> None:
            try:
                reply: Any = await work()
            except Exception as error:
                reply = error
            self._loop.after(self._rng.uniform(*RPC_S), _settle, answer, reply)

        process.post(0.0, lambda: process.spawn(serve(), "rpc"))
        try:
            async with asyncio.timeout(RPC_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise Unreachable("no answer in time") from None
        finally:
            self._owners.pop(answer, None)

    def lose(self, process: Process) -> None:
        """It is dead."""
        for answer, owner in list(self._owners.items()):
            if owner is process:
                broken = Unreachable("the connection broke")
                self._loop.after(self._rng.uniform(*RPC_S), _settle, answer, broken)


def _settle(answer: asyncio.Future[Any], reply: Any) -> None:
    if answer.done():
        return
    if isinstance(reply, Exception):
        answer.set_exception(reply)
    else:
        answer.set_result(reply)
