"""Watching etcd: whole revisions, in order, without gaps, also across streams that break.

A watch is resumed AT the last revision that was delivered, never at the revision in a header: a client that did the
latter lost 5,000 of 6,000 events without a word. What comes twice for that is dropped here. Starting one later would
do for events, but not for compaction: etcd refuses a start below the compacted revision, and lets one AT it pass, of
which deletions may be gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from itertools import groupby

import grpc

from controld.store import etcd_txn
from controld.store.etcd_keys import Keys, end_of, read_history
from controld.store.etcd_session import Session
from controld.store.etcd_txn import Office
from controld.store.etcd_wire import TXN, Meaning, WatchStream, WireError, meaning
from controld.store.port import Commit, CompactedError, Incumbent, LeaderSeen, OutcomeUnknownError, StoredChange
from virialpb.etcd.v1 import etcd_pb2 as pb

Seen = Commit | LeaderSeen


class Feed:
    """What the answers of one stream say, from `position` on. Pure: it neither reads nor waits."""

    def __init__(self, keys: Keys, position: int, office: Office) -> None:
        self.position = position
        self._keys = keys
        self._office = office
        self._incumbent: Incumbent | None = office.incumbent()
        self._last_keys: frozenset[bytes] | None = None
        self._fragments: list[pb.Event] = []

    def take(self, response: pb.WatchResponse) -> Iterable[Seen]:
        """Raises CompactedError, and WireError where etcd ended the watch."""
        if response.compact_revision:
            raise CompactedError(response.compact_revision)
        if response.canceled:
            raise WireError(grpc.StatusCode.UNAVAILABLE, f"the watch was cancelled: {response.cancel_reason}")
        self._fragments += response.events
        if response.fragment:  # never asked for; half a revision would be no commit
            return
        events, self._fragments = self._fragments, []
        for revision, group in groupby(events, key=lambda event: event.kv.mod_revision):
            seen = self._revision(revision, tuple(group))
            self.position = max(self.position, revision)
            if seen is not None:
                yield seen

    def _revision(self, revision: int, events: tuple[pb.Event, ...]) -> Seen | None:
        keys = frozenset(event.kv.key for event in events)
        if revision <= self.position:
            # The overlap at the start, or a watch that went back in time (etcd before 3.4.38 and 3.5.23).
            if revision == self.position and self._last_keys is not None and not keys <= self._last_keys:
                raise CompactedError(revision)  # more of a commit that was delivered: only a reload puts that right
            return None
        self._last_keys = keys
        changes: list[StoredChange] = []
        for event in events:
            change = self._event(event)
            if change is not None:
                changes.append(change)
        if changes:
            return Commit(revision, tuple(changes))
        return self._leadership(revision)

    def _event(self, event: pb.Event) -> StoredChange | None:
        key, deleted = event.kv.key, event.type == pb.Event.DELETE
        if key.startswith(self._keys.records):
            return StoredChange(self._keys.name(key), None if deleted else event.kv.value)
        office = self._office
        if key == self._keys.history:
            if deleted or read_history(event.kv.value) != (office.history, False):
                raise CompactedError(event.kv.mod_revision)  # a restore: no position from before it is good
        elif key == self._keys.leader:
            self._office = Office(office.history, None if deleted else event.kv, office.nonce)
        elif key == self._keys.evidence:
            self._office = Office(office.history, office.leader, None if deleted else event.kv.value)
        return None

    def _leadership(self, revision: int) -> LeaderSeen | None:
        incumbent = self._office.incumbent()
        if incumbent == self._incumbent:
            return None
        self._incumbent = incumbent
        return LeaderSeen(revision, incumbent)


async def follow(session: Session, after_revision: int) -> AsyncGenerator[Seen]:
    """Raises CompactedError, StoreClosedError, and OutcomeUnknownError when there was no stream for `times.follow`."""
    loop = asyncio.get_running_loop()
    position = after_revision
    broken_at: float | None = None
    pause = session.times.pause
    while True:
        stream: WatchStream | None = None
        try:
            feed = await _feed(session, position)
            stream = await session.watch(
                pb.WatchCreateRequest(
                    key=session.keys.live, range_end=end_of(session.keys.live), start_revision=max(1, position)
                )
            )
            while True:
                response = await session.until_closed(stream.read())
                broken_at, pause = None, session.times.pause
                for seen in feed.take(response):
                    position = feed.position
                    yield seen
                position = feed.position
        except WireError as error:
            broken_at = loop.time() if broken_at is None else broken_at
            if loop.time() - broken_at >= session.times.follow:
                raise OutcomeUnknownError(f"the watch of etcd broke: {error}") from error
        finally:
            if stream is not None:
                stream.cancel()
        await session.sleep(pause)
        pause = min(pause * 2, session.times.pause_max)


async def _feed(session: Session, position: int) -> Feed:
    """Whether a watch may begin at `position`, as of now: a member that is behind is waited for, not believed.

    Raises CompactedError also for a position that etcd has not reached: it is from before a restore.
    """
    try:
        response = await session.call(TXN, etcd_txn.position(session.keys, position), session.times.read)
    except WireError as error:
        if meaning(error) in (Meaning.COMPACTED, Meaning.FUTURE):
            raise CompactedError(await session.compacted_revision()) from error
        raise
    kv = etcd_txn.required(etcd_txn.one(response, 0))
    history, restoring = read_history(kv.value)
    if restoring or kv.mod_revision > position:
        raise CompactedError(kv.mod_revision)
    evidence = etcd_txn.one(response, 2)
    office = Office(history, etcd_txn.one(response, 1), None if evidence is None else evidence.value)
    return Feed(session.keys, position, office)
