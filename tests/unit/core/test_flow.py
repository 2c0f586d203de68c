"""Whole lives of jobs through the pure core: transitions, reconcile and matching together, no I/O."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controld.core.agent import SaveNow
from controld.core.commands import AdmitNode, BeginCheckpoint, CancelJob, DrainNode, PrepareShard
from controld.core.ids import CheckpointId, JobId
from controld.core.model import CheckpointState, JobState, LeaseState, Liveness, Phase, TaskExit
from controld.core.outcome import Refused
from controld.core.spec import SECOND_NS, Constraint, DeviceRequest, Operator, Resources, RestartSpec, Writes
from controld.reconcile.explain import explain
from tests.support_core import GIB, World, incarnation, spec
from virialpb.reasons import ExitReason, PrepareFailure, Reason, Unfit


def save(world: World, job: JobId, step: int) -> CheckpointId:
    """Every rank of the current generation saves `step`; returns the checkpoint's id."""
    generation = world.state.current(job)
    assert generation is not None
    epoch = world.state.epoch_of(generation)
    id_ = CheckpointId("")
    for member in generation.ranks:
        assert member.rank is not None
        id_ = CheckpointId(world.reply(BeginCheckpoint(job, generation.number, epoch, member.rank, step)).subject)
    for member in generation.ranks:
        assert member.rank is not None
        file = f"rank-{member.rank:05d}.shard"
        world.reply(PrepareShard(job, generation.number, epoch, member.rank, member.node, id_, step, 10, "d", file))
    assert world.state.checkpoints[job][id_].state is CheckpointState.COMMITTED
    return id_


def rank_nodes(world: World, job: JobId) -> list[str]:
    generation = world.state.current(job)
    assert generation is not None
    return [world.state.nodes[m.node].name for m in generation.ranks]


def started(world: World, job: JobId) -> None:
    world.run(4)
    assert world.job(job).state is JobState.RUNNING


def test_a_gang_runs_and_succeeds() -> None:
    world = World(4)
    job = world.submit(spec(3, 1))
    started(world, job)
    for agent in world.agents.values():
        agent.progress(77)
        for slot in list(agent.slots):
            if ".s" not in slot:
                agent.exit(slot, TaskExit(ExitReason.EXITED))
    world.run(4)
    assert world.job(job).state is JobState.SUCCEEDED
    assert world.job(job).highest_step == 77
    assert all(not a.slots for a in world.agents.values())
    generation = world.state.current(job)
    assert generation is not None
    assert [m.lease for m in generation.members] == [LeaseState.RELEASED] * 4


def test_a_lost_node_moves_a_token_gang_to_its_spare_and_leaves_the_others_in_place() -> None:
    world = World(4)
    job = world.submit(spec(3, 1))
    started(world, job)
    before = rank_nodes(world, job)
    for agent in world.agents.values():
        agent.progress(25)
    checkpoint = save(world, job, 20)
    lost = world.agents[before[1]]
    spare = ({"n0", "n1", "n2", "n3"} - set(before)).pop()
    lost.cut = True
    world.run(12)
    generation = world.state.current(job)
    assert generation is not None
    assert (generation.number, generation.phase) == (2, Phase.ACTIVE)
    assert (generation.restored_checkpoint, generation.restored_step) == (checkpoint, 20)
    assert rank_nodes(world, job) == [before[0], spare, before[2]]
    first = world.state.generations[job][1]
    assert [m.lease.holds for m in first.ranks] == [False, True, False]  # the lost node's devices stay locked
    world.run(60)
    assert [m.lease for m in world.state.generations[job][1].ranks][1] is LeaseState.EXPIRED
    assert world.state.nodes[lost.incarnation.node_uid].liveness is Liveness.EXPIRED
    assert world.job(job).restarts == 1


def test_a_gang_that_writes_elsewhere_waits_for_the_lease_and_its_peers_run_on() -> None:
    world = World(4)
    job = world.submit(spec(3, 1, writes=Writes.SHARED, fence_after_s=20))
    started(world, job)
    cut = world.agents[rank_nodes(world, job)[2]]
    cut.cut = True
    world.run(15)
    generation = world.state.current(job)
    assert generation is not None
    assert (generation.number, generation.phase) == (1, Phase.ACTIVE)
    assert world.state.nodes[cut.incarnation.node_uid].liveness is Liveness.SUSPECT
    world.run(15)
    generation = world.state.current(job)
    assert generation is not None
    assert (generation.number, generation.phase) == (2, Phase.ACTIVE)


