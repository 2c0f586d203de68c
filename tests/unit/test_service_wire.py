"""Both ends of the agent's streams read what the other writes: controller and agent have codecs of their own."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from controld.core import agent
from controld.core.ids import CheckpointId, Epoch, Incarnation, JobId, NodeUid, SlotId, Token
from controld.core.model import DeviceGrant, Tier
from controld.core.spec import CheckpointSpec, TaskSpec
from controld.service.convert.agent import hello_from_proto, order_to_proto, report_from_proto
from controld.service.convert.bulk import LogChunk, bulk_from_proto, bulk_hello_from_proto
from controld.service.failures import CallError
from noded.core import messages as m
from noded.link.convert import (
    bulk_hello_to_proto,
    epoch_of,
    inventory_to_proto,
    log_chunk_to_proto,
    order_from_proto,
    report_to_proto,
)
from virialpb.reasons import ExitReason, PrepareFailure, Reason, StopReason
from virialpb.v1 import job_pb2, node_pb2

EPOCH = Epoch(2, 77)
TOKEN = Token(JobId("train-1"), 3, Epoch(1, 42))
SLOT = SlotId("train-1.3.0")
SPARE = SlotId("train-1.3.s0")
CHECKPOINT = CheckpointId("c-7")
INCARNATION = Incarnation(NodeUid("5b0a7d3e"), "boot-1", "nonce-1")

ORDERS: tuple[agent.Order, ...] = (
    agent.Welcome(1_000, "cluster-uid"),
    agent.BeatAck(12),
    agent.Prepare(
        slot=SLOT,
        token=TOKEN,
        rank=2,
        world_size=4,
        cpu_millis=1_500,
        memory_bytes=1 << 40,
        devices=(DeviceGrant("gpu-1"), DeviceGrant("gpu-2", 250)),
        task=TaskSpec(("python", "train.py"), (("A", "1"), ("B", "é")), "/work", "nobody", "nogroup", 7, 8 << 20, 9),
        checkpoint=CheckpointSpec(),
        fence_after_ms=5_000,
        hold_port=True,
        restore=agent.Restore(CHECKPOINT, 80, "/shared/c-7", Tier.SHARED, "rank-00002.shard", "sha256:ab", 1 << 33),
        cause_id="c-1",
    ),
    agent.Prepare(
        slot=SPARE,
        token=TOKEN,
        rank=None,
        world_size=4,
        cpu_millis=1,
        memory_bytes=1,
        devices=(),
        task=TaskSpec(("true",)),
        checkpoint=CheckpointSpec(),
        fence_after_ms=60_000,
        hold_port=False,
    ),
    agent.Go(SLOT, TOKEN, 4, "10.0.0.1", 29_500, 2),
    agent.Stop(SLOT, TOKEN, 5_000, StopReason.DRAIN),
    agent.Release(SLOT, TOKEN),
    agent.TaskReply(9, SLOT, None, "", "c-7", "/shared/c-7", "shared", "COMMITTED"),
    agent.TaskReply(9, SLOT, Reason.FENCED, "its lease is over"),
    agent.SaveNow(SLOT, TOKEN, -1, "drain"),
    agent.DropCheckpoint(JobId("train-1"), CHECKPOINT, "", Tier.LOCAL),
    agent.SessionRefused(Reason.DUPLICATE_NODE, "connected from another place"),
)

EXIT = m.TaskExit(ExitReason.OOM, 0, 9, "Killed\n")
STATUS = m.SlotStatus(
    slot=SLOT,
    token=TOKEN,
    state=m.SlotState.EXITED,
    port=29_500,
    exit=EXIT,
    progress_step=17,
    metrics=(("loss", 0.25),),
    failure=PrepareFailure.SHARD_CORRUPT,
    failure_detail="stripe 3",
    prepared_bytes=4096,
)
BEAT = m.Beat(7, (STATUS,), (m.Sample("cpu_temperature", None, "millidegrees", "absent", 3),), guardian_ok=False)
REPORTS: tuple[m.Report, ...] = (
    BEAT,
    m.TaskCall(1, SLOT, TOKEN, m.CheckpointBeginCall(5)),
    m.TaskCall(2, SLOT, TOKEN, m.CheckpointPreparedCall(CHECKPOINT, 5, 1 << 40, "sha256:ab", "rank-00000.shard")),
    m.TaskCall(3, SLOT, TOKEN, m.CheckpointWaitCall(CHECKPOINT)),
    m.TaskCall(4, SLOT, TOKEN, m.CheckpointFailedCall(CHECKPOINT, "ENOSPC", "no space left")),
    m.DropDone(JobId("train-1"), CHECKPOINT),
)


def plain(value: Any, *, without: frozenset[str] = frozenset()) -> Any:
    """A value of either end as the same mappings, tuples and texts. `without`: what one end does not keep."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name), without=without) for f in fields(value) if f.name not in without}
    if isinstance(value, tuple):
        return tuple(plain(item, without=without) for item in value)  # pyright: ignore[reportUnknownVariableType]
    return str(value) if isinstance(value, str) else value


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_agent_reads_every_order(order: agent.Order) -> None:
    message = order_to_proto(order, EPOCH)
    assert epoch_of(message) == EPOCH
    read = order_from_proto(message)
    # The agent keeps its own checkpoint directory, so that part of a Prepare is not for it.
    without = frozenset({"checkpoint"}) if isinstance(order, agent.Prepare) else frozenset[str]()
    assert type(read).__name__ == type(order).__name__
    if isinstance(order, agent.Prepare):
        assert isinstance(read, m.Prepare)
        assert plain(read.restore) == plain(order.restore)
    assert plain(read, without=without) == plain(order, without=without)


