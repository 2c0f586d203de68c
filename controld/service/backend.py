"""What every servicer works with."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc.aio

from controld.core.commands import Now
from controld.core.validate import SpecLimits
from controld.replica.clock import Clock, now
from controld.replica.leader import Leader

# Set for each call by the interceptor: names the cause in logs and errors, and stands in for a missing request_id.
CAUSE_ID: ContextVar[str] = ContextVar("cause_id", default="")

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Backend:
    """`identity` and `store_kind` are shown in the cluster's status."""

    leader: Leader
    clock: Clock
    limits: SpecLimits
    fence_after_default_ns: int
    store_kind: str
    identity: str
    version: str

    def now(self) -> Now:
        return now(self.clock)


def peer_name(context: Context) -> str:
    """The name in the caller's certificate; empty without mutual TLS."""
    names = list(context.auth_context().get("x509_common_name", ()))
    return names[0].decode(errors="replace")[:253] if names else ""
