"""The log's packing of a commit loses nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controld.store.port import StoredChange
from controld.store.sqlite_log import pack, unpack

changes = st.builds(
    StoredChange,
    key=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
    value=st.none() | st.binary(max_size=50),
)


@given(st.lists(changes, max_size=8))
def test_round_trip(commit: list[StoredChange]) -> None:
    assert unpack(pack(commit)) == tuple(commit)
