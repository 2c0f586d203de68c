"""The network between the hosts of controllers: links with a direction and a port, that may be cut, slow, or late.

A cut closes nothing: what was sent over it comes once it is healed, unless the connection was given up before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum
from random import Random

from tests.sim.loop import SimLoop

DELAY_S = (0.0002, 0.002)
RETRANSMIT_S = (0.02, 1.0)
GIVEN_UP_S = 20.0


class Port(Enum):
    """`RAFT`: between members of etcd. `PEERS`: between controllers."""

    RAFT = "raft"
    PEERS = "peers"


Link = tuple[str, str, Port]
"""From, to, port."""


def links_of(host: str, others: Iterable[str], ports: Iterable[Port], *, out: bool, back: bool) -> list[Link]:
    found: list[Link] = []
    for other in others:
        for port in ports:
            if other != host:
                found += [(host, other, port)] if out else []
                found += [(other, host, port)] if back else []
    return found


class Fabric:
    def __init__(self, loop: SimLoop, rng: Random) -> None:
        self._loop = loop
        self._rng = rng
        self._cuts: Counter[Link] = Counter()
        self._held: dict[Link, list[tuple[float, Callable[[], object]]]] = {}
        self.slow_s: dict[str, float] = {}
        self.changed: list[Callable[[], None]] = []

    def is_cut(self, link: Link) -> bool:
        return self._cuts[link] > 0

    def delay_s(self, source: str, to: str) -> float:
        low, high = DELAY_S
        delay_s = low + (high - low) * self._rng.random()
        if self.slow_s:
            delay_s += max(self.slow_s.get(source, 0.0), self.slow_s.get(to, 0.0)) * self._rng.random()
        return delay_s

    def send(self, link: Link, deliver: Callable[[], object]) -> None:
        """Each message takes its own time: a later one may be there first."""
        self._loop.after(self.delay_s(link[0], link[1]), self._arrive, link, deliver)

    def _arrive(self, link: Link, deliver: Callable[[], object]) -> None:
        if self._cuts[link]:
            self._held.setdefault(link, []).append((self._loop.time(), deliver))
        else:
            deliver()

    def cut(self, links: Iterable[Link]) -> None:
        """Cuts may overlap."""
        self._cuts.update(links)
        self._tell()

    def heal(self, links: Iterable[Link]) -> None:
        for link in links:
            self._cuts[link] = max(0, self._cuts[link] - 1)
            if not self._cuts[link]:
                self._flush(link)
        self._tell()

    def heal_everything(self) -> None:
        self.slow_s.clear()
        for link in [link for link, count in self._cuts.items() if count]:
            self._cuts[link] = 0
            self._flush(link)
        self._tell()

    def _flush(self, link: Link) -> None:
        now_s = self._loop.time()
        for sent_s, deliver in self._held.pop(link, []):
            if now_s - sent_s < GIVEN_UP_S:
                self._loop.after(self._rng.uniform(*RETRANSMIT_S), self._arrive, link, deliver)

    def _tell(self) -> None:
        for told in self.changed:
            told()
