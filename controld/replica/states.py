"""States from what the store holds, and copies of them."""

from __future__ import annotations

from controld.core.state import Change, State
from controld.store import codec
from controld.store.port import Loaded


def restore(loaded: Loaded) -> State:
    """The state as loaded, each record with the revision it was created at. Raises RecordError."""
    state = State(history=loaded.history)
    for stored in loaded.records:
        record = codec.decode(stored.key, stored.value)
        state.apply((Change(stored.key, record),), stored.modify_revision)
        state.created[stored.key] = stored.create_revision
    state.revision = loaded.revision
    return state


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
        created=dict(state.created),
        modified=dict(state.modified),
    )