def test_a_returning_node_gets_its_superseded_rank_stopped_and_forgotten() -> None:
    world = World(4)
    job = world.submit(spec(3, 1))
    started(world, job)
    lost = world.agents[rank_nodes(world, job)[1]]
    lost.cut = True
    world.run(12)
    lost.cut = False
    world.run(6)
    assert not [s for s in lost.slots if s.startswith(f"{job}.1.")]
    assert not any(m.lease.holds for m in world.state.generations[job][1].ranks)
    assert world.state.nodes[lost.incarnation.node_uid].liveness is Liveness.LIVE


def test_an_old_generation_can_not_commit_a_checkpoint() -> None:
    world = World(4)
    job = world.submit(spec(3, 1))
    started(world, job)
    old = world.state.current(job)
    assert old is not None
    epoch = world.state.epoch_of(old)
    id_ = CheckpointId(world.reply(BeginCheckpoint(job, 1, epoch, 0, 20)).subject)
    world.agents[rank_nodes(world, job)[1]].cut = True
    world.run(12)
    node = old.ranks[0].node
    outcome = world.do(PrepareShard(job, 1, epoch, 0, node, id_, 20, 1, "d", "f"))
    assert isinstance(outcome, Refused)
    assert outcome.reason is Reason.FENCED
    assert world.state.checkpoints.get(job, {}).get(id_) is None or (
        world.state.checkpoints[job][id_].state is not CheckpointState.COMMITTED
    )


def test_a_failing_rank_uses_up_the_budget_and_the_first_error_is_kept() -> None:
    world = World(3)
    job = world.submit(spec(3, restart=RestartSpec(max=2)))
    for attempt in range(3):
        world.run(12)
        assert world.job(job).state is JobState.RUNNING, attempt
        for agent in world.agents.values():
            for slot in list(agent.slots):
                if slot.endswith(".0"):
                    agent.exit(slot, TaskExit(ExitReason.EXITED, code=attempt + 1, stderr_tail=f"try {attempt}"))
    world.run(12)
    record = world.job(job)
    assert record.state is JobState.FAILED
    assert record.generation == 3
    assert record.first_error is not None
    assert record.first_error.exit == TaskExit(ExitReason.EXITED, code=1, stderr_tail="try 0")


def test_cancel_stops_everything_and_frees_it() -> None:
    world = World(4)
    job = world.submit(spec(3, 1))
    started(world, job)
    world.reply(CancelJob("c1", job))
    world.run(5)
    assert world.job(job).state is JobState.CANCELLED
    assert all(not a.slots for a in world.agents.values())


def test_an_impossible_gang_waits_and_is_explained() -> None:
    world = World(2)
    job = world.submit(spec(3))
    world.run(3)
    found = explain(world.state, world.view, job)
    assert world.job(job).state is JobState.PENDING
    assert [(r.reason, dict(r.numbers)) for r in found.reasons] == [
        (Unfit.TOO_FEW_NODES, {"ranks_fit": 2, "ranks_needed": 3})
    ]
    assert found.relaxation == (("ranks", 2),)


def test_constraints_that_no_node_meets_are_named_as_they_were_written() -> None:
    world = World(3)
    met = Constraint("name", Operator.IN, ("n0", "n1", "n2"))
    unmet = Constraint("rack", Operator.EQ, ("r9",))
    device = DeviceRequest("accelerator", constraints=(Constraint("memory_bytes", Operator.GE, ("40",)),))
    job = world.submit(replace(spec(3), node_constraints=(met, unmet)))
    other = world.submit(replace(spec(3), resources=Resources(1, 1, (device,))), "r2")
    world.run(3)
    (reason,) = explain(world.state, world.view, job).reasons
    assert (reason.reason, reason.nodes, reason.details) == (Unfit.CONSTRAINT, 3, (("rack", "rack EQ r9"),))
    (reason,) = explain(world.state, world.view, other).reasons
    assert (reason.reason, dict(reason.details)) == (Unfit.DEVICES, {"accelerator": "accelerator memory_bytes GE 40"})


def test_drain_moves_the_gang_without_charging_its_budget() -> None:
    world = World(4)
    job = world.submit(spec(3))
    started(world, job)
    name = rank_nodes(world, job)[0]
    world.reply(DrainNode("d1", world.agents[name].incarnation.node_uid, "maintenance"))
    world.run(10)
    assert world.job(job).state is JobState.RUNNING
    assert name not in rank_nodes(world, job)
    assert world.job(job).restart_times_unix_ns == ()


