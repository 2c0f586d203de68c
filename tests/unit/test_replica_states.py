"""A copy of the state: a table that was forgotten would be lost at the next change of leader."""

from __future__ import annotations

import dataclasses

from controld.core import keys
from controld.core.state import Change, State
from controld.replica.states import fork
from tests.support_records import RECORDS, filled


def test_every_table_of_a_state_is_in_its_copy() -> None:
    state = State(history=3)
    for number, kind in enumerate(RECORDS, start=1):
        record = filled(kind)
        state.apply((Change(keys.of(record), record),), number)
    copy = fork(state)
    for field in dataclasses.fields(State):
        if not field.init:
            continue
        original, copied = getattr(state, field.name), getattr(copy, field.name)
        assert original, f"{field.name}: nothing in this test is in it"
        assert copied == original, field.name
        if isinstance(original, dict):
            assert copied is not original, field.name
