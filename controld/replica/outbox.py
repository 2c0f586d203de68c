"""What waits to be sent to one agent: bounded, and it never makes anyone wait.

Answers (welcome, acknowledgements, task replies) go first and are never dropped; of acknowledgements the newest
says all. Orders are level-triggered, given again by later ticks: an equal one waits once, and one that finds too
many waiting is turned away. (Dropping the oldest instead starves: a burst beyond the bound is repeated in the same
order, so it would lose the same ones each time, while those at its front are carried out and not repeated.) So one
hung agent costs its own bound and nothing else (H13).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from controld.core.agent import BeatAck, Order, SessionRefused, TaskReply, Welcome


class OutboxFullError(Exception):
    """More answers wait than the bound allows: the agent does not read."""


class Outbox:
    def __init__(self, *, orders_max: int, replies_max: int, stands: Callable[[Order], bool]) -> None:
        """`stands`: whether an order is still to be sent, asked when it is taken."""
        self._orders_max = orders_max
        self._replies_max = replies_max
        self._stands = stands
        self._answers: deque[Welcome | TaskReply | SessionRefused] = deque()
        self._ack: BeatAck | None = None
        self._orders: dict[Order, None] = {}
        self._ready = asyncio.Event()
        self._closed: Exception | None = None
        self.turned_away = 0

    def __len__(self) -> int:
        return len(self._answers) + len(self._orders) + (self._ack is not None)

    def put(self, order: Order) -> None:
        """Raises OutboxFullError. After `close` nothing is kept."""
        if self._closed is not None:
            return
        match order:
            case BeatAck():
                if self._ack is None or order.seq > self._ack.seq:
                    self._ack = order
            case Welcome() | TaskReply() | SessionRefused():
                if len(self._answers) >= self._replies_max:
                    raise OutboxFullError
                self._answers.append(order)
            case _:
                self._put_order(order)
        self._ready.set()

    def _put_order(self, order: Order) -> None:
        if order in self._orders:
            return
        if len(self._orders) >= self._orders_max:
            self.turned_away += 1
            return
        self._orders[order] = None

    def close(self, error: Exception) -> None:
        """`take` gives out the answers that wait, then raises `error`; orders and acknowledgements are gone."""
        if self._closed is None:
            self._closed = error
            self._ack = None
            self._orders.clear()
            self._ready.set()

    async def take(self) -> Order:
        """The next thing to send. For one reader. Raises what it was closed with."""
        while True:
            if self._answers:
                return self._answers.popleft()
            if self._ack is not None:
                ack, self._ack = self._ack, None
                return ack
            if self._orders:
                order = next(iter(self._orders))
                del self._orders[order]
                if self._stands(order):
                    return order
                continue
            if self._closed is not None:
                raise self._closed
            self._ready.clear()
            await self._ready.wait()
