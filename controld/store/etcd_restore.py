"""Backups of an etcd, and bringing one back. A backup is the same file as that of the embedded store.

So one machine grows to three, and three shrink to one, by backup and restore; and a backup does not depend on the
version or the members of the etcd it came from. It is brought back by transactions: the revisions go on, where those
of a snapshot of etcd would go back. The history counter is raised all the same, since every lease and cursor from
before is void.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from controld.store import etcd_txn, sqlite_db, sqlite_file
from controld.store.etcd_keys import history_text, read_history
from controld.store.etcd_probe import Limits
from controld.store.etcd_session import Attempts, Session
from controld.store.etcd_wire import TXN, WireError
from controld.store.port import Loaded, OutcomeUnknownError, StoredRecord, StoreError
from virialpb.etcd.v1 import etcd_pb2 as pb

_RECORD_OVERHEAD_BYTES = 64


def write_backup(path: Path, loaded: Loaded) -> None:
    """Blocking. Raises OSError, StoreError; `path` is then what it was before."""
    with sqlite_file.new_file(path) as partial:
        sqlite_db.write(partial, loaded)
        sqlite_file.check(partial)


def read_backup(path: Path) -> Loaded:
    """Blocking. Raises OSError, StoreCorruptError."""
    sqlite_file.check(path)
    return sqlite_db.read(path)


async def restore(session: Session, limits: Limits, backup: Loaded, *, history_seen: int) -> int:
    """Replace all records; nobody leads afterwards. The new history counter.

    While it is under way, or was cut short, the store refuses to be loaded and led, and says so; run it again then.
    Records keep the order of their create revisions: a later lease has no smaller epoch than an earlier one.
    Raises OutcomeUnknownError, StoreError.
    """
    response = await _through(session, pb.TxnRequest(success=[etcd_txn.get(session.keys.history)]))
    before = etcd_txn.one(response, 0)
    current = 0 if before is None else read_history(before.value)[0]
    history = 1 + max(current, backup.history, history_seen)
    restoring = history_text(history, restoring=True)
    before_value = None if before is None else before.value
    await _required(session, etcd_txn.begin_history(session.keys, before_value, restoring, wipe=True), restoring)
    for records in _parts(backup.records, limits):
        await _required(session, etcd_txn.fill(session.keys, restoring, records))
    done = history_text(history)
    await _required(session, etcd_txn.end_restore(session.keys, restoring, history), done)
    return history


def _parts(records: Sequence[StoredRecord], limits: Limits) -> Iterator[list[StoredRecord]]:
    part: list[StoredRecord] = []
    size_bytes = 0
    for record in sorted(records, key=lambda record: (record.create_revision, record.key)):
        record_bytes = len(record.key.encode()) + len(record.value) + _RECORD_OVERHEAD_BYTES
        if part and (len(part) == limits.operations_max or size_bytes + record_bytes > limits.bytes_max):
            yield part
            part, size_bytes = [], 0
        part.append(record)
        size_bytes += record_bytes
    if part:
        yield part


async def _required(session: Session, request: pb.TxnRequest, result: bytes | None = None) -> None:
    """Carry out; `result`: what the history key holds when an attempt whose answer was lost has done it already."""
    response = await _through(session, request)
    if response.succeeded:
        return
    history = etcd_txn.one(response, 0)
    if history is None or history.value != result:
        raise StoreError("another restore of this store is under way; run this one again when it is over")


async def _through(session: Session, request: pb.TxnRequest) -> pb.TxnResponse:
    """Every step may be repeated, and its first try may arrive after the second: it puts what is put there anyway."""
    attempts = Attempts(session.times, session.times.read * 3)
    doubt: WireError | None = None
    while await attempts.next():
        try:
            return await session.call(TXN, request, max(attempts.timeout, session.times.read))
        except WireError as error:
            doubt = error
    raise OutcomeUnknownError(f"the restore was cut short, run it again: {doubt}")
