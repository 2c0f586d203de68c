"""The transactions of the store, and what their answers mean. Nothing here waits or sends.

Rules (docs/design, each was seen to matter): both guards on every write, with the head written in the same
transaction; a guard on mod_revision, since create_revision survives a takeover of one transaction; a barrier holds a
Range, since etcd answers a transaction of comparisons alone from the member asked, also without a majority.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from controld.core.ids import Epoch
from controld.store.etcd_keys import Claim, Keys, end_of, head_text, history_text, opening, read_claim, read_head
from controld.store.guard import Head
from controld.store.port import Incumbent, Leadership, StoreCorruptError, StoredChange, StoredRecord
from virialpb.etcd.v1 import etcd_pb2 as pb

PUT_OVERHEAD_BYTES = 256  # what etcd counts for a put beside key and value when it compares with its quota


def get(key: bytes, *, revision: int = 0) -> pb.RequestOp:
    return pb.RequestOp(request_range=pb.RangeRequest(key=key, revision=revision))


def put(key: bytes, value: bytes, lease: int = 0) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))


def delete(key: bytes, end: bytes = b"") -> pb.RequestOp:
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key, range_end=end))


def modified_at(key: bytes, revision: int) -> pb.Compare:
    """0: the key is not there."""
    return pb.Compare(key=key, target=pb.Compare.MOD, result=pb.Compare.EQUAL, mod_revision=revision)


def holds(key: bytes, value: bytes) -> pb.Compare:
    return pb.Compare(key=key, target=pb.Compare.VALUE, result=pb.Compare.EQUAL, value=value)


def commit(keys: Keys, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> pb.TxnRequest:
    """A write of this leadership, in turn. The failure branch tells `head_of` why not."""
    compare = [modified_at(keys.leader, leadership.token)]
    if seq == 1:
        compare += [
            modified_at(keys.head, leadership.token),
            holds(keys.head, opening(leadership.epoch.history)),
        ]
    else:
        compare.append(holds(keys.head, head_text(leadership.epoch, seq - 1)))
    request = pb.TxnRequest(
        compare=compare,
        success=[put(keys.head, head_text(leadership.epoch, seq))],
        failure=[get(keys.leader), get(keys.head)],
    )
    prefix = keys.records
    add = request.success.add  # filled in place: a third of the time of building each operation and copying it
    for change in changes:
        if change.value is None:
            add().request_delete_range.key = prefix + change.key.encode()
        else:
            operation = add().request_put
            operation.key = prefix + change.key.encode()
            operation.value = change.value
    return request


def barrier(keys: Keys, leadership: Leadership) -> pb.TxnRequest:
    return pb.TxnRequest(
        compare=[
            modified_at(keys.leader, leadership.token),
            holds(keys.history, history_text(leadership.epoch.history)),
        ],
        success=[get(keys.leader)],
        failure=[get(keys.leader)],
    )


def take_over(keys: Keys, history: int, token: int, claim: Claim, lease: int) -> pb.TxnRequest:
    """Lead in place of `token`, in one transaction: the fence, the new head and the evidence."""
    evidence = put(keys.evidence, claim.nonce.encode(), lease) if claim.evidence else delete(keys.evidence)
    return pb.TxnRequest(
        compare=[modified_at(keys.leader, token), holds(keys.history, history_text(history))],
        success=[put(keys.leader, claim.encode()), put(keys.head, opening(history)), evidence],
        failure=[get(keys.leader), get(keys.history)],
    )


def attest(keys: Keys, token: int, nonce: str, lease: int) -> pb.TxnRequest:
    """Put the evidence again, under another lease."""
    return pb.TxnRequest(compare=[modified_at(keys.leader, token)], success=[put(keys.evidence, nonce.encode(), lease)])


def resign(keys: Keys, token: int) -> pb.TxnRequest:
    return pb.TxnRequest(
        compare=[modified_at(keys.leader, token)], success=[delete(keys.leader), delete(keys.evidence)]
    )


def begin_history(keys: Keys, before: bytes | None, after: bytes, *, wipe: bool = False) -> pb.TxnRequest:
    """Write the history key where it holds `before` (None: is not there); nobody leads afterwards.

    `wipe` removes the records in the same transaction: by itself, a repeated one that comes late would remove again
    what was restored meanwhile.
    """
    condition = modified_at(keys.history, 0) if before is None else holds(keys.history, before)
    removed = [delete(keys.leader), delete(keys.evidence), delete(keys.head)]
    if wipe:
        removed.append(delete(keys.records, end_of(keys.records)))
    return pb.TxnRequest(compare=[condition], success=[put(keys.history, after), *removed], failure=[get(keys.history)])


def fill(keys: Keys, restoring: bytes, records: Iterable[StoredRecord]) -> pb.TxnRequest:
    return pb.TxnRequest(
        compare=[holds(keys.history, restoring)],
        success=[put(keys.record(record.key), record.value) for record in records],
        failure=[get(keys.history)],
    )


def end_restore(keys: Keys, restoring: bytes, history: int) -> pb.TxnRequest:
    return pb.TxnRequest(
        compare=[holds(keys.history, restoring)],
        success=[put(keys.history, history_text(history))],
        failure=[get(keys.history)],
    )


def first_page(keys: Keys, page: int) -> pb.TxnRequest:
    """All of it at one revision, which the later pages name."""
    records = pb.RangeRequest(key=keys.records, range_end=end_of(keys.records), limit=page)
    return pb.TxnRequest(
        success=[get(keys.history), get(keys.leader), get(keys.evidence), pb.RequestOp(request_range=records)]
    )


def next_page(keys: Keys, after: bytes, revision: int, page: int) -> pb.RangeRequest:
    """The member answered at this revision before, so its own answer will do."""
    return pb.RangeRequest(
        key=after + b"\0", range_end=end_of(keys.records), limit=page, revision=revision, serializable=True
    )


def position(keys: Keys, revision: int) -> pb.TxnRequest:
    """Who led at `revision`, and the history now. Fails where the revision is compacted, or is none yet."""
    at = max(1, revision)
    return pb.TxnRequest(success=[get(keys.history), get(keys.leader, revision=at), get(keys.evidence, revision=at)])


def kvs(response: pb.TxnResponse, index: int) -> Sequence[pb.KeyValue]:
    return response.responses[index].response_range.kvs


def one(response: pb.TxnResponse, index: int) -> pb.KeyValue | None:
    """What a `get` found."""
    return next(iter(kvs(response, index)), None)


def head_of(response: pb.TxnResponse) -> Head:
    """Who leads and what was committed last, from the failure branch of `commit`."""
    leader, head = one(response, 0), one(response, 1)
    if leader is None or head is None:
        return Head()
    epoch, seq = read_head(head.value, leader.mod_revision)
    return Head(leader.mod_revision, epoch, seq, head.mod_revision)


def leadership_of(leader: pb.KeyValue, history: int) -> tuple[Leadership, Claim]:
    claim = read_claim(leader.value)
    token = leader.mod_revision
    return Leadership(claim.identity, token, Epoch(history, token)), claim


@dataclass(frozen=True, slots=True)
class Office:
    """The leader key and the evidence key, as one: `nonce` is that of the evidence."""

    history: int
    leader: pb.KeyValue | None = None
    nonce: bytes | None = None

    def incumbent(self) -> Incumbent | None:
        if self.leader is None:
            return None
        leadership, claim = leadership_of(self.leader, self.history)
        alive = not claim.evidence or self.nonce == claim.nonce.encode()
        return Incumbent(leadership, claim.address, alive)


def stored_record(keys: Keys, kv: pb.KeyValue) -> StoredRecord:
    return StoredRecord(keys.name(kv.key), kv.value, kv.create_revision, kv.mod_revision)


def required(kv: pb.KeyValue | None) -> pb.KeyValue:
    """The history key. Raises StoreCorruptError: it is written before anything else, and never deleted."""
    if kv is None:
        raise StoreCorruptError(
            "etcd: the history key is missing: somebody emptied it; restore a backup with `controld restore`"
        )
    return kv
