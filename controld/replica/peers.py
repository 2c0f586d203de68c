"""What replicas say to each other: the port through which one reaches the others, and the words that go over it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from controld.core.ids import Epoch
from controld.replica.election import Verdict


@dataclass(frozen=True, slots=True)
class Ping:
    """From a leader that could prove its leadership `proof_age_ns` ago. `revision`: of its last commit."""

    epoch: Epoch
    proof_age_ns: int
    revision: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """The leader of `token` asks to be replaced by a replica that has everything up to `revision`."""

    token: int
    revision: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """`epoch` is that of the successor, which leads by now; None: it does not, and `why` says what kept it."""

    epoch: Epoch | None
    why: str = ""


class PeerLostError(Exception):
    """A peer did not answer, or no longer sends what it was asked for."""


class Peers(Protocol):
    """The other replicas, by address (HOST:PORT)."""

    def pings(self, address: str) -> AsyncGenerator[Ping]:
        """Over a connection of its own, made anew for each call. Raises PeerLostError, also when the stream ends."""
        ...

    async def ask(self, address: str, token: int) -> Verdict:
        """Whether the leader of `token` is gone. Raises PeerLostError."""
        ...

    async def hand_over(self, address: str, request: HandOver) -> HandedOver:
        """Raises PeerLostError: it may lead all the same."""
        ...

    async def close(self) -> None: ...
