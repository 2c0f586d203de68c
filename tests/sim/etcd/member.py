"""One member of the fake etcd: what it has, whether it runs, whom it takes for the leader, and who waits at it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random

import grpc

from controld.store.etcd_wire import WireError
from tests.sim.etcd.kv import Mvcc
from tests.sim.etcd.watch import Watches
from tests.sim.loop import SimLoop

FSYNC_S = (0.0003, 0.003)
FILE_BYTES = 1 << 20
FULL_BYTES = 16 << 30
FORGOTTEN_MAX = 4
"""So many entries a member that starts again has yet to hear are committed, although it had applied them."""


def unavailable(text: str) -> WireError:
    return WireError(grpc.StatusCode.UNAVAILABLE, text)


class Member:
    """`log_length` entries are on its disk, `applied` of them in its state. `leader`: the member it takes for it."""

    def __init__(self, loop: SimLoop, rng: Random, name: str, number: int, mvcc: Mvcc) -> None:
        self._loop = loop
        self._rng = rng
        self._mvcc = mvcc
        self.name = name
        self.id = number
        self.alive = True
        self.frozen = False
        self.lives = 1
        self.log_length = 0
        self.applied = 0
        self.revision = mvcc.revision
        self.compacted = 0
        self.leader: Member | None = None
        self.leader_lost_s = 0.0
        self.slow_disk_s = 0.0
        self.file_bytes = FILE_BYTES
        self.watches = Watches(loop, rng, mvcc)
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._waits_made = 0
        self._parked: list[Callable[[], None]] = []
        self.on_crash: list[Callable[[], None]] = []

    @property
    def running(self) -> bool:
        return self.alive and not self.frozen

    def fsync_s(self) -> float:
        return self._rng.uniform(*FSYNC_S) + self.slow_disk_s * self._rng.random()

    def hear(self, request: Callable[[], None]) -> None:
        """A client's request: now, once it runs again, or never."""
        if self.frozen:
            self._parked.append(request)
        elif self.alive:
            request()

    def when_applied(self, index: int, then: Callable[[], None]) -> None:
        if self.applied >= index:
            then()
            return
        self._waits_made += 1
        heapq.heappush(self._waiting, (index, self._waits_made, then))

    def advance(self, index: int, revision: int, compacted: int) -> None:
        """One more entry is applied."""
        self.applied, self.revision, self.compacted = index, revision, compacted
        self.log_length = max(self.log_length, index)
        self.watches.applied(revision, compacted)
        while self._waiting and self._waiting[0][0] <= index:
            heapq.heappop(self._waiting)[2]()

    def crash(self) -> None:
        """Its log stays as far as it was synced."""
        if not self.alive:
            return
        self.alive = False
        self.frozen = False
        self.leader = None
        self._waiting.clear()
        self._parked.clear()
        self.watches.fail(unavailable("the connection broke"))
        for told in self.on_crash:
            told()

    def start(self, state_at: Callable[[int], tuple[int, int]]) -> None:
        """`state_at(index)` gives the revision and the compacted revision there."""
        if self.alive:
            return
        self.alive = True
        self.lives += 1
        self.leader_lost_s = self._loop.time()
        self.applied = max(0, self.applied - self._rng.randrange(FORGOTTEN_MAX))
        self.revision, self.compacted = state_at(self.applied)
        self.watches = Watches(self._loop, self._rng, self._mvcc)
        self.watches.revision, self.watches.compacted = self.revision, self.compacted

    def freeze(self) -> None:
        if self.alive:
            self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            self.frozen = False
            parked, self._parked = self._parked, []
            for request in parked:
                self._loop.after(self._rng.uniform(0.0, 0.01), self.hear, request)
