"""Events and requests: looked up one by one, stored and dropped by the commit, and one by one where older ones were."""

from __future__ import annotations

import pytest

from controld.core import keys
from controld.core.commands import Now, Prune
from controld.core.model import Cluster, Event, EventPack, Request, RequestPack
from controld.core.outcome import Transition
from controld.core.state import Change, State
from controld.core.transitions import decide
from controld.core.transitions import prune as pruning
from controld.core.transitions.prune import DELETES_MAX, events_overdue

NOW = Now(1, 1_000)


def events(first: int, count: int) -> EventPack:
    return EventPack(first, tuple(Event("job.failed", sequence=n) for n in range(first, first + count)))


def requests(number: int, *ids: str, at: int = 10) -> RequestPack:
    return RequestPack(number, tuple(Request(id_, "f", "s", at) for id_ in ids))


def state(*records: EventPack | RequestPack | Event | Request) -> State:
    made = State(history=1)
    made.apply((Change.put(Cluster("c")),), 1)
    for revision, record in enumerate(records, start=2):
        made.apply((Change.put(record),), revision)
    return made


def pruned(before: State, *, requests_before: int = 0, events_max: int = 1_000) -> list[str]:
    outcome = decide(before, Prune(requests_before, events_max, 1_000), NOW)
    assert isinstance(outcome, Transition)
    before.apply(outcome.changes, before.revision + 1)
    return [change.key for change in outcome.changes]


def test_each_is_found_with_the_revision_of_its_commit() -> None:
    found = state(events(1, 2), requests(1, "a", "b"), events(3, 1))
    assert sorted(found.events) == [1, 2, 3]
    assert [found.event_revision(n) for n in (1, 2, 3, 4)] == [2, 2, 4, 0]
    assert set(found.requests) == {"a", "b"}
    assert set(found.created) == {"cluster", keys.event_pack(1), keys.event_pack(3), keys.request_pack(1)}


def test_the_oldest_commits_go_and_as_many_events_as_are_to_be_kept_stay() -> None:
    kept = state(events(1, 4), events(5, 1), events(6, 3))
    assert pruned(kept, events_max=6) == []
    assert pruned(kept, events_max=4) == [keys.event_pack(1)]
    assert sorted(kept.events) == [5, 6, 7, 8]
    assert pruned(kept, events_max=0) == [keys.event_pack(5), keys.event_pack(6)]
    assert (kept.events, kept.event_packs) == ({}, {})
    assert kept.event_revision(6) == 0


def test_what_was_put_back_is_still_the_oldest() -> None:
    """A decision that was undone puts what it had deleted at the end of every table."""
    kept = state(events(1, 2), events(3, 2), events(5, 2))
    key = keys.event_pack(1)
    pack = kept.event_packs[key]
    kept.apply((Change(key, None),), 0)
    kept.apply((Change(key, EventPack(1, pack)),), 0)
    assert pruned(kept, events_max=4) == [key]


def test_old_requests_go_when_the_last_of_their_commit_is_old() -> None:
    kept = state(requests(1, "a", at=10), requests(2, "b", "c", at=20))
    mixed = RequestPack(4, (Request("d", "f", "s", 10), Request("e", "f", "s", 30)))
    kept.apply((Change.put(mixed),), 9)
    assert pruned(kept, requests_before=25) == [keys.request_pack(1), keys.request_pack(2)]
    assert set(kept.requests) == {"d", "e"}


def test_not_every_young_request_is_looked_at_and_a_wrong_clock_keeps_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pruning, "YOUNG_MAX", 3)
    future = [requests(number, f"f{number}", at=10_000) for number in range(1, 4)]
    old = [requests(number, f"o{number}", at=10) for number in range(4, 6)]
    young = [requests(number, f"y{number}", at=100) for number in range(6, 12)]
    kept = state(*future, *old, *young, requests(12, "last", at=10))
    assert pruned(kept, requests_before=50) == [keys.request_pack(4), keys.request_pack(5)]
    assert "last" in kept.requests, "it would be reached when those before it have gone"


def test_a_request_id_that_is_used_again_outlives_its_first_use() -> None:
    kept = state(requests(1, "a", at=10), requests(2, "a", at=50))
    assert pruned(kept, requests_before=20) == [keys.request_pack(1)]
    assert kept.requests == {"a": Request("a", "f", "s", 50)}


def test_single_records_of_before_are_found_and_go_as_packs_do() -> None:
    one, two = Event("job.failed", sequence=1), Event("job.failed", sequence=2)
    kept = state(one, two, Request("a", "f", "s", 10), events(3, 2), requests(1, "b", at=30))
    assert sorted(kept.events) == [1, 2, 3, 4]
    assert kept.event_revision(2) == 3
    assert kept.record(keys.event(1)) == one
    assert pruned(kept, events_max=3, requests_before=20) == [keys.request("a"), keys.event(1)]
    assert sorted(kept.events) == [2, 3, 4]
    assert set(kept.requests) == {"b"}


@pytest.mark.parametrize(
    ("packs", "overdue"), [((events(1, DELETES_MAX + 10),), False), ((events(1, 300), events(301, 1)), True)]
)
def test_events_are_overdue_only_where_a_prune_would_drop_some(packs: tuple[EventPack, ...], overdue: bool) -> None:
    """Or one would be asked for with every tick, and do nothing."""
    kept = state(*packs)
    assert events_overdue(kept, 1) is overdue
    assert bool(pruned(kept, events_max=1)) is overdue


def test_a_request_that_was_only_foreseen_can_be_forgotten() -> None:
    kept = state(requests(1, "a"))
    foreseen = Request("b", "f", "s", 1)
    kept.foresee(foreseen)
    assert kept.requests["b"] is foreseen
    kept.forget(foreseen)
    kept.forget(Request("a", "f", "s", 10))
    assert set(kept.requests) == {"a"}, "another record of that id is not the one that was foreseen"
