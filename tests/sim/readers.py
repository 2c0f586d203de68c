"""Users that read from controllers: what they are shown holds everything that was acknowledged before they asked, and
a watch that is taken up elsewhere misses nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from controld.replica.hub import Cursor
from controld.replica.replica import Replica
from controld.store.port import CompactedError, StoreError
from tests.sim.calls import Unreachable

if TYPE_CHECKING:
    from tests.sim.replicas import SimReplica
    from tests.sim.several import SeveralWorld

READ_EVERY_S = 4.0
REMEMBERED = 20
WAIT_S = 3.0
BATCHES_MAX = 50


class Reader:
    """Asks anyone, whether he leads or not."""

    def __init__(self, world: SeveralWorld, name: str) -> None:
        self._world = world
        self._rng = world.rng(f"reader/{name}")
        self._name = name

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.0, 2 * READ_EVERY_S))
            await self._read(self._rng.choice(self._world.replicas))

    async def _read(self, controller: SimReplica) -> None:
        wanted = self._world.checkers.told[-REMEMBERED:]

        async def read(replica: Replica) -> list[str]:
            await replica.barrier()
            requests = replica.state.requests
            return [request for request in wanted if request not in requests]

        try:
            missing = await controller.call(read)
        except (Unreachable, StoreError):
            return
        self._world.trace.note("read", self._name, controller.name)
        if missing:
            told = f"{controller.name} shows nothing of {', '.join(missing)}, acknowledged before it was asked"
            self._world.checkers.accuse("stale_read", told)


class Watcher:
    """One cursor, taken from controller to controller."""

    def __init__(self, world: SeveralWorld, name: str) -> None:
        self._world = world
        self._rng = world.rng(f"watcher/{name}")
        self._name = name
        self._cursor: Cursor | None = None

    async def run(self) -> None:
        while True:
            await self._go_on(self._rng.choice(self._world.replicas))
            await asyncio.sleep(self._rng.uniform(0.1, 2.0))

    async def _go_on(self, controller: SimReplica) -> None:
        after = self._cursor

        async def watch(replica: Replica) -> tuple[Cursor, list[int]]:
            found: list[int] = []
            if after is None:
                return replica.hub.cursor, found
            commits = replica.hub.subscribe(after)
            try:
                async with asyncio.timeout(WAIT_S):
                    while len(found) < BATCHES_MAX:
                        found.append((await anext(commits)).revision)
            except (TimeoutError, StoreError):
                pass  # what came before is good
            return Cursor(after.history, max([after.revision, *found])), found

        try:
            cursor, found = await controller.call(watch)
        except CompactedError:
            self._cursor = None
            return
        except (Unreachable, StoreError):
            return
        if after is not None:
            self._world.judge.watched(self._name, controller.name, after, found)
        self._cursor = cursor
