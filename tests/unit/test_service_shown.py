"""What many watches show of a commit is made once; nobody is shown what was made for another one."""

from __future__ import annotations

from controld.core.model import Cluster
from controld.core.state import Change, State
from controld.service import shown
from controld.service.shown import Shown


def state(revision: int) -> State:
    made = State(history=1)
    made.apply((Change.put(Cluster("c", job_counter=revision)),), revision)
    return made


class Counted:
    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, key: str, of: State) -> str:
        assert of.cluster is not None
        self.made.append(key)
        return f"{key} as of {of.cluster.job_counter}"


def test_a_hundred_readers_cost_as_much_as_one() -> None:
    counted = Counted()
    shared, at = Shown(counted), state(5)
    for _ in range(100):
        assert [shared.of(key, at) for key in ("a", "b")] == ["a as of 5", "b as of 5"]
    assert counted.made == ["a", "b"]


def test_a_later_commit_and_another_leadership_are_shown_as_they_are() -> None:
    shared, one = Shown(Counted()), state(5)
    assert shared.of("a", one) == "a as of 5"
    one.apply((Change.put(Cluster("c", job_counter=6)),), 6)
    assert shared.of("a", one) == "a as of 6"
    other = state(6)
    other.apply((Change.put(Cluster("c", job_counter=66)),), 6)
    assert shared.of("a", other) == "a as of 66"


def test_what_is_asked_for_anew_is_made_anew() -> None:
    counted = Counted()
    shared, at = Shown(counted), state(5)
    assert [shared.anew("a", at), shared.anew("a", at)] == ["a as of 5"] * 2
    assert counted.made == ["a", "a"]


def test_only_so_much_is_kept() -> None:
    counted = Counted()
    shared, at = Shown(counted), state(5)
    names = [str(number) for number in range(2 * shown.KEPT_MAX)]
    assert [shared.of(name, at) for name in names] == [f"{name} as of 5" for name in names]
    shared.of(names[-1], at)
    assert len(counted.made) == len(names)
    shared.of(names[0], at)
    assert counted.made[-1] == names[0], "the oldest went"
