"""Bytes that were stored once load for ever: `tests/golden/records/v1` holds one of each record as version 1 wrote it.

A field added to the model later is not in those bytes and must read as its default: nothing here changes then. Never
write these files again; a new version gets a new folder. `names.txt` lists every name of a closed set that version 1
could store: none may be taken out of the model.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import pytest

from controld.core import keys
from controld.core.ids import CheckpointId, Incarnation, JobId, NodeUid, SlotId
from controld.core.model import (
    Checkpoint,
    CheckpointState,
    Cluster,
    Device,
    DeviceGrant,
    Domain,
    Event,
    EventPack,
    Generation,
    Hold,
    Inventory,
    Job,
    JobState,
    JoinToken,
    LeaseState,
    Link,
    Liveness,
    Member,
    Node,
    Phase,
    Record,
    Request,
    RequestPack,
    ShardPart,
    TaskError,
    TaskExit,
    Tier,
)
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
from controld.store import codec
from virialpb.reasons import ExitReason, StopReason

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "records" / "v1"
DAY = 1_767_225_600_000_000_000
N1, N2 = NodeUid("n-4f2a"), NodeUid("n-77b0")

NODE = Node(
    uid=N1,
    name="rack1-node3",
    incarnation=Incarnation(N1, "b00t", "n0nce"),
    liveness=Liveness.SUSPECT,
    advertise_address="10.0.0.3",
    fencing="power",
    cpu_millis=96_000,
    memory_bytes=1 << 40,
    labels=(("zone", "a"), ("pool", "train")),
    inventory=Inventory(
        devices=(
            Device(
                key="accelerator/0000:17:00.0",
                kind="accelerator",
                name="H100",
                vendor_id="10de:2330",
                attributes=(("driver", "550.54"), ("numa", 0), ("mig", False)),
                capacity=(("memory_bytes", 80 << 30),),
                interconnect_protocol="nvlink",
                interconnect_max_latency_ns=150,
                interconnect_bandwidth_bytes_per_second=900_000_000_000,
            ),
        ),
        links=(
            Link(
                key="rail0",
                kind="infiniband",
                end_a="rack1-node3/mlx5_0",
                end_b="leaf1/7",
                rail="0",
                expected_bytes_per_second=50_000_000_000,
                current_bytes_per_second=0,
                expected_width_lanes=4,
                current_width_lanes=None,
                state="up",
            ),
        ),
        domains=(Domain(kind="rack", name="rack1", parent="row2"),),
        attributes=(("kernel", "6.1"), ("sockets", 2), ("secure_boot", True)),
    ),
    holds=(Hold(owner="operator", reason="RMA 1881", expire_time_unix_ns=DAY, device_key="accelerator/0000:17:00.0"),),
    draining=True,
    version="0.1.0",
)
SPEC = JobSpec(
    name="pretrain",
    gang=GangSpec(ranks=2, spares=1, spread="rack"),
    resources=Resources(
        cpu_millis=8_000,
        memory_bytes=64 << 30,
        devices=(
            DeviceRequest(
                kind="accelerator",
                count=0,
                share_thousandths=500,
                constraints=(Constraint("memory_bytes", Operator.GE, ("42949672960",)),),
            ),
        ),
    ),
    task=TaskSpec(
        command=("python", "-m", "train"),
        env=(("SEED", "7"), ("EMPTY", "")),
        working_directory="/srv/train",
        user="alice",
        group="ml",
        grace_ms=0,
        log_bytes_max=1 << 20,
        log_files_max=0,
        runtime="",
    ),
    kind="training",
    fence_after_ns=30_000_000_000,
    writes=Writes.TOKEN,
    checkpoint=CheckpointSpec(Durability.SHARED_DIRECTORY, "/mnt/ckpt", 0, 1_000_000_000),
    restart=RestartSpec(max=0, window_ns=0, allow=(RestartWay.SPARE,)),
    node_constraints=(Constraint("zone", Operator.IN, ("a", "b")), Constraint("gpu", Operator.EXISTS)),
    priority=-5,
    fencing="power",
    start_timeout_ns=120_000_000_000,
)
EXIT = TaskExit(ExitReason.SIGNALED, code=-1, signal=9, stderr_tail="Killed ☠")
JOB = Job(
    id=JobId("pretrain-12"),
    spec=SPEC,
    state=JobState.RESTARTING,
    create_time_unix_ns=DAY,
    owner="alice",
    generation=2,
    restart_times_unix_ns=(DAY + 1, DAY + 2),
    restarts=2,
    fruitless_generations=1,
    checkpoint_counter=7,
    first_error=TaskError(1, 0, N1, StopReason.RANK_FAILED, "rank 0 died", EXIT),
    end_time_unix_ns=0,
    highest_step=-1,
    number=12,
)
GENERATION = Generation(
    job=JobId("pretrain-12"),
    number=2,
    phase=Phase.STOPPING,
    members=(
        Member(
            slot=SlotId("pretrain-12.2.0"),
            rank=0,
            node=N1,
            incarnation=Incarnation(N1, "b00t", "n0nce"),
            cpu_millis=8_000,
            memory_bytes=64 << 30,
            devices=(DeviceGrant("accelerator/0000:17:00.0", 500), DeviceGrant("nic/mlx5_0", 0)),
            lease=LeaseState.REVOKING,
            exit=EXIT,
        ),
        Member(
            slot=SlotId("pretrain-12.2.s0"),
            rank=None,
            node=N2,
            incarnation=Incarnation(N2, "b", "n"),
            cpu_millis=8_000,
            memory_bytes=64 << 30,
            lease=LeaseState.GRANTED,
        ),
    ),
    restored_checkpoint=CheckpointId("c-6"),
    restored_step=6_000,
    master_address="10.0.0.3",
    master_port=29_500,
    stop_reason=StopReason.NODE_LOST,
    progressed=True,
    cause_id="cause-1",
)
EXPECTED: dict[str, Record] = {
    "cluster": Cluster(uid="c-1", job_counter=12, event_sequence=99),
    "cluster-2": Cluster(uid="c-1", job_counter=12, event_sequence=99, request_sequence=7),
    "node": NODE,
    "job": JOB,
    "job-defaults": Job(
        id=JobId("small"),
        spec=JobSpec("small", GangSpec(1), Resources(1, 1), TaskSpec(("true",))),
        state=JobState.PENDING,
        create_time_unix_ns=DAY,
    ),
    "generation": GENERATION,
    "checkpoint": Checkpoint(
        job=JobId("pretrain-12"),
        id=CheckpointId("c-7"),
        generation=2,
        step=7_000,
        world_size=2,
        tier=Tier.SHARED,
        directory="/mnt/ckpt/c-7",
        state=CheckpointState.COMMITTED,
        parts=(
            ShardPart(0, N1, 1 << 33, "blake2b:00ff", "shard-0", False),
            ShardPart(1, N2, 0, "blake2b:ff00", "shard-1", True),
        ),
        begin_time_unix_ns=DAY,
    ),
    "join-token": JoinToken("5e" * 32, "node-7", 1_700_000_000_000_000_000, "c0" * 32),
    "request-pack": RequestPack(6, (Request("req:1", "sha:abc", "jobs/pretrain-12", DAY), Request("req:2", "", "", 0))),
    "event-pack": EventPack(98, (Event("job.submitted", sequence=98), Event("job.failed", job="small", sequence=99))),
    "request": Request("req:1", "sha:abc", "jobs/pretrain-12", DAY),
    "event": Event(
        kind="lease.granted",
        job="pretrain-12",
        node=N1,
        generation=2,
        reason="NODE_LOST",
        numbers=(("ranks", 2), ("missing", -1)),
        details=(("rail", "0"),),
        cause_id="cause-1",
        sequence=99,
        create_time_unix_ns=DAY,
    ),
}
CLOSED_SETS: tuple[type[StrEnum], ...] = (
    *(CheckpointState, Durability, ExitReason, JobState, LeaseState, Liveness, Operator, Phase),
    *(RestartWay, StopReason, Tier, Writes),
)


@pytest.mark.row("H3")
@pytest.mark.parametrize("name", EXPECTED)
def test_what_version_1_stored_loads(name: str) -> None:
    record = EXPECTED[name]
    assert codec.decode(keys.of(record), (GOLDEN / f"{name}.binpb").read_bytes()) == record


def test_every_file_of_version_1_is_looked_at() -> None:
    assert {path.stem for path in GOLDEN.glob("*.binpb")} == set(EXPECTED)
    assert {type(record) for record in EXPECTED.values()} == set(Record.__args__)


def test_no_name_that_version_1_stored_was_taken_out() -> None:
    known = {f"{names.__name__} {name}" for names in CLOSED_SETS for name in names}
    assert set((GOLDEN / "names.txt").read_text().splitlines()) - known == set()
