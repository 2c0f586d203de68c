"""The state machine of etcd: revisions, transactions, compaction, leases. Every version of every key is kept, so that
a member that is behind can answer as of what it has applied.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import grpc

from controld.store.etcd_wire import WireError
from virialpb.etcd.v1 import etcd_pb2 as pb

FIRST_REVISION = 1
OPERATIONS_MAX = 1_024
REQUEST_BYTES_MAX = 2 << 20


def no_space() -> WireError:
    return WireError(grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded")


def compacted() -> WireError:
    return WireError(grpc.StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted")


def future() -> WireError:
    return WireError(grpc.StatusCode.OUT_OF_RANGE, "etcdserver: mvcc: required revision is a future revision")


def no_lease() -> WireError:
    return WireError(grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found")


def require_size(request: pb.TxnRequest) -> None:
    """As the member asked checks it, before anything else. Raises WireError."""
    if max(len(request.compare), len(request.success), len(request.failure)) > OPERATIONS_MAX:
        raise WireError(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: too many operations in txn request")
    if len(request.success) > 16 and request.ByteSize() > REQUEST_BYTES_MAX:
        raise WireError(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large")
    for operation in request.success:
        if len(operation.request_delete_range.key) + len(operation.request_put.value) > REQUEST_BYTES_MAX:
            raise WireError(grpc.StatusCode.INVALID_ARGUMENT, "etcdserver: request is too large")


def writes(request: pb.TxnRequest) -> bool:
    return any(not operation.HasField("request_range") for operation in (*request.success, *request.failure))


def is_local(request: pb.TxnRequest) -> bool:
    """Answered by the member asked from what it has: comparisons alone, or ranges that are all serializable."""
    return all(
        operation.HasField("request_range") and operation.request_range.serializable
        for operation in (*request.success, *request.failure)
    )


@dataclass(slots=True)
class KeyHistory:
    """Versions in the order of their revisions; a deletion is a version without a value."""

    revisions: list[int] = field(default_factory=list[int])
    versions: list[pb.KeyValue | None] = field(default_factory=list["pb.KeyValue | None"])

    def at(self, revision: int) -> pb.KeyValue | None:
        if not self.revisions:
            return None
        if self.revisions[-1] <= revision:
            return self.versions[-1]
        index = bisect_left(self.revisions, revision + 1) - 1
        return self.versions[index] if index >= 0 else None

    def set(self, revision: int, kv: pb.KeyValue | None) -> None:
        if self.revisions and self.revisions[-1] == revision:
            self.versions[-1] = kv
        else:
            self.revisions.append(revision)
            self.versions.append(kv)


class Mvcc:
    """The newest state there is, and how it came about. `events` holds those of each revision."""

    def __init__(self) -> None:
        self.revision = FIRST_REVISION
        self.events: dict[int, tuple[pb.Event, ...]] = {}
        self.compacted = 0
        self._keys: dict[bytes, KeyHistory] = {}
        self._sorted: list[bytes] = []
        self._leases: dict[int, dict[bytes, None]] = {}

    # -- reading, as of a revision that a member has applied

    def range(self, request: pb.RangeRequest, revision: int, compacted_revision: int) -> pb.RangeResponse:
        """Raises WireError."""
        at = request.revision or revision
        if at > revision:
            raise future()
        if at < compacted_revision:
            raise compacted()
        response = pb.RangeResponse()
        if not request.range_end:
            history = self._keys.get(request.key)
            kv = None if history is None else history.at(at)
            found = [] if kv is None else [kv]
        else:
            first, last = bisect_left(self._sorted, request.key), bisect_left(self._sorted, request.range_end)
            kvs = (self._keys[key].at(at) for key in self._sorted[first:last])
            found = [kv for kv in kvs if kv is not None]
        response.count = len(found)
        if not request.count_only:
            if request.limit and len(found) > request.limit:
                response.more = True
                found = found[: request.limit]
            response.kvs.extend(found)
        return response

    def holds(self, compare: pb.Compare, revision: int) -> bool:
        history = self._keys.get(compare.key)
        kv = None if history is None else history.at(revision)
        match compare.target:
            case pb.Compare.VALUE:
                if kv is None:
                    return False  # etcd: a value of nothing equals nothing
                left, right = kv.value, compare.value
            case pb.Compare.MOD:
                left, right = 0 if kv is None else kv.mod_revision, compare.mod_revision
            case pb.Compare.CREATE:
                left, right = 0 if kv is None else kv.create_revision, compare.create_revision
            case pb.Compare.VERSION:
                left, right = 0 if kv is None else kv.version, compare.version
            case _:
                raise NotImplementedError(f"compare of {compare.target}")
        match compare.result:
            case pb.Compare.EQUAL:
                return left == right
            case pb.Compare.NOT_EQUAL:
                return left != right
            case pb.Compare.GREATER:
                return left > right  # type: ignore[operator]
            case _:
                return left < right  # type: ignore[operator]

    def read_txn(self, request: pb.TxnRequest, revision: int, compacted_revision: int) -> pb.TxnResponse:
        """A transaction that writes nothing. Raises WireError."""
        succeeded = all(self.holds(compare, revision) for compare in request.compare)
        response = pb.TxnResponse(succeeded=succeeded)
        response.header.revision = revision
        for operation in request.success if succeeded else request.failure:
            found = self.range(operation.request_range, revision, compacted_revision)
            response.responses.add().response_range.CopyFrom(found)
        return response

    # -- applying, in the order of the log

    def apply_txn(self, request: pb.TxnRequest, *, full: bool) -> pb.TxnResponse:
        """Raises WireError; then nothing has changed. `full`: the space alarm is set."""
        if full and any(op.HasField("request_put") for op in (*request.success, *request.failure)):
            raise no_space()
        succeeded = all(self.holds(compare, self.revision) for compare in request.compare)
        operations = request.success if succeeded else request.failure
        for operation in operations:
            lease = operation.request_put.lease
            if lease and lease not in self._leases:
                raise no_lease()
        response = pb.TxnResponse(succeeded=succeeded)
        revision = self.revision + 1
        events: dict[bytes, pb.Event] = {}
        for operation in operations:
            answer = response.responses.add()
            if operation.HasField("request_put"):
                events[operation.request_put.key] = self._put(operation.request_put, revision)
                answer.response_put.SetInParent()
            elif operation.HasField("request_delete_range"):
                gone = self._delete(operation.request_delete_range, revision)
                events.update((event.kv.key, event) for event in gone)
                answer.response_delete_range.deleted = len(gone)
            else:
                now = revision if events else self.revision
                answer.response_range.CopyFrom(self.range(operation.request_range, now, self.compacted))
        self._advance(events)
        response.header.revision = self.revision
        return response

    def _advance(self, events: dict[bytes, pb.Event]) -> None:
        if events:
            self.revision += 1
            self.events[self.revision] = tuple(events.values())

    def _put(self, put: pb.PutRequest, revision: int) -> pb.Event:
        history = self._keys.get(put.key)
        if history is None:
            history = self._keys[put.key] = KeyHistory()
            insort(self._sorted, put.key)
        former = history.at(revision)
        if former is not None and former.lease:
            self._leases.get(former.lease, {}).pop(put.key, None)
        kv = pb.KeyValue(
            key=put.key,
            value=put.value,
            mod_revision=revision,
            create_revision=revision if former is None else former.create_revision,
            version=1 if former is None else former.version + 1,
            lease=put.lease,
        )
        if put.lease:
            self._leases[put.lease][put.key] = None
        history.set(revision, kv)
        return pb.Event(type=pb.Event.PUT, kv=kv)

    def _delete(self, asked: pb.DeleteRangeRequest, revision: int) -> list[pb.Event]:
        keys = [asked.key]
        if asked.range_end:
            first, last = bisect_left(self._sorted, asked.key), bisect_left(self._sorted, asked.range_end)
            keys = self._sorted[first:last]
        return [event for key in keys if (event := self._delete_one(key, revision)) is not None]

    def _delete_one(self, key: bytes, revision: int) -> pb.Event | None:
        history = self._keys.get(key)
        kv = None if history is None else history.at(revision)
        if history is None or kv is None:
            return None
        if kv.lease:
            self._leases.get(kv.lease, {}).pop(key, None)
        history.set(revision, None)
        return pb.Event(type=pb.Event.DELETE, kv=pb.KeyValue(key=key, mod_revision=revision))

    def apply_grant(self, lease: int, *, full: bool) -> None:
        """Raises WireError."""
        if full:
            raise no_space()
        self._leases.setdefault(lease, {})

    def apply_revoke(self, lease: int) -> None:
        """Its keys are gone. Raises WireError."""
        keys = self._leases.pop(lease, None)
        if keys is None:
            raise no_lease()
        revision = self.revision + 1
        events = {key: event for key in keys if (event := self._delete_one(key, revision)) is not None}
        self._advance(events)

    def has_lease(self, lease: int) -> bool:
        return lease in self._leases

    def apply_compaction(self, revision: int) -> None:
        """Raises WireError."""
        if revision <= self.compacted:
            raise compacted()
        if revision > self.revision:
            raise future()
        self.compacted = revision

    def value(self, key: bytes) -> pb.KeyValue | None:
        history = self._keys.get(key)
        return None if history is None else history.at(self.revision)
