"""Defects of several controllers: in the store's guards, in its watch, in the election, in what a leader promises."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from controld.core.agent import BeatAck
from controld.core.commands import ExpireLeases, MarkExpired
from controld.replica import election, elector, replica
from controld.replica.admission import Admission as Door
from controld.replica.agents import Agents
from controld.replica.election import Ask, Knowledge, TakeOver, Timings, Why, decide
from controld.replica.hub import WatchHub
from controld.replica.replica import Replica
from controld.replica.stall import StallWatch
from controld.replica.standby import Standby
from controld.replica.ticker import Ticker
from controld.replica.writer import Writer
from controld.store import etcd, etcd_txn
from controld.store.etcd import EtcdStore
from controld.store.etcd_session import Attempts
from controld.store.etcd_watch import Feed
from controld.store.port import OutcomeUnknownError, StoredChange
from noded.core.epochs import Admission, LeaderEpoch
from tests.sim.mutation import Mutation, Patch
from virialpb.etcd.v1 import etcd_pb2 as pb

# -- the store -----------------------------------------------------------------------------------------------------


def _unguarded(request: pb.TxnRequest, keys: Any) -> pb.TxnRequest:
    """Guarded by the leader key's create_revision alone, which a takeover leaves as it was."""
    del request.compare[:]
    request.compare.add(key=keys.leader, target=pb.Compare.CREATE, result=pb.Compare.NOT_EQUAL, create_revision=0)
    return request


def _guard_by_create_revision() -> tuple[Patch, ...]:
    real = etcd_txn.commit

    def commit(keys: Any, leadership: Any, seq: int, changes: Any) -> pb.TxnRequest:
        return _unguarded(real(keys, leadership, seq, changes), keys)

    return ((etcd_txn, "commit", commit),)


def _no_head_guard() -> tuple[Patch, ...]:
    real = etcd_txn.commit

    def commit(keys: Any, leadership: Any, seq: int, changes: Any) -> pb.TxnRequest:
        request = real(keys, leadership, seq, changes)
        del request.compare[1:]
        return request

    return ((etcd_txn, "commit", commit),)


def _barrier_without_range() -> tuple[Patch, ...]:
    real = etcd_txn.barrier

    def barrier(keys: Any, leadership: Any) -> pb.TxnRequest:
        request = real(keys, leadership)
        del request.success[:], request.failure[:]
        return request

    return ((etcd_txn, "barrier", barrier),)


def _serializable_barrier() -> tuple[Patch, ...]:
    real = etcd_txn.barrier

    def barrier(keys: Any, leadership: Any) -> pb.TxnRequest:
        request = real(keys, leadership)
        for operation in (*request.success, *request.failure):
            operation.request_range.serializable = True
        return request

    return ((etcd_txn, "barrier", barrier),)


def _resume_at_header() -> tuple[Patch, ...]:
    real = Feed.take

    def take(self: Feed, response: pb.WatchResponse) -> Any:
        yield from real(self, response)
        self.position = max(self.position, response.header.revision)

    return ((Feed, "take", take),)


def _takeover_without_token() -> tuple[Patch, ...]:
    """In place of whoever leads, not of the one that was found to be gone."""
    real = etcd_txn.take_over

    def take_over(keys: Any, history: int, token: int, claim: Any, lease: int) -> pb.TxnRequest:
        request = real(keys, history, token, claim, lease)
        del request.compare[0]
        return request

    return ((etcd_txn, "take_over", take_over),)


def _new_number_for_a_retry() -> tuple[Patch, ...]:
    """What is in doubt is sent again as another commit."""

    class Once(Attempts):
        async def next(self) -> bool:
            return self._made == 0 and await super().next()

    async def commit(self: Writer, stored: tuple[StoredChange, ...]) -> int:
        while True:
            try:
                return await self._store.commit(self._leadership, self._seq, stored)
            except OutcomeUnknownError:
                self._seq += 1

    return ((etcd, "Attempts", Once), (Writer, "_commit_retried", commit))


# -- the election --------------------------------------------------------------------------------------------------


def _deposes_alone() -> tuple[Patch, ...]:
    def hasty(now_ns: int, known: Knowledge, timings: Timings) -> Any:
        action = decide(now_ns, known, timings)
        return TakeOver(action.token, Why.AGREED) if isinstance(action, Ask) else action

    return ((elector, "decide", hasty),)


def _imagines_no_evidence() -> tuple[Patch, ...]:
    """A follower that has not heard the leader yet takes it for one whose evidence is gone."""
    real = election._alone

    def alone(known: Knowledge) -> Why | None:
        unheard = known.heard_ns is None and known.token > 0
        return real(known) or (Why.NO_EVIDENCE if unheard else None)

    return ((election, "_alone", alone),)


def _pings_without_proof() -> tuple[Patch, ...]:
    def may_ping(now_ns: int, proved_ns: int, timings: Timings) -> bool:
        del now_ns, proved_ns, timings
        return True

    return ((replica, "may_ping", may_ping),)


def _decides_too_early() -> tuple[Patch, ...]:
    """Before the copy has the takeover itself."""

    async def reached(self: Standby, revision: int) -> Any:
        del revision
        assert self.state is not None
        return self.state

    return ((Standby, "reached", reached),)


