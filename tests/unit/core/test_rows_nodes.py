"""Rows about nodes that come back: after a partition, and under their old name with nothing of what they were."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from controld.core import keys
from controld.core.agent import Go, Prepare, SlotState
from controld.core.commands import AdmitNode, BeginCheckpoint, Now, PlaceHold, ReleaseMember, RemoveNode
from controld.core.draft import Draft
from controld.core.ids import Incarnation, JobId, NodeUid, SlotId
from controld.core.model import Hold, Job, JobState, LeaseState, Liveness, Node, TaskError, TaskExit
from controld.core.outcome import Outcome, Refused, Transition
from controld.core.spec import SECOND_NS, Writes
from controld.core.state import Change, State
from controld.core.transitions import leases, nodes
from controld.core.transitions.endings import begin_stop
from controld.reconcile import gang
from controld.reconcile.decisions import Pass
from tests.support_core import GIB, Agent, World
from tests.support_rows import Defect, Rows, each_defect, each_row, nodes_of, running
from virialpb.reasons import ExitReason, Reason, StopReason

Patch = pytest.MonkeyPatch
FENCE_S = 20
SUSPECT_S = 6  # the latest that a silence becomes suspicion
# What an agent of this fence_after gives itself: 1 % for the drift of its clock, and a second to kill.
OWN_FENCE_S = FENCE_S * 0.99 - 1


def fence(world: World, agent: Agent) -> None:
    """What a cut agent does to its own tasks when their lease has run out."""
    for slot, status in list(agent.slots.items()):
        if status.state is not SlotState.EXITED:
            agent.exit(slot, TaskExit(ExitReason.LEASE_EXPIRED))


# C12: a node came back from a partition; an extra replacement was started, and stopped at once.


def a_node_that_comes_back_starts_nothing() -> None:
    for quarters in (4, *range(13, 34)):  # around suspicion, and while the replacement is made ready
        cut_and_back(Writes.TOKEN, quarters / 4)
    for quarters in (
        24,
        60,
        *range(72, 92, 2),
    ):  # around the end of the lease by the agent's clock, and by the leader's
        cut_and_back(Writes.SHARED, quarters / 4)


def cut_and_back(writes: Writes, cut_s: float) -> None:
    """Back at any moment: before it is suspect, while its replacement is prepared, when that runs, after the lease."""
    world, job = running(3, 5, writes=writes, fence_after_s=FENCE_S)
    silent = world.agents[nodes_of(world, job)[1]]
    silent.cut = True
    for quarter in range(int(cut_s * 4)):
        if quarter == int(OWN_FENCE_S * 4):
            fence(world, silent)
        world.run(0.25)
        one_holder(world, job, writes)
    current = world.state.current(job)
    assert current is not None
    replaced = current.number > 1 or not current.phase.under_way
    silent.cut = False
    world.hello(silent)
    for _ in range(4 * 12):
        world.run(0.25)
        one_holder(world, job, writes)
    assert world.job(job).state is JobState.RUNNING
    fenced = writes is Writes.SHARED and cut_s > OWN_FENCE_S
    assert world.job(job).generation == (2 if replaced or fenced else 1), (writes, cut_s)
    if writes is Writes.SHARED:
        assert fenced or not replaced, "its peers are left alone until the lease has run out"
    else:
        assert replaced if cut_s >= SUSPECT_S else (not replaced or cut_s > SUSPECT_S - 3)
    prepared, went = started(world)
    assert went == prepared, "what is prepared is what runs: nothing is started and stopped at once"


def one_holder(world: World, job: JobId, writes: Writes) -> None:
    """A device has one (checked at every commit); a rank runs once, but of a job whose every output is fenced."""
    if writes is Writes.SHARED:
        alive = [
            status.token.generation
            for agent in world.agents.values()
            for status in agent.slots.values()
            if status.token.job == job and status.state is SlotState.RUNNING
        ]
        assert len(set(alive)) <= 1
        assert len(alive) <= 3


def started(world: World) -> tuple[set[SlotId], set[SlotId]]:
    orders = [order for agent in world.agents.values() for order in agent.orders]
    return {o.slot for o in orders if isinstance(o, Prepare)}, {o.slot for o in orders if isinstance(o, Go)}


def replaces_before_the_lease_ends(patch: Patch) -> None:
    real = gang._lost_member

    def lost(p: Pass, job: Job, *rest: Any) -> object:
        return real(p, replace(job, spec=replace(job.spec, writes=Writes.TOKEN)), *rest)

    patch.setattr(gang, "_lost_member", lost)


def believes_what_was_stored_of_a_silence(patch: Patch) -> None:
    patch.setattr(gang, "heard_again", lambda node, view, now_ns: False)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


def counts_a_late_exit_against_the_replacement(patch: Patch) -> None:
    real = leases.release

    def release(state: State, command: ReleaseMember, now: Now) -> Outcome:
        outcome = real(state, command, now)
        current = state.current(command.job)
        if not isinstance(outcome, Transition) or not outcome.changes or current is None or not current.phase.under_way:
            return outcome
        if command.generation < current.number:
            draft = Draft(state)
            error = TaskError(current.number, 0, current.members[0].node, StopReason.RANK_FAILED, exit=command.exit)
            begin_stop(draft, current, StopReason.RANK_FAILED, error, now)
            return replace(outcome, changes=(*outcome.changes, *draft.done().changes))
        return outcome

    patch.setattr(leases, "release", release)


# C10: a host was made anew, under its old name and without its secret, and could not join again.


def a_host_made_anew_joins_again() -> None:
    """Its old self may still run somewhere, cut off: nothing of what that holds is given away before its deadline."""
    world, job = running(2, 3, writes=Writes.SHARED, fence_after_s=FENCE_S)
    name = nodes_of(world, job)[1]
    old = world.agents[name]
    first = world.state.current(job)
    assert first is not None
    old_epoch = world.state.epoch_of(first)
    hold = Hold("ops", "the fan is noisy")
    world.reply(PlaceHold("h1", old.incarnation.node_uid, hold))
    old.cut = True
    anew = Agent(name, Incarnation(NodeUid(f"uid-{name}-anew"), "boot", "g1"))
    joins = AdmitNode(anew.incarnation, name, f"addr-{name}", "pidns", 1000, 4 * GIB)
    # An idle node may come back for as long as the session lasts: a namesake does not push it out before.
    bound_s = (world.limits.session_fence_after_ns + world.limits.grace_ns) // SECOND_NS + 2
    waited_s = 0
    while isinstance(outcome := world.do(joins), Refused):
        assert (outcome.reason, outcome.detail) == (Reason.ALREADY_EXISTS, old.incarnation.node_uid)
        world.run(1)
        waited_s += 1
        assert waited_s <= bound_s, "it does not join again"
    assert waited_s >= FENCE_S, "the old leases were given away before their deadline"
    assert not Draft(world.state).held_on(old.incarnation.node_uid)
    world.view.disconnected(old.incarnation.node_uid)  # the session of a node that is gone is over
    world.agents[name] = anew
    world.hello(anew)
    world.view.mark_reported(anew.incarnation.node_uid)
    world.run(10)
    node = world.state.node_named(name)
    assert node is not None
    assert (node.uid, node.liveness, node.holds) == (anew.incarnation.node_uid, Liveness.LIVE, (hold,))
    assert (world.job(job).state, world.job(job).generation) == (JobState.RUNNING, 2)
    assert set(world.view.sessions) == set(world.state.nodes), "nothing of the old self is kept in memory"
    # The old self speaks up at last.
    late = world.do(BeginCheckpoint(job, 1, old_epoch, 1, 7))
    assert isinstance(late, Refused)
    assert late.reason is Reason.FENCED
    comes_back = world.do(replace(joins, incarnation=old.incarnation))
    assert isinstance(comes_back, Refused)
    assert world.state.node_named(name) == node


def an_operator_forgets_the_lost_one() -> None:
    """`virial remove-node`, asked again and again from the moment that the host is gone."""
    world, job = running(2, 3, writes=Writes.SHARED, fence_after_s=FENCE_S)
    name = nodes_of(world, job)[1]
    lost = world.agents[name]
    lost.cut = True
    waited_s = 0
    while isinstance(outcome := world.do(RemoveNode(f"remove-{waited_s}", name)), Refused):
        assert outcome.reason is Reason.NOT_NOW
        assert waited_s < 100
        world.run(1)
        waited_s += 1
    assert waited_s >= world.limits.session_fence_after_ns // SECOND_NS, "it may still come back, and runs what it ran"
    assert world.state.node_named(name) is None
    assert all(
        lost.incarnation.node_uid != member.node or not member.lease.holds
        for generation in world.state.leased()
        for member in generation.members
    )
    anew = AdmitNode(Incarnation(NodeUid("anew"), "boot", "g1"), name, f"addr-{name}", "pidns", 1000, 4 * GIB)
    assert world.reply(anew).subject == "anew"
    assert isinstance(world.do(replace(anew, incarnation=lost.incarnation)), Refused), "the name has a node again"


def a_name_is_taken_for_ever(patch: Patch) -> None:
    real = nodes.admit

    def admit(state: State, command: AdmitNode, now: Now) -> Outcome:
        namesake = state.node_named(command.name)
        if namesake is not None and namesake.uid != command.incarnation.node_uid:
            return Refused(Reason.ALREADY_EXISTS, f"nodes/{command.name}", detail=namesake.uid)
        return real(state, command, now)

    patch.setattr(nodes, "admit", admit)


def a_new_self_is_proof_that_the_old_is_dead(patch: Patch) -> None:
    real = nodes.admit

    def admit(state: State, command: AdmitNode, now: Now) -> Outcome:
        namesake = state.node_named(command.name)
        if namesake is None or namesake.uid == command.incarnation.node_uid:
            return real(state, command, now)
        draft = Draft(state)
        draft.free_leases(namesake.uid, namesake.incarnation, LeaseState.EXPIRED)
        freed = draft.done().changes
        after = copy.deepcopy(state)
        after.apply((*freed, Change.put(replace(namesake, liveness=Liveness.EXPIRED))), state.revision)
        outcome = real(after, command, now)
        return replace(outcome, changes=(*freed, *outcome.changes)) if isinstance(outcome, Transition) else outcome

    patch.setattr(nodes, "admit", admit)


def forgets_what_may_come_back(patch: Patch) -> None:
    def remove(state: State, command: RemoveNode, now: Now) -> Outcome:
        node = state.node_named(command.name)
        assert node is not None
        draft = Draft(state)
        draft.free_leases(node.uid, node.incarnation, LeaseState.EXPIRED)
        draft.delete(keys.node(node.uid))
        return draft.done()

    patch.setattr(nodes, "remove", remove)


def a_hold_is_the_disk_s(patch: Patch) -> None:
    """What an operator said of a host is forgotten when its disk is made anew."""
    real = nodes.admit

    def admit(state: State, command: AdmitNode, now: Now) -> Outcome:
        outcome = real(state, command, now)
        if not isinstance(outcome, Transition) or command.incarnation.node_uid in state.nodes:
            return outcome
        bare = [
            Change.put(replace(c.record, holds=(), draining=False)) if isinstance(c.record, Node) else c
            for c in outcome.changes
        ]
        return replace(outcome, changes=tuple(bare))

    patch.setattr(nodes, "admit", admit)


ROWS: Rows = {
    "C10": (
        a_host_made_anew_joins_again,
        (
            Defect("a_name_is_taken_for_ever", a_name_is_taken_for_ever),
            Defect("a_new_self_is_proof_that_the_old_is_dead", a_new_self_is_proof_that_the_old_is_dead),
            Defect("a_hold_is_the_disk_s", a_hold_is_the_disk_s),
        ),
    ),
    "C12": (
        a_node_that_comes_back_starts_nothing,
        (
            Defect("replaces_before_the_lease_ends", replaces_before_the_lease_ends),
            Defect("believes_what_was_stored_of_a_silence", believes_what_was_stored_of_a_silence),
            Defect("counts_a_late_exit_against_the_replacement", counts_a_late_exit_against_the_replacement),
        ),
    ),
}
OTHER_HALVES: Rows = {
    "C10": (
        an_operator_forgets_the_lost_one,
        (Defect("forgets_what_may_come_back", forgets_what_may_come_back),),
    ),
}


@each_row(ROWS)
def test_the_row_holds(row: str) -> None:
    ROWS[row][0]()


@each_defect(ROWS)
def test_the_row_catches(row: str, defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    defect.seed(monkeypatch)
    with pytest.raises(AssertionError):
        ROWS[row][0]()


@each_row(OTHER_HALVES)
def test_the_other_half_holds(row: str) -> None:
    OTHER_HALVES[row][0]()


@each_defect(OTHER_HALVES)
def test_the_other_half_catches(row: str, defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    defect.seed(monkeypatch)
    with pytest.raises(AssertionError):
        OTHER_HALVES[row][0]()
