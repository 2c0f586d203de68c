"""Reading all of the store at one revision, in pages."""

from __future__ import annotations

from controld.store import etcd_txn
from controld.store.etcd_keys import read_history
from controld.store.etcd_session import Session
from controld.store.etcd_txn import Office, stored_record
from controld.store.etcd_wire import LOCAL_RANGE, TXN
from controld.store.port import Loaded, StoredRecord, StoreRestoringError
from virialpb.etcd.v1 import etcd_pb2 as pb

PAGE = 5_000  # of records of 500 bytes: 3 MB an answer


async def load(session: Session) -> Loaded:
    """The first page is linearizable and tells the revision; the others are read at it.

    Raises WireError, StoreCorruptError.
    """
    keys, seconds = session.keys, session.times.read
    response = await session.call(TXN, etcd_txn.first_page(keys, PAGE), seconds)
    history = settled(etcd_txn.one(response, 0))
    evidence = etcd_txn.one(response, 2)
    office = Office(history, etcd_txn.one(response, 1), None if evidence is None else evidence.value)
    revision = response.header.revision
    page = response.responses[3].response_range
    records: list[StoredRecord] = [stored_record(keys, kv) for kv in page.kvs]
    while page.more:
        page = await session.call(LOCAL_RANGE, etcd_txn.next_page(keys, page.kvs[-1].key, revision, PAGE), seconds)
        records += [stored_record(keys, kv) for kv in page.kvs]
    return Loaded(history, revision, tuple(records), office.incumbent())


def settled(kv: pb.KeyValue | None) -> int:
    """The history counter. Raises StoreCorruptError where a restore was cut short, or the key is gone."""
    history, restoring = read_history(etcd_txn.required(kv).value)
    if restoring:
        raise StoreRestoringError("etcd: a restore is under way or was cut short; run `controld restore` to its end")
    return history


async def local_history(session: Session) -> tuple[int, int]:
    """(history counter, revision) as the member alone knows them: it need not have a majority. Raises WireError."""
    asked = pb.RangeRequest(key=session.keys.history, serializable=True)
    response = await session.call(LOCAL_RANGE, asked, session.times.status)
    kv = next(iter(response.kvs), None)
    return (0 if kv is None else read_history(kv.value)[0]), response.header.revision