def _reads_without_barrier() -> tuple[Patch, ...]:
    """A controller that was deposed shows what it has."""

    async def barrier(self: Replica) -> None:
        await self._leader()

    return ((Replica, "barrier", barrier),)


def _cursor_before_the_window() -> tuple[Patch, ...]:
    """A reader that asks for more than a new window of commits holds gets what there is of it."""
    real = WatchHub.subscribe

    def subscribe(self: WatchHub, after: Any = None) -> Any:
        if after is not None and after.history == self._history and after.revision <= self._revision:
            after = after._replace(revision=max(after.revision, self._floor))
        return real(self, after)

    return ((WatchHub, "subscribe", subscribe),)


# -- what a leader promises ----------------------------------------------------------------------------------------


async def _for_ever(self: Replica, leader: Any) -> None:
    """Lead on, whatever can be proved."""
    del self, leader
    await asyncio.Event().wait()


def _ack_before_barrier() -> tuple[Patch, ...]:
    """By a leader that leads on without a proof: one that does not is deposed before it can do harm."""
    real = Agents._receive_beat

    def receive(self: Agents, session: Any, beat: Any) -> None:
        real(self, session, beat)
        self._put(session, BeatAck(beat.seq))

    return ((Agents, "_receive_beat", receive), (Replica, "_watch_proof", _for_ever))


def _answers_before_commit() -> tuple[Patch, ...]:
    real = Writer._finish

    async def finish(self: Writer, batch: Any) -> None:
        self._answer(batch)
        await real(self, batch)

    return ((Writer, "_finish", finish),)


def _expires_without_proof() -> tuple[Patch, ...]:
    """A leader that stood still expires at once whom it has not heard, on a store that does not stop it."""

    async def expire(self: Ticker, command: MarkExpired | ExpireLeases, key: Any, unheard: Any) -> None:
        del unheard
        self._queue(command, key, lambda: True)

    def check(self: StallWatch) -> None:
        del self

    return (*_guard_by_create_revision(), (Ticker, "_expire", expire), (StallWatch, "check", check))


def _lower_epoch_obeyed() -> tuple[Patch, ...]:
    """By agents, of a leader that no store deposes and that hears of no other, or no stale order ever gets out."""

    def admit(self: LeaderEpoch, epoch: Any) -> Admission:
        self.seen = max(self.seen, epoch)
        return Admission.CURRENT

    async def refuse_newer(self: Door, hello: Any) -> None:
        del self, hello

    async def barrier(self: EtcdStore, leadership: Any) -> None:
        del self, leadership
        await asyncio.sleep(0.001)

    return (
        *_guard_by_create_revision(),
        (LeaderEpoch, "admit", admit),
        (Door, "refuse_newer", refuse_newer),
        (EtcdStore, "barrier", barrier),
    )


def _defect(
    name: str, checkers: Sequence[str], patches: Any, faults: Sequence[str] = (), count: int = 12, seed: int = 1
) -> Mutation:
    return Mutation(name, tuple(checkers), patches, tuple(faults), count, seed, several=True)


SEVERAL_MUTATIONS = (
    _defect("guard_by_create_revision", ["stale_commit"], _guard_by_create_revision, ["leader_paused"]),
    _defect("no_head_guard", ["one_writer"], _no_head_guard, ["store_trouble"]),
    _defect("barrier_without_range", ["barrier"], _barrier_without_range, ["leader_isolated", "host_one_way"]),
    _defect("serializable_barrier", ["barrier"], _serializable_barrier, ["leader_isolated", "host_one_way"]),
    _defect("resume_at_header", ["standby", "copy"], _resume_at_header, ["watch_lags", "follower_paused"]),
    _defect("takeover_without_token", ["takeover"], _takeover_without_token, ["leader_crash", "store_slow"]),
    _defect("new_number_for_a_retry", ["one_writer"], _new_number_for_a_retry, ["store_trouble"]),
    _defect("deposes_alone", ["deposed"], _deposes_alone, ["peers_isolated"]),
    _defect("imagines_no_evidence", ["deposed"], _imagines_no_evidence, ["follower_crash"]),
    _defect("pings_without_proof", ["stale_ping"], _pings_without_proof, ["socket_cut", "member_isolated"]),
    _defect("decides_too_early", ["copy"], _decides_too_early, ["crash_before_a_watch"]),
    _defect("reads_without_barrier", ["stale_read"], _reads_without_barrier, ["leader_isolated", "leader_paused"]),
    _defect("cursor_before_the_window", ["watch"], _cursor_before_the_window, ["leader_paused", "follower_crash"]),
    _defect("ack_before_barrier", ["lease"], _ack_before_barrier, ["leader_isolated"], seed=2),
    _defect(
        "answers_before_commit", ["acknowledged"], _answers_before_commit, ["store_trouble", "leader_crash_in_commit"]
    ),
    _defect("expires_without_proof", ["lease"], _expires_without_proof, ["leader_paused"], seed=4),
    _defect("lower_epoch_obeyed", ["stale_order"], _lower_epoch_obeyed, ["leader_paused", "connections_break"], seed=3),
)
