"""Single transitions on states made by hand: what they refuse though the gang as a whole still stands."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from controld.core import keys
from controld.core.agent import SlotState, Stop
from controld.core.commands import (
    BeginCheckpoint,
    CancelJob,
    CommitGo,
    ExpireLeases,
    Now,
    PlaceHold,
    PrepareShard,
    Prune,
    ReleaseMember,
    StartGeneration,
    StopGeneration,
)
from controld.core.ids import CheckpointId, NodeUid, slot_id
from controld.core.model import (
    Checkpoint,
    CheckpointState,
    DeviceGrant,
    Generation,
    Hold,
    Job,
    JobState,
    Member,
    Phase,
    TaskExit,
    Tier,
)
from controld.core.outcome import Refused, Transition
from controld.core.spec import SECOND_NS
from controld.core.state import Change, State
from controld.core.transitions import decide, requests
from controld.core.transitions.checkpoints import OPEN_MAX
from controld.core.transitions.prune import DELETES_MAX
from controld.matching.engine import plan
from controld.reconcile import pending
from controld.reconcile.decisions import Pass
from controld.reconcile.grants import command_for_grant
from controld.reconcile.snapshot import snapshot
from controld.reconcile.tick import tick
from tests.support_core import GIB, World, spec
from tests.support_rows import running
from virialpb.ids import Epoch, Token
from virialpb.reasons import ExitReason, Reason, StopReason, Unfit


def test_no_go_for_a_gang_one_of_whose_leases_has_run_out() -> None:
    world = World(3)
    job = world.submit(spec(3))
    pending = tick(world.state, world.view, world.now, Epoch(1, 1), world.limits).pending
    for grant in plan(snapshot(world.state, world.view, world.now), pending).grants:
        world.do(command_for_grant(grant, "c"))
    generation = world.state.current(job)
    assert generation is not None
    lost = generation.ranks[1]
    world.do(ExpireLeases(lost.incarnation, (lost.slot,)))
    outcome = decide(world.state, CommitGo(job, 1, "addr", 4000), world.now)
    assert outcome == Refused(Reason.STALE, f"jobs/{job}", detail="leases")


def test_a_rank_whose_lease_has_run_out_saves_nothing() -> None:
    world, job = running(3, 3)
    generation = world.state.current(job)
    assert generation is not None
    epoch = world.state.epoch_of(generation)
    id_ = CheckpointId(world.reply(BeginCheckpoint(job, 1, epoch, 0, 5)).subject)
    lost = generation.ranks[1]
    world.do(ExpireLeases(lost.incarnation, (lost.slot,)))
    assert lost.rank is not None
    for command in (
        BeginCheckpoint(job, 1, epoch, lost.rank, 6),
        PrepareShard(job, 1, epoch, lost.rank, lost.node, id_, 5, 10, "d", "rank-00001.shard"),
        PrepareShard(job, 1, epoch, 9, lost.node, id_, 5, 10, "d", "rank-00009.shard"),
    ):
        assert decide(world.state, command, world.now) == Refused(Reason.FENCED, f"jobs/{job}", detail="generation 1")


def test_a_job_of_more_records_than_one_prune_deletes_goes_in_valid_steps() -> None:
    world, job = running(3, 3)
    world.reply(CancelJob("c1", job))
    world.run(6)
    assert world.job(job).state is JobState.CANCELLED
    saved = Checkpoint(job, CheckpointId(""), 1, 1, 3, Tier.SHARED, "/ckpt", CheckpointState.ABORTED)
    records = [replace(saved, id=CheckpointId(f"c{i:06d}-s1")) for i in range(DELETES_MAX)]
    world.state.apply([Change.put(record) for record in records], world.state.revision + 1)
    prune = Prune(0, 1_000, 0)
    world.do(prune)  # `do` checks the invariants
    assert job in world.state.jobs
    world.do(prune)
    assert (world.state.jobs, world.state.generations, world.state.checkpoints) == ({}, {}, {})


def test_holds_that_ran_out_do_not_pile_up() -> None:
    world = World(1)
    (uid,) = world.state.nodes
    for number in range(3):
        world.reply(PlaceHold(f"r{number}", uid, Hold(f"owner-{number}", "test"), SECOND_NS))
        world.now_ns += 2 * SECOND_NS
    assert [hold.owner for hold in world.state.nodes[uid].holds] == ["owner-2"]


@pytest.mark.parametrize(("last", "state"), [(ExitReason.EXITED, "SUCCEEDED"), (ExitReason.STOPPED, "RESTARTING")])
def test_ranks_that_were_all_done_when_a_stop_came_have_succeeded(last: ExitReason, state: str) -> None:
    world, job = running(2, 3)
    generation = world.state.current(job)
    assert generation is not None
    world.do(StopGeneration(job, 1, StopReason.NODE_SUSPECT))
    epoch = world.state.epoch_of(generation)
    for member, reason in zip(generation.ranks, (ExitReason.EXITED, last), strict=True):
        world.do(ReleaseMember(job, 1, epoch, member.slot, member.incarnation, TaskExit(reason)))
    assert world.job(job).state == state


def test_a_cancelled_job_is_cancelled_though_its_ranks_were_done() -> None:
    world, job = running(1, 1)
    (agent,) = world.agents.values()
    (slot,) = agent.slots
    agent.exit(slot, TaskExit(ExitReason.EXITED))
    world.reply(CancelJob("c1", job))
    world.run(3)
    assert world.job(job).state is JobState.CANCELLED


def test_a_prune_of_nothing_commits_nothing() -> None:
    world = World(1)
    outcome = decide(world.state, Prune(0, 1_000, 1_000), Now(0, 0))
    assert outcome == Transition()


def test_a_node_is_found_by_its_newest_name_only() -> None:
    world = World(2)
    state = world.state
    (first, second) = state.nodes.values()
    state.apply([Change.put(replace(first, name="renamed"))], state.revision + 1)
    assert [state.node_named(name) for name in ("n0", "renamed", "n1")] == [None, state.nodes[first.uid], second]
    state.apply([Change.put(replace(second, uid=NodeUid("uid-new")))], state.revision + 1)
    state.apply([Change(keys.node(second.uid), None)], state.revision + 1)
    assert state.node_named("n1") == state.nodes[NodeUid("uid-new")]
    copy = State(nodes=dict(state.nodes))
    assert [copy.node_named(name) for name in ("n0", "renamed")] == [None, state.nodes[first.uid]]


def test_a_node_with_a_task_that_sigkill_does_not_end_gets_no_work() -> None:
    world, _ = running(1, 1)
    (agent,) = world.agents.values()
    (slot,) = agent.slots
    agent.slots[slot] = replace(agent.slots[slot], state=SlotState.STUCK)
    world.view.beat(agent.incarnation.node_uid, agent.beat(), world.now_ns)
    world.do(ExpireLeases(agent.incarnation, (slot,)))
    assert [node.unfit for node in snapshot(world.state, world.view, world.now).nodes] == [Unfit.HELD]


def test_devices_are_not_free_while_a_slot_of_the_same_name_runs_under_another_token() -> None:
    world, job = running(1, 1)
    (agent,) = world.agents.values()
    (slot,) = agent.slots
    old = Token(job, 1, Epoch(0, 1))
    agent.slots[slot] = replace(agent.slots[slot], token=old)
    world.view.beat(agent.incarnation.node_uid, agent.beat(), world.now_ns)
    decided = tick(world.state, world.view, world.now, Epoch(1, 1), world.limits)
    assert not [c for c in decided.commands if isinstance(c, ReleaseMember)]
    assert [o.order.token for o in decided.orders if isinstance(o.order, Stop)] == [old]


def test_phases_under_way() -> None:
    assert [phase for phase in Phase if phase.under_way] == [Phase.PREPARING, Phase.GO, Phase.ACTIVE]


def test_a_field_that_is_added_later_changes_no_fingerprint() -> None:
    @dataclass(frozen=True)
    class Spec:
        name: str

    @dataclass(frozen=True)
    class Later:
        name: str
        added: int = 7

    @dataclass(frozen=True)
    class Command:
        request_id: str
        spec: Spec | Later

    Later.__name__ = "Spec"
    old = requests.fingerprint(Command("r", Spec("a")))  # pyright: ignore[reportArgumentType]
    assert requests.fingerprint(Command("q", Later("a"))) == old  # pyright: ignore[reportArgumentType]
    assert requests.fingerprint(Command("q", Later("a", 8))) != old  # pyright: ignore[reportArgumentType]
    assert requests.fingerprint(Command("q", Spec("b"))) != old  # pyright: ignore[reportArgumentType]


def test_a_rank_that_begins_ever_new_checkpoints_is_refused() -> None:
    world, job = running()
    generation = world.state.current(job)
    assert generation is not None
    epoch = world.state.epoch_of(generation)
    outcomes = [world.do(BeginCheckpoint(job, 1, epoch, 0, step)) for step in range(OPEN_MAX + 1)]
    assert [isinstance(o, Refused) for o in outcomes] == [False] * OPEN_MAX + [True]
    # What is open goes on: another rank joins one of them.
    assert world.reply(BeginCheckpoint(job, 1, epoch, 1, 0)).state == "BEGUN"


def test_an_open_checkpoint_ends_when_a_later_step_is_committed() -> None:
    world, job = running()
    generation = world.state.current(job)
    assert generation is not None
    epoch, ranks = world.state.epoch_of(generation), generation.ranks
    ids = {step: world.reply(BeginCheckpoint(job, 1, epoch, 0, step)).subject for step in (5, 10, 15)}
    for member in ranks:
        part = PrepareShard(job, 1, epoch, member.rank or 0, member.node, CheckpointId(ids[10]), 10, 1, "d", "f")
        world.reply(part)
    world.tick()
    states = {c.step: c.state for c in world.state.checkpoints[job].values()}
    assert states == {5: CheckpointState.ABORTED, 10: CheckpointState.COMMITTED, 15: CheckpointState.BEGUN}
    assert world.kinds().count("checkpoint.aborted") == 1


def test_a_grant_of_other_resources_than_were_asked_for_is_refused() -> None:
    world = World(3)
    job = world.submit(spec(1))
    node = world.state.nodes[world.agents["n0"].incarnation.node_uid]
    for cpu_millis, devices in ((400, ()), (500, (DeviceGrant("gpu0"),))):
        member = Member(slot_id(job, 1, 0), 0, node.uid, node.incarnation, cpu_millis, GIB, devices)
        outcome = world.do(StartGeneration(job, 1, (member,)))
        assert isinstance(outcome, Refused)
        assert outcome.reason is Reason.INVARIANT_BROKEN


def test_one_job_that_a_rule_trips_over_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(4)
    first = world.submit(spec(1), "r1")
    second = world.submit(spec(1), "r2")
    real = pending.propose

    def trip(p: Pass, job: Job, last: Generation | None) -> None:
        if job.id == first:
            raise ValueError("a defect")
        real(p, job, last)

    monkeypatch.setattr(pending, "propose", trip)
    world.run(4)
    assert world.job(second).state is JobState.RUNNING
    decisions = tick(world.state, world.view, world.now, Epoch(1, 1), world.limits)
    assert decisions.broken == ((first, "ValueError('a defect')"),)
