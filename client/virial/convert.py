"""Protobuf <-> models: the only place of the SDK that touches messages' fields."""

from __future__ import annotations

from virial.models import (
    Checkpoint,
    CheckpointPolicy,
    Constraint,
    Controller,
    Controllers,
    Cursor,
    Device,
    DeviceGrant,
    DeviceRequest,
    Durability,
    Event,
    Explanation,
    Gang,
    Generation,
    Hold,
    Job,
    JobChange,
    JobError,
    JobSpec,
    JobState,
    JoinToken,
    Link,
    LogChunk,
    Member,
    MembersChange,
    Node,
    Reading,
    Resources,
    RestartPolicy,
    Status,
    StoreMember,
    TaskExit,
    TaskSpec,
    UnfitCount,
    Writes,
)
from virialpb.joinfile import JoinFile
from virialpb.v1 import admin_pb2, cluster_pb2, common_pb2, job_pb2, join_pb2, rdl_pb2

MS_NS = 1_000_000


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
                    kind=d.kind,
                    count=d.count,
                    share_thousandths=d.share_thousandths,
                    constraints=[_constraint_to(c) for c in d.constraints],
                )
                for d in spec.resources.devices
            ],
        ),
        task=job_pb2.TaskSpec(
            command=spec.task.command,
            env=dict(spec.task.env),
            working_directory=spec.task.working_directory,
            user=spec.task.user,
            group=spec.task.group,
            grace_ms=spec.task.grace_ns // MS_NS,
            log_bytes_max=spec.task.log_bytes_max,
            log_files_max=spec.task.log_files_max,
            runtime=spec.task.runtime,
        ),
        fence_after_ms=spec.fence_after_ns // MS_NS,
        writes=job_pb2.TOKEN if spec.writes is Writes.TOKEN else job_pb2.SHARED,
        checkpoint=job_pb2.CheckpointSpec(
            durability=(
                job_pb2.SHARED_DIRECTORY if spec.checkpoint.durability is Durability.SHARED else job_pb2.LOCAL_DISK
            ),
            directory=spec.checkpoint.directory,
            keep=spec.checkpoint.keep,
            timeout_ms=spec.checkpoint.timeout_ns // MS_NS,
        ),
        restart=job_pb2.RestartSpec(
            max=spec.restart.max, window_ms=spec.restart.window_ns // MS_NS, allow=spec.restart.allow
        ),
        node_constraints=[_constraint_to(c) for c in spec.node_constraints],
        priority=spec.priority,
        fencing=spec.fencing,
        start_timeout_ms=spec.start_timeout_ns // MS_NS,
    )


def _constraint_to(constraint: Constraint) -> common_pb2.Constraint:
    return common_pb2.Constraint(
        attribute=constraint.attribute,
        operator=common_pb2.Constraint.Operator.Value(constraint.operator),
        values=constraint.values,
    )


def _constraint_from(message: common_pb2.Constraint) -> Constraint:
    name = common_pb2.Constraint.Operator.Name(message.operator)
    return Constraint(message.attribute, name, tuple(message.values))


def spec_from_proto(message: job_pb2.JobSpec) -> JobSpec:
    shared = message.checkpoint.durability == job_pb2.SHARED_DIRECTORY
    return JobSpec(
        name=message.name,
        kind=message.kind,
        gang=Gang(message.gang.ranks, message.gang.spares, message.gang.spread),
        resources=Resources(
            message.resources.cpu_millis,
            message.resources.memory_bytes,
            tuple(
                DeviceRequest(d.kind, d.count, d.share_thousandths, tuple(_constraint_from(c) for c in d.constraints))
                for d in message.resources.devices
            ),
        ),
        task=TaskSpec(
            command=tuple(message.task.command),
            env=tuple(sorted(message.task.env.items())),
            working_directory=message.task.working_directory,
            user=message.task.user,
            group=message.task.group,
            grace_ns=message.task.grace_ms * MS_NS,
            log_bytes_max=message.task.log_bytes_max,
            log_files_max=message.task.log_files_max,
            runtime=message.task.runtime,
        ),
        fence_after_ns=message.fence_after_ms * MS_NS,
        writes=Writes.TOKEN if message.writes == job_pb2.TOKEN else Writes.SHARED,
        checkpoint=CheckpointPolicy(
            durability=Durability.SHARED if shared else Durability.LOCAL,
            directory=message.checkpoint.directory,
            keep=message.checkpoint.keep,
            timeout_ns=message.checkpoint.timeout_ms * MS_NS,
        ),
        restart=RestartPolicy(message.restart.max, message.restart.window_ms * MS_NS, tuple(message.restart.allow)),
        node_constraints=tuple(_constraint_from(c) for c in message.node_constraints),
        priority=message.priority,
        fencing=message.fencing,
        start_timeout_ns=message.start_timeout_ms * MS_NS,
    )


