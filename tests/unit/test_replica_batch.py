"""One transaction in the making: keys once, bounds, numbering."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from controld.core import keys
from controld.core.commands import Now
from controld.core.ids import JobId
from controld.core.model import Cluster, Event, EventPack, Job, JobState, Request, RequestPack
from controld.core.outcome import Refused, Transition
from controld.core.spec import GangSpec, JobSpec, Resources, TaskSpec
from controld.core.state import Change, State
from controld.replica.batch import Batch
from controld.store import codec
from controld.store.port import StoredChange
from virialpb.reasons import Reason

AT = Now(1, 77)


def head() -> State:
    state = State(history=1)
    state.apply((Change.put(Cluster("c", event_sequence=4, request_sequence=7)), Change.put(job("old"))), 3)
    return state


def job(name: str, owner: str = "") -> Job:
    small = JobSpec("small", GangSpec(1), Resources(1, 1), TaskSpec(("true",)))
    return Job(JobId(name), small, JobState.PENDING, 1, owner=owner)


def put(*names: str) -> Transition:
    return Transition(tuple(Change.put(job(n)) for n in names))


def delete(name: str) -> Transition:
    return Transition((Change(keys.job(JobId(name)), None),))


def answered(name: str, fingerprint: str = "f") -> Transition:
    return Transition((Change.put(Request(name, fingerprint, "s", 1)),))


def batch(operations_max: int = 10, bytes_max: int = 10_000) -> Batch[str]:
    return Batch(operations_max, bytes_max)


def test_events_are_numbered_on_from_the_head_through_the_batch() -> None:
    b, state = batch(), head()
    told = Transition(events=(Event("job.submitted", job="j"), Event("job.failed", job="j")))
    counted = Transition((Change.put(replace_counter(state)),), told.events[:1])
    assert b.admit("a", counted, state, AT)
    assert b.admit("b", told, state, AT)
    assert b.settle(state)
    assert [(e.sequence, e.create_time_unix_ns) for e in b.events] == [(5, 77), (6, 77), (7, 77)]
    assert state.cluster == Cluster("c", job_counter=9, event_sequence=7, request_sequence=7)
    assert sorted(state.events) == [5, 6, 7]
    assert b.changes["cluster"].record == state.cluster


def replace_counter(state: State) -> Cluster:
    assert state.cluster is not None
    return replace(state.cluster, job_counter=9)


def test_events_and_requests_of_a_batch_are_one_record_each() -> None:
    b, state = batch(), head()
    for slice_ in (("r1", "r2"), ("r3",)):
        for name in slice_:
            told = Transition(answered(name).changes, (Event("job.submitted", job=name),))
            assert b.admit(name, told, state, AT)
            assert name in state.requests, "the next decision may be the same request"
        assert b.settle(state)
    assert sorted(b.stored) == ["answered/0000000000000008", "cluster", "told/0000000000000005"]
    assert [c.record for c in b.changes.values() if isinstance(c.record, EventPack)] == [EventPack(5, tuple(b.events))]
    packs = [c.record for c in b.changes.values() if isinstance(c.record, RequestPack)]
    assert [(p.number, [r.request_id for r in p.requests]) for p in packs] == [(8, ["r1", "r2", "r3"])]
    assert state.cluster == Cluster("c", event_sequence=7, request_sequence=10)
    assert [e.job for e in state.events.values()] == ["r1", "r2", "r3"]
    assert state.created == {**dict.fromkeys(b.stored, 0), keys.job(JobId("old")): 3, "cluster": 3}


def test_a_key_stands_once_and_the_last_change_of_it_counts() -> None:
    b, state = batch(), head()
    assert b.admit("a", put("x"), state, AT)
    assert b.admit("b", Transition((Change.put(job("x", "me")),)), state, AT)
    assert b.admit("c", delete("x"), state, AT)
    assert b.settle(state)
    assert [s.value for s in b.stored.values()] == [None]
    assert "x" not in state.jobs


def test_a_key_that_was_deleted_is_not_put_again_in_the_same_transaction() -> None:
    """The store would keep its create revision, and a reloaded state would differ: two epochs for one lease."""
    b, state = batch(), head()
    assert b.admit("a", delete("old"), state, AT)
    assert not b.admit("b", put("old"), state, AT)
    assert "old" not in state.jobs
    assert [who for who, _ in b.answers] == ["a"]
    assert batch().admit("b", put("old"), state, AT)


def test_a_record_that_is_changed_again_takes_no_more_room() -> None:
    """Thousands of ranks write one checkpoint record: counted each time, a few of them would fill a transaction."""
    b, state = batch(), head()
    for owner in ("a" * 100, "b" * 100, "c" * 90):
        assert b.admit(owner, Transition((Change.put(job("x", owner)),)), state, AT)
        assert b.settle(state)
        assert b.size_bytes == sum(len(s.key) + len(s.value or b"") for s in b.stored.values())
    assert b.admit("d", delete("x"), state, AT)
    assert b.settle(state)
    assert b.size_bytes == len(keys.job(JobId("x")))


def test_a_record_is_encoded_once_however_often_it_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gang of thousands writes one record: encoded for each of its ranks, that is a time in the square of them."""
    encoded: list[str] = []
    real = codec.encode_change

    def counting(change: Change) -> StoredChange:
        encoded.append(change.key)
        return real(change)

    monkeypatch.setattr(codec, "encode_change", counting)
    b, state = batch(), head()
    for n in range(50):
        told = Transition((Change.put(job("x", str(n))),), (Event("job.failed"),))
        assert b.admit(str(n), told if n == 0 else replace(told, events=()), state, AT)
    assert b.settle(state)
    assert b.settle(state)
    assert sorted(encoded) == ["cluster", "jobs/x", keys.event_pack(5)]


