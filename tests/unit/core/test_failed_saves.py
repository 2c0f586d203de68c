"""What a job record says of saves that fail: a job that saves nothing must not look healthy."""

from __future__ import annotations

import pytest

from controld.core import keys
from controld.core.commands import AbortCheckpoint, BeginCheckpoint
from controld.core.ids import CheckpointId, JobId
from controld.service.convert.job import job_to_proto
from controld.store import codec
from tests.support_core import World, spec
from tests.unit.core.test_flow import save, started
from virial.convert import job_from


def fail_save(world: World, job: JobId, step: int, reason: str) -> None:
    generation = world.state.current(job)
    assert generation is not None
    epoch = world.state.epoch_of(generation)
    id_ = CheckpointId(world.reply(BeginCheckpoint(job, generation.number, epoch, 0, step)).subject)
    world.reply(AbortCheckpoint(job, generation.number, id_, reason))
    world.reply(AbortCheckpoint(job, generation.number, id_, "IO_ERROR"))  # the other ranks say so too


@pytest.fixture
def world_and_job() -> tuple[World, JobId]:
    world = World(3)
    job = world.submit(spec(3))
    started(world, job)
    return world, job


def test_failed_saves_are_counted_until_one_is_committed(world_and_job: tuple[World, JobId]) -> None:
    world, job = world_and_job
    fail_save(world, job, 10, "IO_ERROR")
    fail_save(world, job, 20, "STORAGE_FULL")
    assert (world.job(job).aborted_saves, world.job(job).last_abort_reason) == (2, "STORAGE_FULL")
    save(world, job, 30)
    assert (world.job(job).aborted_saves, world.job(job).last_abort_reason) == (0, "")


def test_a_save_that_a_later_one_has_overtaken_is_no_failure(world_and_job: tuple[World, JobId]) -> None:
    world, job = world_and_job
    generation = world.state.current(job)
    assert generation is not None
    epoch = world.state.epoch_of(generation)
    begun = world.reply(BeginCheckpoint(job, generation.number, epoch, 0, 10)).subject
    save(world, job, 20)
    world.run(2)
    assert CheckpointId(begun) not in {c.id for c in world.state.checkpoints[job].values() if c.state == "BEGUN"}
    assert world.job(job).aborted_saves == 0


def test_the_api_and_the_store_keep_it(world_and_job: tuple[World, JobId]) -> None:
    world, job = world_and_job
    fail_save(world, job, 10, "STORAGE_FULL")
    shown = job_from(job_to_proto(world.job(job), world.state, world.view))
    assert (shown.aborted_saves, shown.last_abort_reason) == (1, "STORAGE_FULL")
    assert codec.decode(keys.of(world.job(job)), codec.encode(world.job(job))) == world.job(job)
