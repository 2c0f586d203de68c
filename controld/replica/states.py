"""States from what the store holds, and copies of them."""

from __future__ import annotations

import asyncio
from typing import Final

from controld.core.state import Change, State
from controld.store import codec
from controld.store.port import Loaded, StoredRecord

SLICE_RECORDS: Final = 250
"""Decoding so many takes a few ms: then everyone else has a turn."""


def restore(loaded: Loaded) -> State:
    """The state as loaded, each record with the revision it was created at. Raises RecordError."""
    state = State(history=loaded.history)
    for stored in loaded.records:
        _put(state, stored)
    state.revision = loaded.revision
    return state


async def restore_in_slices(loaded: Loaded) -> State:
    """The same without stalling the loop."""
    state = State(history=loaded.history)
    for count, stored in enumerate(loaded.records, start=1):
        _put(state, stored)
        if count % SLICE_RECORDS == 0:
            await asyncio.sleep(0)
    state.revision = loaded.revision
    return state


def _put(state: State, stored: StoredRecord) -> None:
    record = codec.decode(stored.key, stored.value)
    state.apply((Change(stored.key, record),), stored.modify_revision)
    state.created[stored.key] = stored.create_revision


def fork(state: State) -> State:
    """A copy that may be changed by itself; records are frozen and shared."""
    return State(
        history=state.history,
        revision=state.revision,
        cluster=state.cluster,
        nodes=dict(state.nodes),
        jobs=dict(state.jobs),
        generations={job: dict(table) for job, table in state.generations.items()},
        checkpoints={job: dict(table) for job, table in state.checkpoints.items()},
        requests=dict(state.requests),
        events=dict(state.events),
        join_tokens=dict(state.join_tokens),
        created=dict(state.created),
        modified=dict(state.modified),
        request_packs=dict(state.request_packs),
        event_packs=dict(state.event_packs),
    )
