"""What every servicer works with."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from controld.core.agent import Hello
from controld.core.commands import Command, Now
from controld.core.ids import Epoch
from controld.core.outcome import Reply
from controld.core.state import State
from controld.core.validate import SpecLimits
from controld.health.view import View
from controld.replica.admin import Admin
from controld.replica.clock import Clock, now
from controld.replica.hub import WatchHub
from controld.replica.replica import Replica
from controld.replica.session import NodeSession

# Set for each call by the interceptor: names the cause in logs and errors, and stands in for a missing request_id.
CAUSE_ID: ContextVar[str] = ContextVar("cause_id", default="")

Context = grpc.aio.ServicerContext[Any, Any]


class LeaderPort(Protocol):
    """What servicers ask of whoever leads: a `Leader`, or a `Replica`, which says who leads where it does not."""

    @property
    def state(self) -> State: ...

    @property
    def view(self) -> View: ...

    @property
    def epoch(self) -> Epoch: ...

    @property
    def hub(self) -> WatchHub: ...

    async def submit(self, command: Command) -> Reply: ...

    async def barrier(self) -> None: ...

    async def open_session(self, hello: Hello) -> NodeSession: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """`identity` and `store_kind` are shown in the cluster's status. `replica`: of a controller that is one of several;
    it is the `leader` too. `admin`: what operators ask for; None in a simulation."""

    leader: LeaderPort
    clock: Clock
    limits: SpecLimits
    fence_after_default_ns: int
    store_kind: str
    identity: str
    version: str
    replica: Replica | None = None
    admin: Admin | None = None

    def now(self) -> Now:
        return now(self.clock)
