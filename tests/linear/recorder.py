"""Records what clients call and what they are answered, on one clock. For clients that share an event loop."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Hashable
from dataclasses import dataclass, field
from typing import Generic

from tests.linear.checker import Call, Operation
from virial.errors import UnavailableError


@dataclass
class Recorder(Generic[Call]):
    operations: list[Operation[Call]] = field(default_factory=list[Operation[Call]])

    async def record(self, client: str, call: Call, work: Awaitable[Hashable]) -> Hashable:
        """What `work` returns: the reply. Where it gives up, its outcome stays unknown, and the reply is None."""
        invoked = time.monotonic_ns()
        try:
            reply = await work
        except UnavailableError:
            self.operations.append(Operation(client, call, invoked))
            return None
        self.operations.append(Operation(client, call, invoked, time.monotonic_ns(), reply))
        return reply

    @property
    def answered(self) -> int:
        return sum(operation.returned is not None for operation in self.operations)
