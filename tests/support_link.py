"""The real control link of an agent, with a core that only says hello and beats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from noded.core.events import Connected, Disconnected, Event, OrderReceived
from noded.core.messages import Beat, BeatAck, Hello, NodeFacts, SessionRefused, Welcome
from noded.link.control import ControlLink
from noded.link.stream import Dialer
from virialpb.ids import NO_EPOCH, Epoch, Incarnation, NodeUid

GIB = 1 << 30


class NoLog:
    def info(self, event: str, **fields: object) -> object:
        del event, fields

    def warning(self, event: str, **fields: object) -> object:
        del event, fields


@dataclass
class Node:
    """`sessions`: the address of each controller that welcomed it, in turn, and by which leader epoch."""

    name: str
    link: ControlLink = field(init=False)
    sessions: list[tuple[str, Epoch]] = field(default_factory=list[tuple[str, Epoch]])
    acknowledged: list[int] = field(default_factory=list[int])
    refusals: list[SessionRefused] = field(default_factory=list[SessionRefused])
    welcomed: bool = False
    seq: int = 0
    seen: Epoch = NO_EPOCH

    def on_event(self, event: Event) -> None:
        match event:
            case Connected():
                self.seq += 1
                incarnation = Incarnation(NodeUid(f"uid-{self.name}"), "boot-1", "g1")
                facts = NodeFacts(self.name, "127.0.0.1", 4_000, 8 * GIB)
                self.link.send(Hello(incarnation, facts, "pidns", Beat(self.seq), self.seen))
            case Disconnected():
                self.welcomed = False
            case OrderReceived(epoch, order):
                self.seen = max(self.seen, epoch)
                if isinstance(order, Welcome):
                    self.welcomed = True
                    self.sessions.append((self.link.address or "", epoch))
                elif isinstance(order, BeatAck):
                    self.acknowledged.append(order.seq)
                elif isinstance(order, SessionRefused):
                    self.refusals.append(order)
            case _:
                return

    async def beat(self, interval_seconds: float = 0.1) -> None:
        while True:
            await asyncio.sleep(interval_seconds)
            if self.welcomed:
                self.seq += 1
                self.link.send(Beat(self.seq))


@asynccontextmanager
async def node(addresses: Sequence[str], *, name: str = "n1", seed: int = 1) -> AsyncGenerator[Node]:
    """Dialling until the end of the block. The first address it dials depends on `seed`."""
    made = Node(name)
    made.link = ControlLink(Dialer(warm=tuple(addresses)), tuple(addresses), Random(seed), made.on_event, NoLog())
    tasks = [asyncio.create_task(made.link.run()), asyncio.create_task(made.beat())]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
