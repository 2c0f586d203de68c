"""Nodes that were just heard are not looked at: what is decided is the same as if each had been."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase as HypothesisPhase
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.core.agent import Beat, Hello
from controld.core.capacity import holding
from controld.core.commands import Command, Now
from controld.core.ids import Incarnation, JobId, NodeUid, SlotId
from controld.core.model import Cluster, Generation, Job, JobState, LeaseState, Liveness, Member, Node, Phase
from controld.core.spec import SECOND_NS
from controld.core.state import Change, State
from controld.health.view import Sighting, View
from controld.reconcile import liveness
from controld.reconcile.limits import Limits
from tests.support_core import spec

NOW = Now(1_000 * SECOND_NS, 0)
LIMITS = Limits(session_fence_after_ns=20 * SECOND_NS)
JOB = JobId("j")

ages_ns = st.one_of(st.integers(0, 40 * SECOND_NS), st.integers(0, 3 * SECOND_NS))
lives = st.sampled_from(["one", "two"])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[State, View]:
    state, view = State(history=1), View(started_ns=NOW.boottime_ns - draw(ages_ns))
    fence_ns = draw(st.sampled_from([1, 5, 30])) * SECOND_NS
    job = Job(JOB, replace(spec(), fence_after_ns=fence_ns), JobState.RUNNING, 1, generation=1)
    members: list[Member] = []
    changes = [Change.put(Cluster("c")), Change.put(job)]
    for number in range(draw(st.integers(1, 5))):
        uid = NodeUid(f"n{number}")
        kept = draw(st.sampled_from(list(Liveness)))
        changes.append(Change.put(Node(uid, uid, Incarnation(uid, "b", draw(lives)), kept, "a", "pidns", 1, 1)))
        if draw(st.booleans()):
            heard = Incarnation(uid, "b", draw(lives))
            at_ns = NOW.boottime_ns - draw(ages_ns)
            view.hello(Hello(heard, uid, "a", "pidns", 1, 1, Beat(1, ())), at_ns - draw(ages_ns))
            view.beat(uid, Beat(2, ()), at_ns)
        if draw(st.booleans()):
            since_ns = NOW.boottime_ns - draw(ages_ns)
            view.sighted[uid] = Sighting(
                Incarnation(uid, "b", draw(lives)), since_ns, draw(st.sampled_from([None, since_ns]))
            )
        for slot in range(draw(st.integers(0, 2))):
            lease = draw(st.sampled_from([LeaseState.ACTIVE, LeaseState.RELEASED]))
            life = Incarnation(uid, "b", draw(lives))
            members.append(Member(SlotId(f"j.1.{number}{slot}"), len(members), uid, life, 1, 1, lease=lease))
    changes.append(Change.put(Generation(JOB, 1, Phase.ACTIVE, tuple(members))))
    state.apply(changes, 2)
    return state, view


def looking_at_each(state: State, view: View) -> tuple[tuple[Command, ...], int | None]:
    by_node = holding(state)
    marks: list[Command] = []
    expiries: list[Command] = []
    due_ns: list[int] = []
    for uid in sorted(state.nodes):
        mark, suspect_ns = liveness._mark(state.nodes[uid], view, NOW.boottime_ns, LIMITS)  # pyright: ignore[reportPrivateUsage]
        marks += [] if mark is None else [mark]
        expired, expire_ns = liveness._expired(  # pyright: ignore[reportPrivateUsage]
            state.nodes[uid], by_node.get(uid, []), state, view, NOW.boottime_ns, LIMITS
        )
        expiries += expired
        due_ns += [suspect_ns, *expire_ns]
    coming = [at_ns for at_ns in due_ns if at_ns > NOW.boottime_ns]
    return (*marks, *expiries), min(coming, default=None)


def require_same(world: tuple[State, View]) -> None:
    state, view = world
    commands, next_ns = looking_at_each(state, view)
    found = liveness.assess(state, view, NOW, LIMITS)
    assert found.commands == commands
    if next_ns is not None:
        assert found.look_again_ns is not None
        assert NOW.boottime_ns < found.look_again_ns <= next_ns


@given(worlds())
@settings(max_examples=200, deadline=None)
def test_the_same_is_decided_and_the_next_look_is_no_later(world: tuple[State, View]) -> None:
    require_same(world)


@given(worlds())
@settings(max_examples=300, deadline=None, phases=[HypothesisPhase.generate], database=None)
def seeded(world: tuple[State, View]) -> None:
    """To find that there is a failure, not the smallest one."""
    require_same(world)


def reborn() -> tuple[State, View]:
    """A node that beats, heard just now; a former life of it holds a lease that has long run out."""
    state, view = State(history=1), View()
    uid = NodeUid("n")
    former, present = Incarnation(uid, "b", "one"), Incarnation(uid, "b", "two")
    member = Member(SlotId("j.1.0"), 0, uid, former, 1, 1)
    job = Job(JOB, replace(spec(), fence_after_ns=5 * SECOND_NS), JobState.RUNNING, 1, generation=1)
    node = Node(uid, uid, present, Liveness.LIVE, "a", "pidns", 1, 1)
    records = (Cluster("c"), job, node, Generation(JOB, 1, Phase.ACTIVE, (member,)))
    state.apply(tuple(Change.put(record) for record in records), 2)
    view.hello(Hello(present, uid, "a", "pidns", 1, 1, Beat(1, ())), NOW.boottime_ns - 40 * SECOND_NS)
    view.beat(uid, Beat(2, ()), NOW.boottime_ns)
    return state, view


def test_a_former_life_of_a_node_that_beats_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds devices, and would hold them for ever."""
    require_same(reborn())
    assert liveness.assess(*reborn(), NOW, LIMITS).commands

    def of_quiet(state: State, quiet: set[NodeUid]) -> dict[NodeUid, list[tuple[Generation, Member]]]:
        return {uid: leases for key, leases in holding(state).items() if (uid := NodeUid(key)) in quiet}

    monkeypatch.setattr(liveness, "_leases", of_quiet)
    with pytest.raises(AssertionError):
        require_same(reborn())


def test_nodes_that_are_thought_quiet_too_late_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def minute(state: State, limits: Limits) -> int:
        del state, limits
        return 60 * SECOND_NS

    monkeypatch.setattr(liveness, "_earliest_after_ns", minute)
    monkeypatch.setattr(liveness, "QUIET_NS", 30 * SECOND_NS)
    with pytest.raises(AssertionError):
        seeded()


def test_the_shortest_silence_that_means_anything_is_reached_by_no_session_earlier() -> None:
    view = View()
    incarnation = Incarnation(NodeUid("n"), "b", "g")
    view.hello(Hello(incarnation, "n", "a", "pidns", 1, 1, Beat(1, ())), 0)
    for seq in range(2, 200):  # as regular, and as frequent, as can be
        view.beat(NodeUid("n"), Beat(seq, ()), seq)
    assert view.sessions[NodeUid("n")].arrivals.suspect_after_ns() >= liveness.PATIENCE_MIN_NS
