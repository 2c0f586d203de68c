"""The wire form: what goes out says everything, and what comes in is checked once."""

from __future__ import annotations

import pytest

from noded.core import messages as m
from noded.link.convert import BadOrder, epoch_of, inventory_to_proto, order_from_proto, report_to_proto
from tests.unit.noded_builders import CHECKPOINT, FACTS, SLOT, TOKEN, UID
from virialpb.ids import CheckpointId, Epoch, Incarnation, JobId, SlotId
from virialpb.reasons import ExitReason, PrepareFailure, Reason, StopReason
from virialpb.v1 import common_pb2, job_pb2, node_pb2

WIRE_TOKEN = common_pb2.Token(job="j", generation=1, epoch=common_pb2.Epoch(history=1, revision=20))


def received(**message: object) -> m.Order | None:
    return order_from_proto(node_pb2.ControlDown(**message))  # type: ignore[arg-type]


def test_a_hello_says_everything() -> None:
    status = m.SlotStatus(
        SLOT,
        TOKEN,
        m.SlotState.PREPARE_FAILED,
        port=1,
        exit=m.TaskExit(ExitReason.SIGNALED, 0, 9, "tail"),
        progress_step=4,
        metrics=(("loss", 0.5),),
        failure=PrepareFailure.DEVICE_BUSY,
        failure_detail="gpu-0",
        progress_age_ms=3,
        prepared_bytes=5,
    )
    samples = (m.Sample("t", 5, "count", "ok", 1), m.Sample("u", None, "count", "absent", 1))
    hello = m.Hello(
        Incarnation(UID, "b", "g"),
        FACTS,
        "weak",
        m.Beat(9, (status,), samples, guardian_ok=False),
        Epoch(1, 2),
        (SLOT,),
    )
    wire = report_to_proto(hello).hello
    assert (wire.incarnation.node_uid, wire.incarnation.boot_id, wire.incarnation.guardian_nonce) == ("u1", "b", "g")
    assert (wire.name, wire.advertise_address, wire.cpu_millis, wire.memory_bytes) == ("n1", "10.0.0.1", 8000, 1 << 30)
    assert (wire.fencing, wire.leader_epoch_seen.revision, list(wire.gone_slots)) == ("weak", 2, ["j.1.0"])
    assert (wire.beat.seq, wire.beat.guardian_ok) == (9, False)
    (slot,) = wire.beat.slots
    assert slot.token == WIRE_TOKEN
    assert slot.state == node_pb2.SlotStatus.PREPARE_FAILED
    assert (slot.exit.reason, slot.exit.signal, slot.exit.stderr_tail) == ("SIGNALED", 9, "tail")
    assert (slot.port, slot.progress_step, dict(slot.metrics), slot.progress_age_ms) == (1, 4, {"loss": 0.5}, 3)
    assert (slot.failure, slot.failure_detail) == ("DEVICE_BUSY", "gpu-0")
    assert slot.prepared_bytes == 5
    known, unknown = wire.beat.readings
    assert (known.value, known.HasField("value"), unknown.HasField("value")) == (5, True, False)


def test_every_slot_state_has_a_wire_form() -> None:
    for state in m.SlotState:
        beat = m.Beat(1, (m.SlotStatus(SLOT, TOKEN, state),))
        wire = report_to_proto(beat).beat.slots[0].state
        assert node_pb2.SlotStatus.State.Name(wire) == state.value


def test_task_calls() -> None:
    bodies: list[tuple[m.CallBody, str]] = [
        (m.CheckpointBeginCall(7), "checkpoint_begin"),
        (m.CheckpointPreparedCall(CHECKPOINT, 7, 9, "d", "f"), "checkpoint_prepared"),
        (m.CheckpointWaitCall(CHECKPOINT), "checkpoint_wait"),
        (m.CheckpointFailedCall(CHECKPOINT, "r", "text"), "checkpoint_failed"),
    ]
    for body, name in bodies:
        wire = report_to_proto(m.TaskCall(5, SLOT, TOKEN, body)).task_call
        assert (wire.call_id, wire.WhichOneof("call"), wire.token) == (5, name, WIRE_TOKEN)


def test_an_inventory_keeps_unknown_apart_from_zero() -> None:
    inventory = m.Inventory(
        devices=(m.Device("k", "nic", attributes=(("flag", True), ("n", 1), ("t", "x")), interconnect_protocol="p"),),
        links=(m.Link("l", "ethernet", "a", "b", current_bytes_per_second=0), m.Link("m", "ethernet", "a", "b")),
        domains=(m.Domain("rack", "r1", "row-1"),),
    )
    wire = inventory_to_proto(3, inventory).inventory
    assert wire.seq == 3
    first, second = wire.inventory.links
    assert (first.HasField("current_bytes_per_second"), second.HasField("current_bytes_per_second")) == (True, False)
    attributes = wire.inventory.devices[0].attributes
    assert [attributes[name].WhichOneof("value") for name in ("flag", "n", "t")] == ["flag", "integer", "text"]


