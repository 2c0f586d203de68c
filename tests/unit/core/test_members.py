"""A member is found by its slot and by its rank, wherever it stands."""

from __future__ import annotations

from controld.core.draft import Draft
from controld.core.ids import Incarnation, JobId, NodeUid, SlotId
from controld.core.model import Generation, LeaseState, Member, Phase, TaskExit
from controld.core.state import State
from virialpb.reasons import ExitReason


def member(slot: str, rank: int | None) -> Member:
    return Member(SlotId(slot), rank, NodeUid("n"), Incarnation(NodeUid("n"), "b", "g"), 1, 1)


IN_ORDER = tuple(member(f"j.1.{rank}", rank) for rank in range(4))
SPARES = (member("j.1.s0", None), member("j.1.s1", None))
ORDERS = (
    (*IN_ORDER, *SPARES),
    (*SPARES, *reversed(IN_ORDER)),
    (member("j.1.1", 0), member("j.1.0", 1), member("odd", 2), member("j.1.99999999999999999999", 3), *SPARES),
)


def test_each_is_found() -> None:
    for members in ORDERS:
        generation = Generation(JobId("j"), 1, Phase.ACTIVE, members)
        for place, each in enumerate(members):
            assert generation.place_of(each.slot) == place
            assert generation.member(each.slot) is each
            if each.rank is not None:
                assert generation.of_rank(each.rank) is each
        for unknown in ("j.1.7", "j.1.", "", "j.1.-1", "j.1.s2", "j.1.²"):
            assert generation.member(SlotId(unknown)) is None
        assert generation.of_rank(9) is None
        assert generation.of_rank(-1) is None


def test_only_the_member_meant_is_changed() -> None:
    for members in ORDERS:
        generation = Generation(JobId("j"), 1, Phase.ACTIVE, members)
        for place, each in enumerate(members):
            changed = Member(each.slot, each.rank, each.node, each.incarnation, 1, 1, lease=LeaseState.RELEASED)
            after = Draft(State()).change_member(generation, changed).members
            assert after == (*members[:place], changed, *members[place + 1 :])


def test_all_are_done_when_every_rank_is_and_spares_do_not_matter() -> None:
    done = TaskExit(ExitReason.EXITED)
    ended = tuple(Member(m.slot, m.rank, m.node, m.incarnation, 1, 1, exit=done) for m in IN_ORDER)
    assert Generation(JobId("j"), 1, Phase.ACTIVE, (*ended, *SPARES)).all_done
    assert not Generation(JobId("j"), 1, Phase.ACTIVE, (*ended[:3], IN_ORDER[3], *SPARES)).all_done
