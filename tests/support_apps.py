"""Several controllers in this process, each with real gRPC on a port of its own, on one store in memory."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from controld.app import App
from controld.config import Config
from controld.matching.engine import plan
from controld.replica.planner import InlinePlanner
from controld.replica.replica import Replica
from controld.service.telemetry import make_log
from controld.store.memory import MemoryDisk
from tests.support_election import CutStore
from tests.support_service import HANG_SECONDS, quick_config

T = TypeVar("T")


@dataclass
class Controller:
    """One of several. It can be killed, as SIGKILL would, and started again."""

    config: Config
    disk: MemoryDisk
    log: io.StringIO
    store: CutStore
    app: App | None = None

    @property
    def address(self) -> str:
        return self.config.listen

    @property
    def replica(self) -> Replica:
        assert self.app is not None
        return self.app.replica

    @property
    def leads(self) -> bool:
        return self.app is not None and self.app.replica.leads

    async def start(self) -> None:
        self.store = CutStore(self.disk)
        log = make_log(self.log, level="debug")
        self.app = App(self.config, log=log, planner=InlinePlanner(plan), store=self.store)
        await self.app.start()

    async def kill(self) -> None:
        """Everything ends at once: nothing is handed over, resigned or said."""
        app, self.app = self.app, None
        assert app is not None
        self.store.cut = True
        await app.replica._work.end()
        await app.stop()

    async def stop(self) -> None:
        app, self.app = self.app, None
        if app is not None:
            await app.stop()


@dataclass
class Controllers:
    all: list[Controller]

    @property
    def addresses(self) -> list[str]:
        return [controller.address for controller in self.all]

    async def leader(self, *, but: Controller | None = None) -> Controller:
        """Some controller that leads, other than `but`, once there is one."""
        return await self.until(lambda: next((c for c in self.all if c.leads and c is not but), None))

    def followers(self) -> list[Controller]:
        return [c for c in self.all if c.app is not None and not c.leads]

    async def settled(self) -> Controller:
        """The leader, once every other listens to it."""
        leader = await self.leader()
        await self.until(lambda: (leader.leads and not leader.replica.unheard) or None)
        return leader

    @staticmethod
    async def until(condition: Callable[[], T | None]) -> T:
        async with asyncio.timeout(HANG_SECONDS):
            while not (found := condition()):  # noqa: ASYNC110 - there is no one event for what tests wait for
                await asyncio.sleep(0.005)
            return found


@asynccontextmanager
async def controllers(
    directory: Path, number: int = 3, *, configure: Callable[[Config], Config] = lambda config: config
) -> AsyncGenerator[Controllers]:
    """Started, and one of them leads. `configure`: what each is to have beside that."""
    disk = MemoryDisk()
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(number))
    made: list[Controller] = []
    for index, address in enumerate(addresses):
        base = quick_config(directory / f"c{index}")
        config = configure(replace(base, listen=address, identity=f"c{index}", peers=addresses))
        made.append(Controller(config, disk, io.StringIO(), CutStore(disk)))
    found = Controllers(made)
    try:
        for controller in made:
            await controller.start()
        await found.settled()
        yield found
    finally:
        for controller in made:
            await controller.stop()


def free_ports(number: int) -> list[int]:
    """Ports that nothing listened on a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
