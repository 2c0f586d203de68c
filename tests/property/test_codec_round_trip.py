"""Every record comes back from its stored bytes as it was, whatever its fields hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controld.core import keys
from controld.core.model import Event, Generation, Record
from controld.core.state import Change
from controld.store import codec
from controld.store.port import RecordError
from tests.support_records import RECORDS, strategy

records: st.SearchStrategy[Record] = st.one_of([strategy(kind) for kind in RECORDS])


@given(records)
def test_round_trip(record: Record) -> None:
    assert codec.decode(keys.of(record), codec.encode(record)) == record


@given(records)
def test_equal_records_have_equal_bytes(record: Record) -> None:
    key = keys.of(record)
    assert codec.encode(codec.decode(key, codec.encode(record))) == codec.encode(record)


@given(records)
def test_changes_round_trip(record: Record) -> None:
    for change in (Change.put(record), Change(keys.of(record), None)):
        assert codec.decode_change(codec.encode_change(change)) == change


@given(records, st.data())
def test_damaged_bytes_are_refused_or_read_as_a_record_of_that_key(record: Record, data: st.DataObject) -> None:
    """Never another exception, never the record of another key. (Whether a bit flipped, the stores' checksums say.)"""
    key, value = keys.of(record), bytearray(codec.encode(record))
    if value:
        value[data.draw(st.integers(0, len(value) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    damaged = bytes(value[: data.draw(st.integers(0, len(value)))])
    try:
        read = codec.decode(key, damaged)
    except RecordError:
        return
    assert keys.of(read) == key


@given(strategy(Generation), strategy(Event))
def test_bytes_under_the_key_of_another_kind_are_refused(generation: Generation, event: Event) -> None:
    try:
        read = codec.decode(keys.of(generation), codec.encode(event))
    except RecordError:
        return
    assert keys.of(read) == keys.of(generation)
