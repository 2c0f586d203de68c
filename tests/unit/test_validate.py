"""Job specifications: what is impossible, named by field; all of it at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controld.core.spec import (
    SECOND_NS,
    CheckpointSpec,
    Constraint,
    DeviceRequest,
    Durability,
    GangSpec,
    JobSpec,
    Operator,
    Resources,
    RestartSpec,
    RestartWay,
    TaskSpec,
)
from controld.core.validate import SPEC_BYTES_MAX, SpecLimits, spec_bytes, validate, validate_job_id

LIMITS = SpecLimits(fence_after_min_ns=4_040_404_041)
GOOD = JobSpec(
    name="train",
    gang=GangSpec(ranks=3, spares=1),
    resources=Resources(500, 1 << 30, (DeviceRequest("accelerator", share_thousandths=250),)),
    task=TaskSpec(command=("python", "train.py"), env=(("RANK", "7"), ("_X1", "")), user="nobody"),
    checkpoint=CheckpointSpec(Durability.SHARED_DIRECTORY, "/shared/ckpt"),
    node_constraints=(Constraint("rack", Operator.IN, ("r1", "r2")), Constraint("memory_bytes", Operator.GE, ("1",))),
)


def fields(spec: JobSpec) -> list[str]:
    return [violation.field for violation in validate(spec, LIMITS)]


def gang(**changes: int | str) -> JobSpec:
    return replace(GOOD, gang=replace(GOOD.gang, **changes))  # type: ignore[arg-type]


def test_a_good_one_has_no_violation() -> None:
    assert validate(GOOD, LIMITS) == ()


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (gang(ranks=0), "gang.ranks"),
        (gang(ranks=-1), "gang.ranks"),
        (gang(ranks=4097), "gang.ranks"),
        (gang(spares=-1), "gang.spares"),
        (gang(spares=4097), "gang.spares"),
        (gang(spread="rack"), "gang.spread"),
        (replace(GOOD, name=""), "name"),
        (replace(GOOD, name="Train"), "name"),
        (replace(GOOD, name="a" * 49), "name"),
        (replace(GOOD, kind="trainig"), "kind"),
        (replace(GOOD, fencing="weak"), "fencing"),
        (replace(GOOD, resources=Resources(0, 1)), "resources.cpu_millis"),
        (replace(GOOD, resources=Resources(1, 0)), "resources.memory_bytes"),
        (replace(GOOD, resources=Resources(1, -5)), "resources.memory_bytes"),
        (replace(GOOD, resources=Resources(1, 1 << 63)), "resources.memory_bytes"),
        (replace(GOOD, resources=Resources(1, 1, (DeviceRequest("gpu"),))), "resources.devices[0].kind"),
        (replace(GOOD, resources=Resources(1, 1, (DeviceRequest("nic", 0),))), "resources.devices[0].count"),
        (
            replace(GOOD, resources=Resources(1, 1, (DeviceRequest("nic", 1, 1001),))),
            "resources.devices[0].share_thousandths",
        ),
        (
            replace(GOOD, resources=Resources(1, 1, (DeviceRequest("nic"), DeviceRequest("nic", 2, 500)))),
            "resources.devices[1].share_thousandths",
        ),
        (replace(GOOD, task=TaskSpec(command=())), "task.command"),
        (replace(GOOD, task=TaskSpec(command=("", "x"))), "task.command"),
        (replace(GOOD, task=TaskSpec(command=("x", "a\0b"))), "task.command[1]"),
        (replace(GOOD, task=TaskSpec(command=("x", "y" * 131_072))), "task.command[1]"),
        (replace(GOOD, task=TaskSpec(("x",), env=(("A=B", "1"),))), "task.env"),
        (replace(GOOD, task=TaskSpec(("x",), env=(("1A", "1"),))), "task.env"),
        (replace(GOOD, task=TaskSpec(("x",), env=(("A", "a\0b"),))), "task.env.A"),
        (replace(GOOD, task=TaskSpec(("x",), working_directory="work")), "task.working_directory"),
        (replace(GOOD, task=TaskSpec(("x",), user="a:b")), "task.user"),
        (replace(GOOD, task=TaskSpec(("x",), group="-g")), "task.group"),
        (replace(GOOD, task=TaskSpec(("x",), log_bytes_max=1)), "task.log_bytes_max"),
        (replace(GOOD, task=TaskSpec(("x",), log_files_max=0)), "task.log_files_max"),
        (replace(GOOD, task=TaskSpec(("x",), runtime="container")), "task.runtime"),
        (replace(GOOD, task=TaskSpec(("x",), runtime="vm")), "task.runtime"),
        (replace(GOOD, fence_after_ns=4 * SECOND_NS), "fence_after_ms"),
        (replace(GOOD, fence_after_ns=25 * 3600 * SECOND_NS), "fence_after_ms"),
        (replace(GOOD, checkpoint=CheckpointSpec(Durability.SHARED_DIRECTORY, "")), "checkpoint.directory"),
        (replace(GOOD, checkpoint=CheckpointSpec(Durability.SHARED_DIRECTORY, "ckpt")), "checkpoint.directory"),
        (replace(GOOD, checkpoint=CheckpointSpec(Durability.SHARED_DIRECTORY, "/a/../b")), "checkpoint.directory"),
        (replace(GOOD, checkpoint=CheckpointSpec(Durability.LOCAL_DISK, "/ckpt")), "checkpoint.directory"),
        (replace(GOOD, checkpoint=CheckpointSpec(keep=1)), "checkpoint.keep"),
        (replace(GOOD, checkpoint=CheckpointSpec(timeout_ns=1)), "checkpoint.timeout_ms"),
        (replace(GOOD, restart=RestartSpec(max=-1)), "restart.max"),
        (replace(GOOD, restart=RestartSpec(window_ns=0)), "restart.window_ms"),
        (replace(GOOD, restart=RestartSpec(allow=(RestartWay.SPARE, RestartWay.SPARE))), "restart.allow"),
        (replace(GOOD, node_constraints=(Constraint("", Operator.EXISTS),)), "node_constraints[0].attribute"),
        (replace(GOOD, node_constraints=(Constraint("a", Operator.EXISTS, ("x",)),)), "node_constraints[0].values"),
        (replace(GOOD, node_constraints=(Constraint("a", Operator.IN),)), "node_constraints[0].values"),
        (replace(GOOD, node_constraints=(Constraint("a", Operator.EQ, ("x", "y")),)), "node_constraints[0].values"),
        (replace(GOOD, node_constraints=(Constraint("a", Operator.GT, ("80GiB",)),)), "node_constraints[0].values"),
        (replace(GOOD, start_timeout_ns=-1), "start_timeout_ms"),
    ],
)
def test_an_impossible_value_is_named_by_its_field(spec: JobSpec, field: str) -> None:
    assert fields(spec) == [field]


def test_a_gang_no_cluster_has_room_for_is_no_mistake() -> None:
    assert fields(replace(GOOD, gang=GangSpec(4096, 4096), resources=Resources(10**9, 2**63 - 1))) == []


def test_the_least_fence_after_is_allowed() -> None:
    assert fields(replace(GOOD, fence_after_ns=LIMITS.fence_after_min_ns)) == []
    assert fields(replace(GOOD, fence_after_ns=LIMITS.fence_after_min_ns - 1)) == ["fence_after_ms"]


def test_every_mistake_is_found_at_once() -> None:
    wrong = replace(GOOD, name="", gang=GangSpec(0, -1, "x"), resources=Resources(0, 0), task=TaskSpec(()))
    assert fields(wrong) == [
        "name",
        "gang.ranks",
        "gang.spares",
        "gang.spread",
        "resources.cpu_millis",
        "resources.memory_bytes",
        "task.command",
    ]


def test_a_specification_too_large_to_store_is_refused_as_a_whole() -> None:
    env = tuple((f"V{index}", "x" * 100_000) for index in range(3))
    large = replace(GOOD, task=replace(GOOD.task, env=env))
    assert spec_bytes(large) > SPEC_BYTES_MAX
    assert fields(large) == [""]


@pytest.mark.parametrize("job_id", ["", "a", "train-1", "a" * 63])
def test_ids_that_may_be_chosen(job_id: str) -> None:
    assert validate_job_id(job_id) == ()


@pytest.mark.parametrize("job_id", ["A", "1a", "a-", "a_b", "a/b", "a" * 64, " a"])
def test_ids_that_may_not(job_id: str) -> None:
    assert [violation.field for violation in validate_job_id(job_id)] == ["job_id"]
