"""A rank that its node cannot start: whose fault that is, how long it may take, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controld.core.agent import Go, Order, Prepare, SlotState
from controld.core.ids import CheckpointId, JobId
from controld.core.model import JobState, Phase, TaskExit
from controld.core.spec import RestartSpec
from controld.reconcile.explain import explain
from tests.support_core import Agent, World, spec
from tests.unit.core.test_flow import rank_nodes, save, started
from virialpb.reasons import ExitReason, PrepareFailure, StopReason, Unfit

NO_RESTART = RestartSpec(max=0)
GIGABYTE = 1_000_000_000


class SlowAgent(Agent):
    """Gets nothing ready, or starts nothing, until it is let."""

    prepares = True
    starts = True

    def obey(self, order: Order) -> None:
        if isinstance(order, Go) and not self.starts:
            return
        super().obey(order)
        if isinstance(order, Prepare) and not self.prepares:
            self.slots[order.slot] = replace(self.slots[order.slot], state=SlotState.PREPARING)

    def read(self, prepared_bytes: int) -> None:
        for slot, status in self.slots.items():
            if status.state is SlotState.PREPARING:
                self.slots[slot] = replace(status, prepared_bytes=prepared_bytes)

    def ready(self) -> None:
        for slot, status in self.slots.items():
            if status.state is SlotState.PREPARING:
                self.slots[slot] = replace(status, state=SlotState.READY, prepared_bytes=0)


def slow(world: World, name: str) -> SlowAgent:
    former = world.agents[name]
    agent = SlowAgent(former.name, former.incarnation, seq=former.seq)
    world.agents[name] = agent
    return agent


def phase_of(world: World, job: JobId) -> Phase:
    generation = world.state.current(job)
    assert generation is not None
    return generation.phase


def test_one_bad_node_does_not_fail_a_job_that_may_not_restart() -> None:
    world = World(4)
    world.agents["n0"].fail_prepare = PrepareFailure.WORKING_DIRECTORY_MISSING
    job = world.submit(spec(3, restart=NO_RESTART))
    world.run(12)
    assert world.job(job).state is JobState.RUNNING
    assert world.job(job).restart_times_unix_ns == ()
    assert "n0" not in rank_nodes(world, job)


def test_a_node_that_cannot_start_a_prepared_rank_is_left_out_and_costs_no_restart() -> None:
    world = World(4)
    bad = slow(world, "n0")
    bad.starts = False
    job = world.submit(spec(3, restart=NO_RESTART))
    world.run(2)
    for slot in tuple(bad.slots):
        bad.exit(slot, TaskExit(ExitReason.START_FAILED, stderr_tail="clone: resource temporarily unavailable"))
    world.run(10)
    assert world.job(job).state is JobState.RUNNING
    assert "n0" not in rank_nodes(world, job)


def test_a_rank_that_no_node_can_prepare_fails_its_job_with_the_first_error_after_bounded_tries() -> None:
    world = World(3)
    for agent in world.agents.values():
        agent.fail_prepare = PrepareFailure.COMMAND_NOT_FOUND
    job = world.submit(spec(3, restart=NO_RESTART))
    world.run(1)
    first = world.job(job).first_error
    world.run(1200)
    record = world.job(job)
    assert record.state is JobState.FAILED
    assert record.generation == 6
    assert record.first_error == first
    assert first is not None
    assert first.generation == 1
    assert first.detail == "COMMAND_NOT_FOUND"
    assert [e.reason for e in world.events if e.kind == "job.failed"] == ["CANNOT_PREPARE"]


def test_a_gang_that_ran_has_all_its_tries_to_prepare_again() -> None:
    world = World(4)
    world.agents["n0"].fail_prepare = PrepareFailure.DEVICE_BUSY
    job = world.submit(spec(3, restart=NO_RESTART))
    world.run(12)
    assert world.job(job).state is JobState.RUNNING
    assert world.job(job).prepare_failures == 0


def test_every_rank_that_was_late_is_left_out_of_the_next_plan() -> None:
    world = World(5)
    for name in ("n0", "n1"):
        slow(world, name).prepares = False
    job = world.submit(spec(3, restart=NO_RESTART))
    world.run(70)
    assert world.job(job).state is JobState.RUNNING
    assert world.job(job).generation == 2
    assert not {"n0", "n1"} & set(rank_nodes(world, job))


def restoring(world: World, size_bytes: int) -> tuple[JobId, SlowAgent]:
    """A gang of one that is being restored from a shard of that size, and the node that reads it."""
    job = world.submit(spec(1))
    started(world, job)
    (name,) = rank_nodes(world, job)
    world.agents[name].progress(10)
    id_ = save(world, job, 10)
    checkpoint = world.state.checkpoints[job][CheckpointId(id_)]
    large = replace(checkpoint, parts=tuple(replace(p, size_bytes=size_bytes) for p in checkpoint.parts))
    world.state.checkpoints[job][CheckpointId(id_)] = large
    agent = slow(world, name)
    agent.prepares = False
    world.view.sessions[agent.incarnation.node_uid].slots.clear()
    world.run(5)
    assert phase_of(world, job) is Phase.PREPARING
    return job, agent


def test_a_large_shard_is_given_the_time_to_read_it() -> None:
    """50 GB at 100 MB/s take 500 s; a fixed minute would stop it for ever and again."""
    world = World(1)
    job, agent = restoring(world, 50 * GIGABYTE)
    number = world.job(job).generation
    for second in range(1, 500):
        agent.read(second * GIGABYTE // 10)
        world.run(1)
    agent.ready()
    world.run(3)
    assert (world.job(job).generation, phase_of(world, job)) == (number, Phase.ACTIVE)


def test_a_shard_that_is_read_no_further_is_not_waited_for() -> None:
    world = World(1)
    job, agent = restoring(world, 50 * GIGABYTE)
    agent.read(GIGABYTE)
    world.run(28)
    assert phase_of(world, job) is Phase.PREPARING
    world.run(5)
    assert [e.details for e in world.events if e.reason is StopReason.PREPARE_DEADLINE][:1] == [
        (("detail", "stalled"),)
    ]


def test_an_agent_that_does_not_tell_what_it_reads_has_the_total() -> None:
    world = World(1)
    job, _ = restoring(world, GIGABYTE)
    world.run(150)
    assert phase_of(world, job) is Phase.PREPARING
    world.run(20)
    assert [e.reason for e in world.events if e.kind == "generation.stopping"][-1] == StopReason.PREPARE_DEADLINE


def test_a_ready_rank_that_is_never_started_is_not_waited_for() -> None:
    world = World(4)
    slow(world, "n0").starts = False
    job = world.submit(spec(3, restart=NO_RESTART))
    world.run(55)
    assert phase_of(world, job) is Phase.GO
    world.run(20)
    assert world.job(job).state is JobState.RUNNING
    assert "n0" not in rank_nodes(world, job)
    assert [e.reason for e in world.events if e.kind == "generation.stopping"] == [StopReason.GO_DEADLINE]


def test_a_node_that_never_starts_what_it_prepared_ends_the_job_in_the_end() -> None:
    world = World(1)
    slow(world, "n0").starts = False
    job = world.submit(spec(1, restart=NO_RESTART))
    world.run(1500)
    assert world.job(job).state is JobState.FAILED


@pytest.mark.parametrize(("nodes", "held"), [(3, 0), (4, 1), (5, 2)])
def test_a_missing_spare_is_explained(nodes: int, held: int) -> None:
    world = World(nodes)
    job = world.submit(spec(3, 2))
    started(world, job)
    found = [(r.reason, dict(r.numbers)) for r in explain(world.state, world.view, job).reasons]
    missing = [(Unfit.SPARE_MISSING, {"spares_held": held, "spares_wanted": 2})]
    assert found == (missing if held < 2 else [])
