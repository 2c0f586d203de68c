"""One agent's session: what it reports goes in, what it is told comes out. Nothing here waits for an agent."""

from __future__ import annotations

import asyncio
from typing import Protocol

from controld.core.agent import Order, Report
from controld.core.ids import Incarnation, NodeUid
from controld.core.model import Inventory
from controld.replica.errors import SessionClosedError
from controld.replica.outbox import Outbox


class Reception(Protocol):
    """Where reports of all sessions go."""

    def receive(self, session: NodeSession, report: Report) -> None: ...

    async def receive_inventory(self, session: NodeSession, inventory: Inventory) -> None: ...

    def left(self, session: NodeSession) -> None: ...


class NodeSession:
    def __init__(self, incarnation: Incarnation, outbox: Outbox, reception: Reception) -> None:
        self.incarnation = incarnation
        self.outbox = outbox
        self.closed = False
        # Calls of its tasks that are not answered yet, and those among them that wait for a checkpoint to change.
        self.calls = 0
        self.waits: set[asyncio.Future[None]] = set()
        self._reception = reception

    @property
    def uid(self) -> NodeUid:
        return self.incarnation.node_uid

    def receive(self, report: Report) -> None:
        """Take one report. Never blocks. After the session is closed it counts for nothing."""
        if not self.closed:
            self._reception.receive(self, report)

    async def report_inventory(self, inventory: Inventory) -> None:
        """Commit what the node has. Raises RefusedError, StoreError, OverloadedError, SessionClosedError."""
        await self._reception.receive_inventory(self, inventory)

    async def next_order(self) -> Order:
        """The next thing to send, for one reader. Raises SessionClosedError once the session is over."""
        return await self.outbox.take()

    def close(self) -> None:
        """The stream is gone."""
        self._reception.left(self)

    def end(self, error: SessionClosedError) -> None:
        """End it from the controller's side: the reader gets `error`."""
        self.closed = True
        self.outbox.close(error)
