"""Files of checkpoints nobody needs any more: who is told to delete them, and when they are forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controld.core.agent import DropCheckpoint
from controld.core.commands import ForgetCheckpoint, Prune
from controld.core.ids import JobId
from controld.core.model import JobState, Liveness, TaskExit, Tier
from controld.core.spec import Durability
from controld.core.state import Change
from tests.support_core import World
from tests.support_rows import nodes_of, running
from tests.unit.core.test_flow import save
from virialpb.reasons import ExitReason


@pytest.mark.parametrize("tier", Tier)
def test_a_forgotten_job_leaves_no_shards_on_the_disks_of_nodes(tier: Tier) -> None:
    """On a shared directory they are the job's result, and stay."""
    local = tier is Tier.LOCAL
    world, job = running(3, 4, durability=Durability.LOCAL_DISK if local else Durability.SHARED_DIRECTORY)
    save(world, job, 10)
    end(world, job)
    prune = Prune(0, 1_000, 0)
    world.do(prune)
    assert (job in world.state.jobs) == local
    if local:
        world.run(1)
        holders = {a.name: [o for o in a.orders if isinstance(o, DropCheckpoint)] for a in world.agents.values()}
        assert [name for name, orders in holders.items() if orders] == nodes_of(world, job)
        for checkpoint in tuple(world.state.checkpoints[job]):
            world.do(ForgetCheckpoint(job, checkpoint))
        world.do(prune)
    assert job not in world.state.jobs


def test_a_job_whose_nodes_were_given_up_is_forgotten_all_the_same() -> None:
    world, job = running(1, 1, durability=Durability.LOCAL_DISK)
    save(world, job, 10)
    end(world, job)
    (node,) = world.state.nodes.values()
    world.state.apply((Change.put(replace(node, liveness=Liveness.EXPIRED)),), world.state.revision + 1)
    world.do(Prune(0, 1_000, 0))
    assert job not in world.state.jobs


def end(world: World, job: JobId) -> None:
    for agent in world.agents.values():
        for slot in agent.slots:
            agent.exit(slot, TaskExit(ExitReason.EXITED))
    world.run(3)
    assert world.job(job).state is JobState.SUCCEEDED


def test_shared_checkpoints_are_deleted_by_one_node_each_and_not_all_by_the_same() -> None:
    world, job = running(3, 5)
    ids = [save(world, job, step) for step in range(1, 40)]
    world.run(3)
    asked = [[o.checkpoint for o in a.orders if isinstance(o, DropCheckpoint)] for a in world.agents.values()]
    dropped = {id_ for orders in asked for id_ in orders}
    assert dropped == set(ids[:-2])
    had = set(nodes_of(world, job))
    for agent, orders in zip(world.agents.values(), asked, strict=True):
        assert bool(orders) == (agent.name in had)
    firsts = [next(i for i, orders in enumerate(asked) if id_ in orders) for id_ in sorted(dropped)]
    assert len(set(firsts)) == 3


def test_a_node_that_cannot_delete_does_not_keep_the_files_for_ever() -> None:
    world, job = running(3, 3)
    for step in range(1, 4):
        save(world, job, step)
    world.run(400)
    assert all(any(isinstance(o, DropCheckpoint) for o in a.orders) for a in world.agents.values())
