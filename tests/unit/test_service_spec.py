"""Job specifications on the wire: defaults filled in, nothing lost on the way back."""

from __future__ import annotations

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
    Writes,
)
from controld.service.convert.spec import spec_from_proto, spec_to_proto
from virialpb.v1 import common_pb2, job_pb2

FULL = JobSpec(
    name="train",
    gang=GangSpec(8, 2, "none"),
    resources=Resources(
        1_500, 1 << 36, (DeviceRequest("accelerator", 1, 250, (Constraint("memory_bytes", Operator.GE, ("80",)),)),)
    ),
    task=TaskSpec(("a", "b"), (("A", ""), ("B", "x")), "/w", "u", "g", 1, 1 << 20, 2),
    kind="training",
    fence_after_ns=7 * SECOND_NS,
    writes=Writes.TOKEN,
    checkpoint=CheckpointSpec(Durability.SHARED_DIRECTORY, "/c", 5, 9 * SECOND_NS),
    restart=RestartSpec(0, 60 * SECOND_NS, (RestartWay.SPARE,)),
    node_constraints=(Constraint("rack", Operator.IN, ("r1", "r2")), Constraint("x", Operator.EXISTS)),
    priority=-3,
    fencing="strong",
    start_timeout_ns=11 * SECOND_NS,
)


def test_everything_comes_back() -> None:
    assert spec_from_proto(spec_to_proto(FULL), job_id="", fence_after_default_ns=1) == (FULL, ())


def test_what_is_left_out_takes_the_default() -> None:
    message = job_pb2.JobSpec(
        gang=job_pb2.GangSpec(ranks=2),
        resources=common_pb2.Resources(cpu_millis=1, memory_bytes=2, devices=[common_pb2.DeviceRequest(kind="nic")]),
        task=job_pb2.TaskSpec(command=["x"]),
    )
    spec, violations = spec_from_proto(message, job_id="chosen", fence_after_default_ns=30 * SECOND_NS)
    assert violations == ()
    assert spec == JobSpec(
        name="chosen",
        gang=GangSpec(2),
        resources=Resources(1, 2, (DeviceRequest("nic"),)),
        task=TaskSpec(("x",)),
        fence_after_ns=30 * SECOND_NS,
    )


def test_no_restart_at_all_can_be_asked_for() -> None:
    spec, _ = spec_from_proto(job_pb2.JobSpec(restart=job_pb2.RestartSpec(max=0)), job_id="", fence_after_default_ns=1)
    assert spec.restart == RestartSpec(max=0)


def test_values_that_mean_nothing_are_named() -> None:
    message = job_pb2.JobSpec(
        writes=9,  # type: ignore[arg-type]
        checkpoint=job_pb2.CheckpointSpec(durability=9),  # type: ignore[arg-type]
        restart=job_pb2.RestartSpec(allow=["spare", "sapre"]),
        node_constraints=[common_pb2.Constraint(attribute="a")],
    )
    _, violations = spec_from_proto(message, job_id="", fence_after_default_ns=1)
    assert [violation.field for violation in violations] == [
        "writes",
        "checkpoint.durability",
        "restart.allow[1]",
        "node_constraints[0].operator",
    ]
    assert "did you mean 'spare'?" in violations[2].description