def short(resource_name: str) -> str:
    """The id at the end of a resource name: "jobs/train-1" -> "train-1"."""
    return resource_name.rsplit("/", 1)[-1]


def cursor_from(message: common_pb2.Cursor) -> Cursor:
    return Cursor(message.history, message.revision)


def cursor_to(cursor: Cursor) -> common_pb2.Cursor:
    return common_pb2.Cursor(history=cursor.history, revision=cursor.revision)


def exit_from(message: job_pb2.TaskExit) -> TaskExit:
    return TaskExit(message.reason, message.code, message.signal, message.stderr_tail)


def job_from(message: job_pb2.Job) -> Job:
    error = message.first_error
    return Job(
        id=short(message.name),
        spec=spec_from_proto(message.spec),
        state=JobState(job_pb2.Job.State.Name(message.state)),
        generation=message.generation,
        restarts=message.restarts,
        current=_generation_from(message.current) if message.HasField("current") else None,
        first_error=(
            JobError(
                error.generation,
                error.rank,
                error.node,
                error.stop_reason,
                error.detail,
                exit_from(error.exit) if error.HasField("exit") else None,
            )
            if message.HasField("first_error")
            else None
        ),
        checkpoints=tuple(
            Checkpoint(short(c.name), c.generation, c.step, c.state, c.parts, c.world_size, c.size_bytes, c.tier)
            for c in message.checkpoints
        ),
        create_time_unix_ns=message.create_time_unix_ns,
        end_time_unix_ns=message.end_time_unix_ns,
        revision=message.revision,
        progress_step=message.progress_step if message.progress_step >= 0 else None,
        aborted_saves=message.aborted_saves,
        last_abort_reason=message.last_abort_reason,
    )


def _generation_from(message: job_pb2.Generation) -> Generation:
    return Generation(
        number=message.number,
        epoch=(message.epoch.history, message.epoch.revision),
        phase=message.phase,
        members=tuple(_member_from(m) for m in message.members),
        restored_checkpoint=message.restored_checkpoint,
        restored_step=message.restored_step,
        stop_reason=message.stop_reason,
    )


def _member_from(message: job_pb2.Member) -> Member:
    return Member(
        slot=message.slot,
        rank=message.rank if message.rank >= 0 else None,
        node=message.node_name,
        node_uid=short(message.node),
        lease=message.lease,
        task_state=message.task_state,
        progress_step=message.progress_step if message.progress_step >= 0 else None,
        exit=exit_from(message.exit) if message.HasField("exit") else None,
        cpu_millis=message.cpu_millis,
        memory_bytes=message.memory_bytes,
        devices=tuple(DeviceGrant(d.device_key, d.share_thousandths) for d in message.devices),
    )


def change_from(message: job_pb2.WatchJobsResponse) -> JobChange:
    has_job = message.HasField("job") and not message.deleted
    return JobChange(
        cursor=cursor_from(message.cursor),
        job=job_from(message.job) if has_job else None,
        deleted_id=short(message.job.name) if message.deleted else "",
        synced=message.synced,
    )


def explanation_from(message: job_pb2.ExplainJobResponse) -> Explanation:
    return Explanation(
        job=short(message.name),
        state=JobState(job_pb2.Job.State.Name(message.state)),
        reasons=tuple(
            UnfitCount(r.reason, r.nodes, tuple(sorted(r.numbers.items())), tuple(sorted(r.details.items())))
            for r in message.reasons
        ),
        nodes_considered=message.nodes_considered,
        relaxation=message.relaxation,
    )


def logs_from(message: job_pb2.ReadLogsResponse) -> LogChunk:
    return LogChunk(message.data, message.generation, message.rank, message.next_offset)