def test_every_kind_of_order_is_among_them() -> None:
    assert {type(order) for order in ORDERS} == set(agent.Order.__args__)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_the_controller_reads_every_report(report: m.Report) -> None:
    read = report_from_proto(report_to_proto(report))
    assert type(read).__name__ == type(report).__name__
    assert plain(read) == plain(report, without=frozenset({"progress_age_ms"}))


def test_the_controller_reads_a_hello() -> None:
    facts = m.NodeFacts("n1", "10.0.0.1", 64_000, 1 << 40, (("rack", "r1"), ("zone", "z")), "0.1.0")
    hello = m.Hello(INCARNATION, facts, "pidns+cgroup", BEAT, EPOCH, (SPARE,))
    read = hello_from_proto(report_to_proto(hello).hello)
    assert read.incarnation == INCARNATION
    assert plain(read.beat) == plain(BEAT, without=frozenset({"progress_age_ms"}))
    for name in ("name", "advertise_address", "cpu_millis", "memory_bytes", "labels", "version"):
        assert getattr(read, name) == getattr(facts, name)
    assert (read.fencing, read.leader_epoch_seen, read.gone_slots) == ("pidns+cgroup", EPOCH, (SPARE,))


def test_the_controller_reads_the_bulk_stream() -> None:
    assert bulk_hello_from_proto(bulk_hello_to_proto(INCARNATION)) == INCARNATION
    inventory = m.Inventory(
        devices=(
            m.Device(
                "cpu-0", "cpu", "socket 0", "v", (("cores", 8), ("smt", True)), (("compute_units", 8),), "upi", 1, 2
            ),
            m.Device("gpu-0", "accelerator"),
        ),
        links=(
            m.Link("l0", "ethernet", "nic-0", "leaf-1", "0", 10, None, 4, None, "unknown"),
            m.Link("l1", "x", "a", "b"),
        ),
        domains=(m.Domain("rack", "r1", "row-1"),),
        attributes=(("kernel", "6.1"),),
    )
    read = bulk_from_proto(inventory_to_proto(5, inventory))
    assert plain(read) == {"seq": 5, "inventory": plain(inventory)}
    chunk = bulk_from_proto(log_chunk_to_proto(3, b"x", 9, end=True, error="NOT_FOUND: x"))
    assert chunk == LogChunk(3, b"x", 9, end=True, error="NOT_FOUND: x")


def status_message(**changes: Any) -> node_pb2.ControlUp:
    fields_: dict[str, Any] = {"slot": SLOT, "state": node_pb2.SlotStatus.EXITED} | changes
    return node_pb2.ControlUp(beat=node_pb2.Beat(seq=1, slots=[node_pb2.SlotStatus(**fields_)]))


def read_status(**changes: Any) -> agent.SlotStatus:
    report = report_from_proto(status_message(**changes))
    assert isinstance(report, agent.Beat)
    return report.slots[0]


def test_an_exit_reason_of_a_newer_agent_is_no_success() -> None:
    status = read_status(exit=job_pb2.TaskExit(reason="EVAPORATED", code=0))
    assert status.exit is not None
    assert not status.exit.succeeded


def test_a_prepare_failure_of_a_newer_agent_stays_one() -> None:
    status = read_status(state=node_pb2.SlotStatus.PREPARE_FAILED, failure="MOON_PHASE", failure_detail="full")
    assert (status.state, status.failure, status.failure_detail) == (agent.SlotState.PREPARE_FAILED, None, "full")


@pytest.mark.parametrize("state", [0, 99])
def test_a_slot_state_that_means_nothing_is_refused(state: int) -> None:
    """Any guess could free a device that is in use."""
    with pytest.raises(CallError, match=r"beat\.slots\.state"):
        report_from_proto(status_message(state=state))


def test_what_a_task_says_of_itself_is_bounded() -> None:
    metrics = {f"m{index:03}": float(index) for index in range(100)} | {"nan": float("nan"), "inf": float("inf")}
    status = read_status(
        metrics=metrics, exit=job_pb2.TaskExit(reason="EXITED", code=1, stderr_tail="x" * 10_000 + "end")
    )
    assert len(status.metrics) == 32
    assert status.exit is not None
    assert status.exit.stderr_tail.endswith("end")
    assert len(status.exit.stderr_tail) == 4_096


def test_a_message_of_a_newer_agent_is_passed_over() -> None:
    assert report_from_proto(node_pb2.ControlUp()) is None
    assert report_from_proto(node_pb2.ControlUp(task_call=node_pb2.TaskCall(call_id=1))) is None
    assert bulk_from_proto(node_pb2.BulkUp()) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"advertise_address": "a\nMASTER_PORT=1"}, "advertise_address"),
        ({"advertise_address": "a\0"}, "advertise_address"),
        ({"advertise_address": ""}, "advertise_address"),
        ({"labels": {"rack": "\x1b[2J"}}, "labels"),
        ({"labels": {"": "x"}}, "labels"),
        ({"labels": {"rack": "x" * 254}}, "labels"),
    ],
)
def test_what_a_node_says_of_itself_reaches_ranks_and_terminals_only_when_it_is_plain(
    change: dict[str, Any], named: str
) -> None:
    facts = m.NodeFacts("n1", "fe80::1%eth0", 8000, 1 << 30, labels=(("rack", "r-1 é"),))
    hello = report_to_proto(m.Hello(INCARNATION, facts, "pidns", BEAT, EPOCH)).hello
    hello_from_proto(hello)
    hello.MergeFrom(node_pb2.Hello(**change))
    if change == {"advertise_address": ""}:
        hello.ClearField("advertise_address")
    with pytest.raises(CallError, match=named):
        hello_from_proto(hello)