def test_a_prepare_is_read_whole() -> None:
    wire = node_pb2.Prepare(
        slot="j.1.0",
        token=WIRE_TOKEN,
        rank=0,
        world_size=2,
        cpu_millis=5,
        memory_bytes=6,
        devices=[common_pb2.DeviceGrant(device_key="gpu", share_thousandths=250)],
        task=job_pb2.TaskSpec(command=["a", "b"], env={"Z": "1", "A": "2"}, user="u", grace_ms=9),
        fence_after_ms=60_000,
        hold_port=True,
        restore=node_pb2.Restore(
            checkpoint="c1", step=7, tier="local", file="rank-00003.shard", digest="d", size_bytes=8
        ),
        cause_id="why",
    )
    assert received(prepare=wire) == m.Prepare(
        SLOT,
        TOKEN,
        0,
        2,
        m.TaskSpec(("a", "b"), (("A", "2"), ("Z", "1")), "", "u", "", 9, log_bytes_max=0, log_files_max=0, runtime=""),
        60_000,
        5,
        6,
        (m.DeviceGrant("gpu", 250),),
        hold_port=True,
        restore=m.Restore(CHECKPOINT, 7, "", m.Tier.LOCAL, "rank-00003.shard", "d", 8),
        cause_id="why",
    )
    wire.rank = -1
    spare = received(prepare=wire)
    assert isinstance(spare, m.Prepare)
    assert spare.rank is None


def test_the_other_orders() -> None:
    owner = {"slot": "j.1.0", "token": WIRE_TOKEN}
    assert received(welcome=node_pb2.Welcome(renew_interval_ms=5, cluster_uid="c")) == m.Welcome(5, "c")
    assert received(beat_ack=node_pb2.BeatAck(seq=7)) == m.BeatAck(7)
    go = node_pb2.Go(**owner, world_size=2, master_address="h", master_port=3, restart_count=4)  # type: ignore[arg-type]
    assert received(go=go) == m.Go(SLOT, TOKEN, 2, "h", 3, 4)
    stop = node_pb2.Stop(**owner, grace_ms=5, reason="DRAIN")  # type: ignore[arg-type]
    assert received(stop=stop) == m.Stop(SLOT, TOKEN, 5, StopReason.DRAIN)
    assert received(release=node_pb2.Release(**owner)) == m.Release(SLOT, TOKEN)  # type: ignore[arg-type]
    save = node_pb2.SaveNow(**owner, step=-1, reason="r")  # type: ignore[arg-type]
    assert received(save_now=save) == m.SaveNow(SLOT, TOKEN, -1, "r")
    drop = node_pb2.DropCheckpoint(job="j", checkpoint="c1", directory="/s/c1", tier="shared")
    assert received(drop_checkpoint=drop) == m.DropCheckpoint(JobId("j"), CHECKPOINT, "/s/c1", m.Tier.SHARED)
    own = node_pb2.DropCheckpoint(job="j", checkpoint="c1", directory="u/j.1/c1", tier="local")
    assert received(drop_checkpoint=own) == m.DropCheckpoint(JobId("j"), CHECKPOINT, "u/j.1/c1", m.Tier.LOCAL)
    outcome = node_pb2.CheckpointOutcome(**owner, checkpoint="c1", state="COMMITTED")  # type: ignore[arg-type]
    assert received(checkpoint_outcome=outcome) == m.CheckpointOutcome(SLOT, TOKEN, CHECKPOINT, "COMMITTED")
    reply = node_pb2.TaskReply(call_id=1, slot="j.1.0", error="STALE", error_message="m")
    assert received(task_reply=reply) == m.TaskReply(1, SLOT, Reason.STALE, "m")
    refused = node_pb2.SessionRefused(reason="NO_LEADER", message="m")
    assert received(session_refused=refused) == m.SessionRefused(Reason.NO_LEADER, "m")
    assert received() is None
    assert epoch_of(node_pb2.ControlDown(leader_epoch=common_pb2.Epoch(history=2, revision=3))) == Epoch(2, 3)
    spare = node_pb2.Release(slot="j.1.s0", token=WIRE_TOKEN)
    assert received(release=spare) == m.Release(SlotId("j.1.s0"), TOKEN)
    assert CheckpointId("c1") == CHECKPOINT


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ({"release": node_pb2.Release(slot="../../etc", token=WIRE_TOKEN)}, "slot"),
        ({"release": node_pb2.Release(slot="j.1.0", token=common_pb2.Token(job="../x"))}, "job"),
        ({"drop_checkpoint": node_pb2.DropCheckpoint(job="j", checkpoint="..", tier="local")}, "checkpoint"),
        ({"drop_checkpoint": node_pb2.DropCheckpoint(job="j", checkpoint="c1", tier="moon")}, "tier"),
        ({"drop_checkpoint": node_pb2.DropCheckpoint(job="j", checkpoint="c1", directory="/s/../etc")}, "directory"),
        (
            {"drop_checkpoint": node_pb2.DropCheckpoint(job="j", checkpoint="c1", directory="s", tier="shared")},
            "directory",
        ),
        *(
            (
                {"drop_checkpoint": node_pb2.DropCheckpoint(job="j", checkpoint="c1", directory=out, tier="local")},
                "directory",
            )
            for out in ("..", "a/../..", "a//b", "a/", "./a")
        ),
        ({"prepare": node_pb2.Prepare(slot="j.1.0", token=WIRE_TOKEN)}, "command"),
        (
            {
                "prepare": node_pb2.Prepare(
                    slot="j.1.0", token=WIRE_TOKEN, task=job_pb2.TaskSpec(command=["a"], env={"": "x"})
                )
            },
            "env",
        ),
        (
            {
                "prepare": node_pb2.Prepare(
                    slot="j.1.0",
                    token=WIRE_TOKEN,
                    task=job_pb2.TaskSpec(command=["a"]),
                    restore=node_pb2.Restore(checkpoint="c1", file="../passwd", tier="local"),
                )
            },
            "file",
        ),
        ({"go": node_pb2.Go(slot="j.1.0", token=WIRE_TOKEN, master_port=70_000)}, "master_port"),
        ({"stop": node_pb2.Stop(slot="j.1.0", token=WIRE_TOKEN, reason="BORED")}, "reason"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused_by_name(message: dict[str, object], names: str) -> None:
    with pytest.raises(BadOrder, match=names):
        received(**message)
