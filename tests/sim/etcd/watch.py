"""Watches at one member: those that are up to date hear of each revision as it is applied, the others catch up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import grpc

from controld.store.etcd_wire import WireError
from tests.sim.etcd.kv import Mvcc
from tests.sim.loop import SimLoop
from virialpb.etcd.v1 import etcd_pb2 as pb

SYNC_S = (0.001, 0.1)
CHUNK_REVISIONS = (1, 2, 8, 64)


@dataclass(eq=False, slots=True)
class Watch:
    """`next_revision`: of the first event that was not sent. `behind`: others than the newest are owed to it."""

    create: pb.WatchCreateRequest
    send: Callable[[pb.WatchResponse | WireError], None]
    next_revision: int
    needs_leader: bool
    behind: bool = False


class Watches:
    """`revision` and `compacted` are what the member has applied."""

    def __init__(self, loop: SimLoop, rng: Random, mvcc: Mvcc) -> None:
        self._loop = loop
        self._rng = rng
        self._mvcc = mvcc
        self._open: dict[Watch, None] = {}
        self.revision = mvcc.revision
        self.compacted = 0

    def open(self, watch: Watch) -> None:
        created = pb.WatchResponse(created=True)
        created.header.revision = self.revision
        watch.send(created)
        if not watch.next_revision:
            watch.next_revision = self.revision + 1
        self._open[watch] = None
        if watch.next_revision <= self.revision:
            self._lag(watch, self._rng.uniform(*SYNC_S))

    def close(self, watch: Watch) -> None:
        self._open.pop(watch, None)

    def fail(self, error: WireError, *, only: Callable[[Watch], bool] = lambda _: True) -> None:
        for watch in [watch for watch in self._open if only(watch)]:
            del self._open[watch]
            watch.send(error)

    def applied(self, revision: int, compacted: int) -> None:
        if revision == self.revision:
            self.compacted = compacted
            return
        self.revision, self.compacted = revision, compacted
        for watch in tuple(self._open):
            if not watch.behind and watch.next_revision <= revision:
                self._send(watch, revision, revision)

    def lag(self, seconds: float) -> None:
        """Its clients take nothing for a while; then what they missed comes in parts."""
        for watch in self._open:
            if not watch.behind:
                self._lag(watch, seconds * self._rng.uniform(0.5, 1.0))

    def break_off(self) -> None:
        self.fail(WireError(grpc.StatusCode.UNAVAILABLE, "the connection broke"))

    def _lag(self, watch: Watch, seconds: float) -> None:
        watch.behind = True
        self._loop.after(seconds, self._catch_up, watch)

    def _catch_up(self, watch: Watch) -> None:
        if watch not in self._open:
            return
        if watch.next_revision < self.compacted:
            gone = pb.WatchResponse(canceled=True, compact_revision=self.compacted)
            gone.header.revision = self.revision
            del self._open[watch]
            watch.send(gone)
            return
        last = min(self.revision, watch.next_revision + self._rng.choice(CHUNK_REVISIONS) - 1)
        self._send(watch, watch.next_revision, last)
        if watch.next_revision <= self.revision:
            self._loop.after(self._rng.uniform(*SYNC_S), self._catch_up, watch)
        else:
            watch.behind = False

    def _send(self, watch: Watch, first: int, last: int) -> None:
        """The header tells what the member has applied, which may be beyond the events."""
        key, end = watch.create.key, watch.create.range_end
        response = pb.WatchResponse()
        for revision in range(first, last + 1):
            for event in self._mvcc.events.get(revision, ()):
                name = event.kv.key
                # What is compacted at the very revision keeps no deletions.
                gone = revision == self.compacted and event.type == pb.Event.DELETE
                if (name == key or (end and key <= name < end)) and not gone:
                    response.events.append(event)
        watch.next_revision = last + 1
        if response.events:
            response.header.revision = self.revision
            watch.send(response)