def _attribute(message: rdl_pb2.Device, key: str) -> str | int | bool:
    value = message.attributes[key]
    match value.WhichOneof("value"):
        case "integer":
            return value.integer
        case "flag":
            return value.flag
        case _:
            return value.text


def node_from(message: cluster_pb2.Node) -> Node:
    return Node(
        name=short(message.name),
        uid=message.uid,
        liveness=message.liveness,
        connected=message.connected,
        schedulable=message.schedulable,
        draining=message.draining,
        holds=tuple(Hold(h.owner, h.reason, h.expire_time_unix_ns, h.device_key) for h in message.holds),
        advertise_address=message.advertise_address,
        fencing=message.fencing,
        cpu_millis=message.cpu_millis,
        memory_bytes=message.memory_bytes,
        cpu_free_millis=message.cpu_free_millis,
        memory_free_bytes=message.memory_free_bytes,
        labels=tuple(sorted(message.labels.items())),
        devices=tuple(
            Device(
                d.key,
                d.kind,
                d.name,
                d.vendor_id,
                tuple((k, _attribute(d, k)) for k in sorted(d.attributes)),
                tuple(sorted(d.capacity.items())),
            )
            for d in message.inventory.devices
        ),
        links=tuple(
            Link(
                link.key,
                link.kind,
                link.end_a,
                link.end_b,
                link.state,
                link.rail,
                link.expected_bytes_per_second,
                link.current_bytes_per_second if link.HasField("current_bytes_per_second") else None,
            )
            for link in message.inventory.links
        ),
        readings=tuple(
            Reading(r.name, r.value if r.HasField("value") else None, r.unit, r.quality, r.age_ms)
            for r in message.readings
        ),
        slots=tuple(message.slots),
        beat_age_ms=message.beat_age_ms if message.beat_age_ms >= 0 else None,
        version=message.version,
        revision=message.revision,
    )


def event_from(message: common_pb2.Event) -> Event:
    return Event(
        sequence=message.sequence,
        kind=message.kind,
        job=short(message.job),
        node=short(message.node),
        generation=message.generation,
        reason=message.reason,
        numbers=tuple(sorted(message.numbers.items())),
        details=tuple(sorted(message.details.items())),
        create_time_unix_ns=message.create_time_unix_ns,
        cause_id=message.cause_id,
        revision=message.revision,
    )


def status_from(message: cluster_pb2.ClusterStatus) -> Status:
    return Status(
        cluster_uid=message.cluster_uid,
        cursor=cursor_from(message.cursor),
        leader=message.leader,
        leader_epoch=(message.leader_epoch.history, message.leader_epoch.revision),
        nodes_live=message.nodes_live,
        nodes_suspect=message.nodes_suspect,
        nodes_expired=message.nodes_expired,
        jobs_by_state=tuple(sorted(message.jobs_by_state.items())),
        store_kind=message.store_kind,
        version=message.version,
        problems=tuple(message.problems),
    )


def controllers_from(message: admin_pb2.ListControllersResponse) -> Controllers:
    return Controllers(
        controllers=tuple(
            Controller(c.address, c.identity, c.role, c.version, c.member_id) for c in message.controllers
        ),
        members=tuple(_store_member_from(m) for m in message.members),
        problems=tuple(message.problems),
        store_kind=message.store_kind,
    )


def members_change_from(message: admin_pb2.ChangeMembersResponse) -> MembersChange:
    members = tuple(_store_member_from(m) for m in message.members)
    return MembersChange(members, tuple(message.peers), message.added_id)


def _store_member_from(message: admin_pb2.StoreMember) -> StoreMember:
    return StoreMember(
        id=message.id,
        name=message.name,
        peer_url=message.peer_url,
        role=message.role,
        controller=message.controller,
        version=message.version,
        lag_entries=message.lag_entries,
        size_bytes=message.size_bytes,
        used_bytes=message.used_bytes,
    )


def join_token_from(message: join_pb2.CreateJoinTokenResponse, secret: str) -> JoinToken:
    text = JoinFile(message.cluster, message.node, secret, message.ca.decode("ascii", "replace")).text
    return JoinToken(message.cluster, message.node, message.expire_time_unix_ns, text)
