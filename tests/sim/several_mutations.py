"""Defects of several controllers: in the store's guards, in its watch, in the election, in what a leader promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from controld.core.commands import ExpireLeases, MarkExpired
from controld.replica import elector, replica
from controld.replica.election import Ask, Knowledge, TakeOver, Timings, Why, decide
from controld.replica.stall import StallWatch
from controld.replica.ticker import Ticker
from controld.replica.writer import Writer
from controld.store import etcd_txn
from controld.store.etcd_watch import Feed
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


# -- the election --------------------------------------------------------------------------------------------------


def _deposes_alone() -> tuple[Patch, ...]:
    def hasty(now_ns: int, known: Knowledge, timings: Timings) -> Any:
        action = decide(now_ns, known, timings)
        return TakeOver(action.token, Why.AGREED) if isinstance(action, Ask) else action

    return ((elector, "decide", hasty),)


def _pings_without_proof() -> tuple[Patch, ...]:
    def may_ping(now_ns: int, proved_ns: int, timings: Timings) -> bool:
        del now_ns, proved_ns, timings
        return True

    return ((replica, "may_ping", may_ping),)


# -- what a leader promises ----------------------------------------------------------------------------------------


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
    _defect("deposes_alone", ["deposed"], _deposes_alone, ["peers_isolated"]),
    _defect("pings_without_proof", ["stale_ping"], _pings_without_proof, ["socket_cut", "member_isolated"]),
    _defect(
        "answers_before_commit", ["acknowledged"], _answers_before_commit, ["store_trouble", "leader_crash_in_commit"]
    ),
    _defect("expires_without_proof", ["lease"], _expires_without_proof, ["leader_paused"]),
)