def test_every_field_of_an_event_is_kept_when_it_is_numbered() -> None:
    """A field that is added to the record and forgotten here would be lost silently."""
    event = Event("job.failed", "j", "n", 3, "R", (("a", 1),), (("b", "c"),), "cause", 99, 98)
    assert all(getattr(event, f.name) != f.default for f in fields(Event)), "set the new field here"
    b, state = batch(), head()
    assert b.admit("a", Transition((), (event,)), state, AT)
    assert b.events == [replace(event, sequence=5, create_time_unix_ns=77)]


def test_bounds_leave_the_rest_to_the_next_transaction() -> None:
    b, state = batch(operations_max=6), head()
    assert b.admit("a", put("1", "2"), state, AT)
    assert b.admit("b", Transition(put("2", "3").changes, (Event("job.failed"),)), state, AT)
    for n in range(20):
        assert b.admit("c", answered(f"r{n}"), state, AT)
    assert not b.admit("d", put("4"), state, AT)
    assert "4" not in state.jobs
    assert b.settle(state)
    assert len(b.stored) == 6


def test_more_bytes_than_fit_are_told_when_it_is_settled() -> None:
    b, state = batch(operations_max=20, bytes_max=400), head()
    settled: list[bool] = []
    for n in range(10):
        assert b.admit(str(n), put(str(n)), state, AT)
        settled.append(b.settle(state))
        assert settled[-1] is (b.size_bytes <= 400)
    assert settled == sorted(settled, reverse=True)
    assert len(set(settled)) == 2


def test_a_copy_is_not_changed_by_what_is_admitted_later() -> None:
    b, state = batch(), head()
    assert b.admit("a", Transition(put("1").changes, (Event("job.failed"),)), state, AT)
    assert b.settle(state)
    before = b.copy()
    kept = (dict(before.stored), dict(before.changes), list(before.events), list(before.answers), before.size_bytes)
    assert b.admit("b", Transition(put("1", "2").changes, (Event("job.failed"),)), state, AT)
    assert b.settle(state)
    assert sorted(b.keys_since(before)) == ["cluster", "jobs/1", "jobs/2", keys.event_pack(5)]
    assert kept == (before.stored, before.changes, before.events, before.answers, before.size_bytes)


def test_what_is_too_big_for_any_transaction_goes_alone() -> None:
    b, state = batch(operations_max=2), head()
    assert b.admit("a", put("1", "2", "3"), state, AT)
    assert not b.admit("b", put("4"), state, AT)


def test_refusals_ride_along_and_change_nothing() -> None:
    b, state = batch(), head()
    assert b.admit("a", Refused(Reason.NOT_FOUND), state, AT)
    assert b.stored == {}
    assert [type(outcome) for _, outcome in b.answers] == [Refused]
    assert JobId("x") not in state.jobs
