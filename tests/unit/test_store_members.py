"""What is wrong with the members of a store, and what the leader does about it: pictures in, findings and steps out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from controld.replica.survey import ControllerSeen, Picture, Role, Told
from controld.service.store_problems import in_words, memberless_in_words
from controld.store import members
from controld.store.members import (
    LAG_ENTRIES_MAX,
    Ailment,
    Compact,
    Defragment,
    Disarm,
    Finding,
    Listed,
    Look,
    Promote,
    Seen,
    Step,
    assess,
    old_version,
    plan,
)

MIB = 1 << 20
LIMIT, QUOTA = 100 * MIB, 170 * MIB


def seen(id_: int, *, learner: bool = False, lag: int = 0, silent: bool = False, **look: object) -> Seen:
    listed = Listed(id_, f"m{id_}", f"https://h{id_}:2380", learner)
    if silent:
        return Seen(listed)
    made = Look(id_, "3.5.30", 1, 1_000, size_bytes=50 * MIB, used_bytes=40 * MIB)
    return Seen(listed, replace(made, **look), f"h{id_}:7700", lag)  # type: ignore[arg-type]


def three(**of_second: object) -> tuple[Seen, ...]:
    return seen(1), seen(2, **of_second), seen(3)  # type: ignore[arg-type]


def step(seen_: tuple[Seen, ...], **done: object) -> Step | None:
    return plan(seen_, limit_bytes=LIMIT, quota_bytes=QUOTA, **done)  # type: ignore[arg-type]


def ailments(seen_: tuple[Seen, ...]) -> list[Ailment]:
    return [finding.ailment for finding in assess(seen_, LIMIT)]


class TestAssess:
    def test_nothing_is_wrong_with_three_that_are_in_step(self) -> None:
        assert assess(three(), LIMIT) == ()

    def test_what_each_ailment_looks_like(self) -> None:
        assert ailments(three(silent=True)) == [Ailment.SILENT]
        assert ailments(three(lag=LAG_ENTRIES_MAX + 1)) == [Ailment.LAGS]
        assert ailments(three(leader_id=0)) == [Ailment.BLIND]
        assert ailments(three(version="3.4.23")) == [Ailment.OLD_VERSION, Ailment.MIXED_VERSIONS]
        assert ailments(three(full_ids=(2,))) == [Ailment.SPACE_ALARM]
        assert ailments(three(corrupt_ids=(3,))) == [Ailment.CORRUPT]
        assert ailments(three(used_bytes=95 * MIB)) == [Ailment.SPACE_SHORT]
        assert ailments((*three(), seen(4))) == [Ailment.EVEN]
        assert ailments((*three(), seen(4, learner=True, silent=True))) == [Ailment.LEARNS]
        unstarted = Seen(Listed(4, "", "https://h4:2380", learner=True))
        assert assess((*three(), unstarted), LIMIT) == (Finding(Ailment.NOT_STARTED, ("https://h4:2380",)),)

    def test_a_majority_is_missing_when_nobody_who_answers_knows_a_leader(self) -> None:
        members = (seen(1, leader_id=0), seen(2, silent=True), seen(3, silent=True))
        assert assess(members, LIMIT)[0] == Finding(Ailment.NO_MAJORITY, ("m1",), (1, 3, 2))
        two_left = (seen(1, leader_id=3), seen(2, silent=True), seen(3, leader_id=3))
        assert ailments(two_left) == [Ailment.SILENT]

    @pytest.mark.parametrize("ailment", Ailment)
    def test_every_ailment_has_words_that_say_what_to_do(self, ailment: Ailment) -> None:
        numbers = {Ailment.NO_MAJORITY: (1, 3, 2), Ailment.LAGS: (9_999,), Ailment.EVEN: (4, 1)}
        finding = Finding(ailment, ("m2",), numbers.get(ailment, (95 * MIB, LIMIT)), ("3.4.23",))
        (text,) = in_words([finding])
        assert "m2" in text or ailment in (Ailment.EVEN, Ailment.SPACE_SHORT, Ailment.MIXED_VERSIONS)
        assert len(text) > 40

    @pytest.mark.parametrize(
        ("version", "old"),
        [("3.4.23", True), ("3.4.38", False), ("3.5.16", True), ("3.5.23", False), ("3.6.1", False), ("dev", True)],
    )
    def test_versions_with_known_faults(self, version: str, old: bool) -> None:
        assert old_version(version) is old


class TestPlan:
    def test_nothing_is_done_while_nothing_is_wrong(self) -> None:
        assert step(three()) is None
        assert step(()) is None

    def test_an_alarm_is_met_by_compacting_then_one_member_after_the_other_the_leading_one_last_then_disarming(
        self,
    ) -> None:
        full = tuple(seen(i, full_ids=(1, 2), size_bytes=QUOTA, used_bytes=QUOTA) for i in (1, 2, 3))
        assert step(full) == Compact()
        done: dict[int, int] = {}
        order: list[int] = []
        members = full
        while isinstance(found := step(members, compacted=True, defragmented=done), Defragment):
            id_ = found.member.listed.id
            order.append(id_)
            done[id_] = 10 * MIB
            members = tuple(
                replace(m, look=replace(m.look, size_bytes=10 * MIB, used_bytes=10 * MIB))
                if m.listed.id == id_ and m.look is not None
                else m
                for m in members
            )
        assert order == [2, 1], "m1 leads; m3 has no alarm, and its file is no larger than what is in it"
        assert found == Disarm((1, 2))

    def test_no_member_is_defragmented_while_another_lags_is_silent_or_is_at_it(self) -> None:
        bloated = seen(2, size_bytes=QUOTA, used_bytes=10 * MIB)
        assert step((seen(1), bloated, seen(3))) == Defragment(bloated)
        for other in (
            seen(3, lag=LAG_ENTRIES_MAX + 1),
            seen(3, silent=True),
            seen(3, leader_id=0),
            seen(3, defragmenting=True),
        ):
            assert step((seen(1), bloated, other)) is None, other

    def test_an_alarm_stays_while_a_file_is_near_the_quota_that_set_it_off(self) -> None:
        full = tuple(seen(i, full_ids=(2,), size_bytes=QUOTA, used_bytes=QUOTA) for i in (1, 2, 3))
        as_large = {1: QUOTA, 2: QUOTA, 3: QUOTA}
        assert step(full, compacted=True, defragmented=as_large) is None
        silent = (seen(1, full_ids=(2,)), seen(2, silent=True), seen(3, full_ids=(2,)))
        assert step(silent, compacted=True) is None, "nobody knows how large it is"

    def test_a_learner_gets_its_vote_only_from_a_majority_that_is_in_step(self) -> None:
        learner = seen(4, learner=True, silent=True)
        assert step((*three(), learner)) == Promote(4)
        assert step((*three(), learner), learning={4}) is None
        assert step((*three(silent=True), learner)) == Promote(4)
        assert step((seen(1), seen(2, silent=True), seen(3, leader_id=0), learner)) is None


def lagging_one_stops_all() -> None:
    bloated = seen(2, size_bytes=QUOTA, used_bytes=10 * MIB)
    assert step((seen(1), bloated, seen(3, lag=LAG_ENTRIES_MAX + 1))) is None


def votes_come_from_a_majority() -> None:
    assert step((seen(1), seen(2, silent=True), seen(3, silent=True), seen(4, learner=True, silent=True))) is None


def an_alarm_that_would_come_back_stays() -> None:
    full = tuple(seen(i, full_ids=(2,), size_bytes=QUOTA, used_bytes=QUOTA) for i in (1, 2, 3))
    assert step(full, compacted=True, defragmented={1: QUOTA, 2: QUOTA, 3: QUOTA}) is None


def always(_: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("defect", "scenario", "attribute", "value"),
    [
        ("defragments_while_one_lags", lagging_one_stops_all, "LAG_ENTRIES_MAX", 1 << 60),
        ("votes_without_a_majority", votes_come_from_a_majority, "_majority_in_step", always),
        ("disarms_what_is_still_full", an_alarm_that_would_come_back_stays, "WORTHWHILE", 2.0),
    ],
)
def test_the_plan_catches_its_defects(
    defect: str, scenario: Callable[[], None], attribute: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario()
    monkeypatch.setattr(members, attribute, value)
    with pytest.raises(AssertionError):
        scenario()
    assert defect


def test_several_silent_members_are_told_of_as_several() -> None:
    one, two = (in_words([Finding(Ailment.SILENT, names)])[0] for names in (("c2",), ("c2", "c3")))
    assert one.startswith("store member c2 does not answer")
    assert "replace c2`" in one
    assert two.startswith("store members c2, c3 do not answer")
    assert "replace NAME`" in two


def told(member: Seen | None, *, silent: bool = False) -> ControllerSeen:
    name = "c9" if member is None else f"c{member.listed.id}"
    look = None if member is None else member.look
    return ControllerSeen(f"{name}:7700", None if silent else Told(name, Role.FOLLOWS, "0.1.0", look))


@pytest.mark.parametrize(
    ("members_", "controllers", "alone"),
    [
        (three(), [told(one) for one in three()], 0),
        (three(silent=True), [told(one) for one in three(silent=True)], 0),  # the member is told of
        (three(silent=True), [told(one, silent=one.look is None) for one in three(silent=True)], 0),
        (three()[:2], [told(None), *map(told, three()[:2])], 1),  # the third was removed
        ((*three()[:2], Seen(Listed(3, "", "https://h3:2380"))), [told(None), *map(told, three()[:2])], 1),  # and added
        (three(silent=True), [told(None), *(told(one, silent=one.look is None) for one in three(silent=True))], 1),
        ((), [told(None)], 0),  # a store whose members are not ours
    ],
)
def test_a_controller_whose_member_was_removed_is_told_of(
    members_: tuple[Seen, ...], controllers: list[ControllerSeen], alone: int
) -> None:
    problems = memberless_in_words(Picture(tuple(controllers), members_))
    assert len(problems) == alone
    assert all("controller c9 (c9:7700) has no store member" in problem for problem in problems)
