"""Job specifications, both ways. A field that is absent or 0 takes the default; what is impossible is found in
`controld.core.validate`, what has no meaning at all (an unknown enum) here.
"""

from __future__ import annotations

from controld.core.outcome import FieldViolation
from controld.core.spec import (
    CheckpointSpec,
    Constraint,
    DeviceRequest,
    Durability,
    GangSpec,
    JobSpec,
    Resources,
    RestartSpec,
    RestartWay,
    TaskSpec,
    Writes,
)
from controld.service.convert.common import constraint_from_proto, constraint_to_proto
from virialpb.suggest import did_you_mean, nearest
from virialpb.v1 import common_pb2, job_pb2

MS_NS = 1_000_000

_TASK = TaskSpec(command=())
_CHECKPOINT = CheckpointSpec()
_RESTART = RestartSpec()
_GANG = GangSpec(ranks=0)


def spec_from_proto(
    message: job_pb2.JobSpec, *, job_id: str, fence_after_default_ns: int
) -> tuple[JobSpec, tuple[FieldViolation, ...]]:
    """The specification with its defaults filled in, and the fields whose values mean nothing."""
    violations: list[FieldViolation] = []
    spec = JobSpec(
        name=message.name or job_id,
        kind=message.kind,
        gang=GangSpec(ranks=message.gang.ranks, spares=message.gang.spares, spread=message.gang.spread or _GANG.spread),
        resources=_resources(message.resources, violations),
        task=_task(message.task),
        fence_after_ns=message.fence_after_ms * MS_NS or fence_after_default_ns,
        writes=_writes(message.writes, violations),
        checkpoint=_checkpoint(message.checkpoint, violations),
        restart=_restart(message.restart, violations) if message.HasField("restart") else _RESTART,
        node_constraints=_constraints(list(message.node_constraints), "node_constraints", violations),
        priority=message.priority,
        fencing=message.fencing or "any",
        start_timeout_ns=message.start_timeout_ms * MS_NS,
    )
    return spec, tuple(violations)


def _resources(message: common_pb2.Resources, violations: list[FieldViolation]) -> Resources:
    devices = tuple(
        DeviceRequest(
            kind=device.kind,
            count=device.count or 1,
            share_thousandths=device.share_thousandths or 1000,
            constraints=_constraints(list(device.constraints), f"resources.devices[{index}].constraints", violations),
        )
        for index, device in enumerate(message.devices)
    )
    return Resources(message.cpu_millis, message.memory_bytes, devices)


def _constraints(
    messages: list[common_pb2.Constraint], path: str, violations: list[FieldViolation]
) -> tuple[Constraint, ...]:
    read = [constraint_from_proto(message, f"{path}[{index}]", violations) for index, message in enumerate(messages)]
    return tuple(constraint for constraint in read if constraint is not None)


def _task(message: job_pb2.TaskSpec) -> TaskSpec:
    return TaskSpec(
        command=tuple(message.command),
        env=tuple(sorted(message.env.items())),
        working_directory=message.working_directory,
        user=message.user,
        group=message.group,
        grace_ms=message.grace_ms or _TASK.grace_ms,
        log_bytes_max=message.log_bytes_max or _TASK.log_bytes_max,
        log_files_max=message.log_files_max or _TASK.log_files_max,
        runtime=message.runtime or _TASK.runtime,
    )


def _writes(value: job_pb2.Writes.ValueType, violations: list[FieldViolation]) -> Writes:
    if value == job_pb2.WRITES_UNSPECIFIED:
        return Writes.SHARED
    try:
        return Writes(job_pb2.Writes.Name(value))
    except ValueError:
        violations.append(FieldViolation("writes", f"unknown value; use one of {', '.join(Writes)}"))
        return Writes.SHARED


def _checkpoint(message: job_pb2.CheckpointSpec, violations: list[FieldViolation]) -> CheckpointSpec:
    durability = _CHECKPOINT.durability
    if message.durability != job_pb2.DURABILITY_UNSPECIFIED:
        try:
            durability = Durability(job_pb2.Durability.Name(message.durability))
        except ValueError:
            known = ", ".join(Durability)
            violations.append(FieldViolation("checkpoint.durability", f"unknown value; use one of {known}"))
    return CheckpointSpec(
        durability=durability,
        directory=message.directory,
        keep=message.keep or _CHECKPOINT.keep,
        timeout_ns=message.timeout_ms * MS_NS or _CHECKPOINT.timeout_ns,
    )


def _restart(message: job_pb2.RestartSpec, violations: list[FieldViolation]) -> RestartSpec:
    """Where restart is given at all, max is taken as it is: 0 means that the job is never restarted."""
    allow: list[RestartWay] = []
    for index, text in enumerate(message.allow):
        try:
            allow.append(RestartWay(text))
        except ValueError:
            hint = did_you_mean(nearest(text, RestartWay)) or f"; use one of {', '.join(RestartWay)}"
            violations.append(FieldViolation(f"restart.allow[{index}]", f"unknown way '{text[:40]}'{hint}"))
    return RestartSpec(
        max=message.max,
        window_ns=message.window_ms * MS_NS or _RESTART.window_ns,
        allow=tuple(allow) if message.allow else _RESTART.allow,
    )


def spec_to_proto(spec: JobSpec) -> job_pb2.JobSpec:
    return job_pb2.JobSpec(
        name=spec.name,
        kind=spec.kind,
        gang=job_pb2.GangSpec(ranks=spec.gang.ranks, spares=spec.gang.spares, spread=spec.gang.spread),
        resources=common_pb2.Resources(
            cpu_millis=spec.resources.cpu_millis,
            memory_bytes=spec.resources.memory_bytes,
            devices=[
                common_pb2.DeviceRequest(
                    kind=device.kind,
                    count=device.count,
                    share_thousandths=device.share_thousandths,
                    constraints=[constraint_to_proto(constraint) for constraint in device.constraints],
                )
                for device in spec.resources.devices
            ],
        ),
        task=task_to_proto(spec.task),
        fence_after_ms=spec.fence_after_ns // MS_NS,
        writes=job_pb2.Writes.Value(spec.writes.value),
        checkpoint=checkpoint_spec_to_proto(spec.checkpoint),
        restart=job_pb2.RestartSpec(
            max=spec.restart.max,
            window_ms=spec.restart.window_ns // MS_NS,
            allow=[way.value for way in spec.restart.allow],
        ),
        node_constraints=[constraint_to_proto(constraint) for constraint in spec.node_constraints],
        priority=spec.priority,
        fencing=spec.fencing,
        start_timeout_ms=spec.start_timeout_ns // MS_NS,
    )


def task_to_proto(task: TaskSpec) -> job_pb2.TaskSpec:
    return job_pb2.TaskSpec(
        command=task.command,
        env=dict(task.env),
        working_directory=task.working_directory,
        user=task.user,
        group=task.group,
        grace_ms=task.grace_ms,
        log_bytes_max=task.log_bytes_max,
        log_files_max=task.log_files_max,
        runtime=task.runtime,
    )


def checkpoint_spec_to_proto(checkpoint: CheckpointSpec) -> job_pb2.CheckpointSpec:
    return job_pb2.CheckpointSpec(
        durability=job_pb2.Durability.Value(checkpoint.durability.value),
        directory=checkpoint.directory,
        keep=checkpoint.keep,
        timeout_ms=checkpoint.timeout_ns // MS_NS,
    )
