"""The job specification inside a job record."""

from __future__ import annotations

from collections.abc import Iterable

from controld.core.spec import (
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
from controld.store import codec_values as values
from virialpb.store.v1 import records_pb2 as pb

# What an absent field reads as: the defaults of the model itself, so that they are written down once.
_REQUEST = DeviceRequest(kind="")
_GANG = GangSpec(ranks=0)
_TASK = TaskSpec(command=())
_CHECKPOINT = CheckpointSpec()
_RESTART = RestartSpec()
_SPEC = JobSpec(name="", gang=_GANG, resources=Resources(0, 0), task=_TASK)


def spec(value: JobSpec) -> pb.JobSpec:
    return pb.JobSpec(
        name=value.name,
        gang=pb.GangSpec(ranks=value.gang.ranks, spares=value.gang.spares, spread=value.gang.spread),
        resources=_resources(value.resources),
        task=_task(value.task),
        kind=value.kind,
        fence_after_ns=value.fence_after_ns,
        writes=value.writes,
        checkpoint=_checkpoint(value.checkpoint),
        restart=_restart(value.restart),
        node_constraints=_constraints(value.node_constraints),
        priority=value.priority,
        fencing=value.fencing,
        start_timeout_ns=value.start_timeout_ns,
    )


def from_spec(value: pb.JobSpec) -> JobSpec:
    return JobSpec(
        name=value.name,
        gang=GangSpec(
            ranks=value.gang.ranks,
            spares=value.gang.spares,
            spread=value.gang.spread if value.gang.HasField("spread") else _GANG.spread,
        ),
        resources=_from_resources(value.resources),
        task=_from_task(value.task),
        kind=value.kind,
        fence_after_ns=value.fence_after_ns if value.HasField("fence_after_ns") else _SPEC.fence_after_ns,
        writes=values.name_of(Writes, value.writes, "spec.writes", default=_SPEC.writes),
        checkpoint=_from_checkpoint(value.checkpoint),
        restart=_from_restart(value.restart) if value.HasField("restart") else _RESTART,
        node_constraints=_from_constraints(value.node_constraints, "spec.node_constraints"),
        priority=value.priority,
        fencing=value.fencing if value.HasField("fencing") else _SPEC.fencing,
        start_timeout_ns=value.start_timeout_ns,
    )


def _resources(value: Resources) -> pb.Resources:
    return pb.Resources(
        cpu_millis=value.cpu_millis,
        memory_bytes=value.memory_bytes,
        devices=[
            pb.DeviceRequest(
                kind=request.kind,
                count=request.count,
                share_thousandths=request.share_thousandths,
                constraints=_constraints(request.constraints),
            )
            for request in value.devices
        ],
    )


def _from_resources(value: pb.Resources) -> Resources:
    return Resources(
        cpu_millis=value.cpu_millis,
        memory_bytes=value.memory_bytes,
        devices=tuple(_from_request(request) for request in value.devices),
    )


def _from_request(value: pb.DeviceRequest) -> DeviceRequest:
    return DeviceRequest(
        kind=value.kind,
        count=value.count if value.HasField("count") else _REQUEST.count,
        share_thousandths=(
            value.share_thousandths if value.HasField("share_thousandths") else _REQUEST.share_thousandths
        ),
        constraints=_from_constraints(value.constraints, "spec.resources.devices.constraints"),
    )


def _constraints(constraints: Iterable[Constraint]) -> list[pb.Constraint]:
    return [pb.Constraint(attribute=c.attribute, operator=c.operator, values=c.values) for c in constraints]


def _from_constraints(constraints: Iterable[pb.Constraint], field: str) -> tuple[Constraint, ...]:
    return tuple(
        Constraint(
            attribute=constraint.attribute,
            operator=values.name_of(Operator, constraint.operator, f"{field}.operator"),
            values=tuple(constraint.values),
        )
        for constraint in constraints
    )


def _task(value: TaskSpec) -> pb.TaskSpec:
    return pb.TaskSpec(
        command=value.command,
        env=values.texts(value.env),
        working_directory=value.working_directory,
        user=value.user,
        group=value.group,
        grace_ms=value.grace_ms,
        log_bytes_max=value.log_bytes_max,
        log_files_max=value.log_files_max,
        runtime=value.runtime,
    )


def _from_task(value: pb.TaskSpec) -> TaskSpec:
    return TaskSpec(
        command=tuple(value.command),
        env=values.from_texts(value.env),
        working_directory=value.working_directory,
        user=value.user,
        group=value.group,
        grace_ms=value.grace_ms if value.HasField("grace_ms") else _TASK.grace_ms,
        log_bytes_max=value.log_bytes_max if value.HasField("log_bytes_max") else _TASK.log_bytes_max,
        log_files_max=value.log_files_max if value.HasField("log_files_max") else _TASK.log_files_max,
        runtime=value.runtime if value.HasField("runtime") else _TASK.runtime,
    )


def _checkpoint(value: CheckpointSpec) -> pb.CheckpointSpec:
    return pb.CheckpointSpec(
        durability=value.durability, directory=value.directory, keep=value.keep, timeout_ns=value.timeout_ns
    )


def _from_checkpoint(value: pb.CheckpointSpec) -> CheckpointSpec:
    return CheckpointSpec(
        durability=values.name_of(
            Durability, value.durability, "spec.checkpoint.durability", default=_CHECKPOINT.durability
        ),
        directory=value.directory,
        keep=value.keep if value.HasField("keep") else _CHECKPOINT.keep,
        timeout_ns=value.timeout_ns if value.HasField("timeout_ns") else _CHECKPOINT.timeout_ns,
    )


def _restart(value: RestartSpec) -> pb.RestartSpec:
    return pb.RestartSpec(max=value.max, window_ns=value.window_ns, allow=value.allow)


def _from_restart(value: pb.RestartSpec) -> RestartSpec:
    return RestartSpec(
        max=value.max if value.HasField("max") else _RESTART.max,
        window_ns=value.window_ns if value.HasField("window_ns") else _RESTART.window_ns,
        allow=tuple(values.name_of(RestartWay, way, "spec.restart.allow") for way in value.allow),
    )