@pytest.mark.row("F5")
@pytest.mark.parametrize("set_hours", [-1, 0, 1])
def test_a_drained_gang_saves_first_whatever_is_done_to_the_wall_clock(set_hours: int) -> None:
    world = World(4)
    job = world.submit(spec(3))
    started(world, job)
    for agent in world.agents.values():
        agent.progress(10)
    world.run(2)
    save(world, job, 10)
    world.run(2)
    name = rank_nodes(world, job)[0]
    world.reply(DrainNode("d1", world.agents[name].incarnation.node_uid, "maintenance"))
    world.run(2)
    world.unix_offset_ns += set_hours * 3600 * SECOND_NS
    world.run(5)
    assert world.job(job).generation == 1, "the checkpoint from before is not what was asked for"
    assert any(isinstance(order, SaveNow) for order in world.agents[name].orders)
    save(world, job, 20)
    world.run(10)
    current = world.state.current(job)
    assert current is not None
    assert (current.number, current.restored_step) == (2, 20)


def test_a_node_that_can_not_prepare_backs_off_and_the_gang_goes_elsewhere() -> None:
    world = World(4)
    world.agents["n0"].fail_prepare = PrepareFailure.COMMAND_NOT_FOUND
    job = world.submit(spec(3))
    world.run(12)
    assert world.job(job).state is JobState.RUNNING
    assert "n0" not in rank_nodes(world, job)


def test_a_node_that_does_not_hear_its_orders_is_given_up_after_seconds() -> None:
    world = World(4)
    world.agents["n0"].deaf = True
    job = world.submit(spec(3))
    world.run(15)
    assert world.job(job).state is JobState.RUNNING
    assert "n0" not in rank_nodes(world, job)


def test_a_node_whose_lease_ran_out_while_it_was_heard_is_left_out_of_the_next_plan() -> None:
    """Its beats come through and the acknowledgements do not: an order would not either."""
    world = World(4)
    job = world.submit(spec(3))
    started(world, job)
    name = rank_nodes(world, job)[0]
    deaf = world.agents[name]
    deaf.deaf = True
    for slot in tuple(deaf.slots):
        deaf.exit(slot, TaskExit(ExitReason.LEASE_EXPIRED))
    world.run(5)
    assert world.job(job).state is JobState.RUNNING
    assert name not in rank_nodes(world, job)


def test_corrupt_shard_falls_back_to_the_older_checkpoint() -> None:
    world = World(4)
    job = world.submit(spec(3, 1))
    started(world, job)
    for agent in world.agents.values():
        agent.progress(45)
    older = save(world, job, 20)
    save(world, job, 40)
    names = rank_nodes(world, job)
    world.agents[names[0]].fail_prepare = PrepareFailure.SHARD_CORRUPT
    world.agents[names[1]].cut = True
    world.run(7)
    world.agents[names[0]].fail_prepare = None
    world.run(12)
    generation = world.state.current(job)
    assert generation is not None
    assert (generation.phase, generation.restored_checkpoint) == (Phase.ACTIVE, older)


def test_a_node_that_cannot_reach_the_checkpoints_costs_none_of_them() -> None:
    world = World(5)
    job = world.submit(spec(3, 1))
    started(world, job)
    for agent in world.agents.values():
        agent.progress(45)
    save(world, job, 20)
    newest = save(world, job, 40)
    names = rank_nodes(world, job)
    world.agents[names[0]].fail_prepare = PrepareFailure.CHECKPOINT_DIRECTORY
    world.agents[names[1]].cut = True
    world.run(15)
    generation = world.state.current(job)
    assert generation is not None
    assert (generation.phase, generation.restored_checkpoint) == (Phase.ACTIVE, newest)
    assert names[0] not in rank_nodes(world, job)


@pytest.mark.parametrize("gone", [True, False])
def test_a_new_guardian_frees_only_what_it_saw_gone(gone: bool) -> None:
    world = World(3)
    job = world.submit(spec(3))
    started(world, job)
    name = rank_nodes(world, job)[0]
    slots = tuple(world.agents[name].slots) if gone else ()
    world.reply(AdmitNode(incarnation(name, "g2"), name, f"addr-{name}", "pidns", 1000, 4 * GIB, gone_slots=slots))
    member = world.state.generations[job][1].ranks[0]
    assert member.lease.holds is not gone
