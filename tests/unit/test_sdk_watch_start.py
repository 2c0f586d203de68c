"""A watch of jobs that starts anew gives what is new: nothing lost, nothing twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virial._watch import JobWatch
from virial.models import Cursor, Job, JobChange, JobSpec, JobState, Resources, TaskSpec

SPEC = JobSpec(name="a", task=TaskSpec(command=("x",)), resources=Resources(1, 1))
NO_CURSOR = Cursor(0, 0)


def job(id_: str, revision: int) -> Job:
    return Job(id_, SPEC, JobState.PENDING, 0, 0, None, None, (), 0, 0, revision, None)


def listed(id_: str, revision: int) -> JobChange:
    return JobChange(NO_CURSOR, job(id_, revision))


def synced(revision: int) -> JobChange:
    return JobChange(Cursor(1, revision), None, synced=True)


def changed(id_: str, revision: int) -> JobChange:
    return JobChange(Cursor(1, revision), job(id_, revision))


def deleted(id_: str, revision: int) -> JobChange:
    return JobChange(Cursor(1, revision), None, deleted_id=id_)


def take(watch: JobWatch, *changes: JobChange) -> list[JobChange]:
    return [given for change in changes for given in watch.take(change)]


def test_everything_is_passed_on_while_nothing_breaks() -> None:
    watch = JobWatch(None)
    changes = [listed("a", 1), listed("b", 2), synced(2), changed("a", 3), deleted("b", 4)]
    assert take(watch, *changes) == changes
    assert watch.position == Cursor(1, 4)


def test_a_list_that_broke_off_starts_anew_and_gives_the_rest() -> None:
    watch = JobWatch(None)
    assert take(watch, listed("a", 1)) == [listed("a", 1)]
    assert watch.position is None
    assert take(watch, listed("a", 1), listed("b", 2), synced(2)) == [listed("b", 2), synced(2)]


def test_what_comes_again_after_a_resume_is_given_once() -> None:
    watch = JobWatch(None)
    take(watch, listed("a", 1), synced(1), changed("a", 3))
    assert take(watch, changed("a", 3), changed("a", 4)) == [changed("a", 4)]


def test_a_lost_history_is_bridged_by_a_list() -> None:
    watch = JobWatch(None)
    take(watch, listed("same", 1), listed("changed", 1), listed("gone", 1), synced(5))
    assert watch.list_again()
    assert watch.position is None
    before = Cursor(1, 5)
    given = take(watch, listed("changed", 7), listed("new", 8), listed("same", 1), synced(9))
    assert given == [
        JobChange(before, job("changed", 7)),
        JobChange(before, job("new", 8)),
        JobChange(Cursor(1, 9), None, deleted_id="gone"),
    ]
    assert watch.position == Cursor(1, 9)
    assert take(watch, changed("same", 10)) == [changed("same", 10)]


def test_a_list_that_breaks_off_while_bridging_goes_on_bridging() -> None:
    watch = JobWatch(None)
    take(watch, listed("a", 1), listed("b", 1), synced(1))
    assert watch.list_again()
    assert take(watch, listed("a", 1)) == []
    assert not watch.list_again()  # it lists already: whatever fails now is another failure
    assert take(watch, listed("a", 2), synced(3)) == [
        JobChange(Cursor(1, 1), job("a", 2)),
        JobChange(Cursor(1, 3), None, deleted_id="b"),
    ]


@pytest.mark.parametrize("received", [0, 1])
def test_who_came_with_a_cursor_must_list_by_himself(received: int) -> None:
    watch = JobWatch(Cursor(1, 5))
    take(watch, *[changed("a", 6)][:received])
    assert not watch.list_again()


STATES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5))


@given(histories=st.lists(STATES, min_size=1, max_size=6))
def test_whoever_follows_a_watch_over_lost_histories_has_the_present_state(histories: list[dict[str, int]]) -> None:
    watch, known = JobWatch(None), dict[str, int]()
    for number, present in enumerate(histories, start=1):
        if number > 1:
            assert watch.list_again()
        for change in take(watch, *(listed(i, r) for i, r in present.items()), replace(synced(number))):
            if change.job is not None:
                assert known.get(change.job.id) != change.job.revision
                known[change.job.id] = change.job.revision
            elif change.deleted_id:
                del known[change.deleted_id]
        assert known == present
