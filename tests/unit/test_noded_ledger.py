"""Calls of tasks on their way to the controller and back."""

from __future__ import annotations

import pytest

from noded.core import events as e
from noded.core import instructions as i
from noded.core import messages as m
from noded.core.agent import AgentCore
from noded.core.ledger import PENDING_MAX, stable_call_id
from tests.unit.noded_builders import CHECKPOINT, SECOND, SLOT, START, TOKEN, order, running, silent
from virialpb.ids import CheckpointId, SlotId
from virialpb.reasons import Reason

ID = stable_call_id("g1", SLOT, "1")
BEGIN = e.TaskCalled(SLOT, TOKEN, "1", "checkpoint_begin", (("step", 7),))
SENT = i.SendTaskCall(m.TaskCall(ID, SLOT, TOKEN, m.CheckpointBeginCall(7)))
BEGUN = m.TaskReply(ID, SLOT, checkpoint="c1", directory="", tier="local", state="BEGUN")


def test_a_call_is_passed_on_with_an_id_that_survives_a_restart() -> None:
    assert silent(running().handle(BEGIN, START)) == [SENT]
    assert stable_call_id("g1", SlotId("j.1.0"), "1") == ID
    assert len({ID, stable_call_id("g2", SLOT, "1"), stable_call_id("g1", SLOT, "2")}) == 3


def test_a_local_checkpoint_gets_this_nodes_directory_owned_by_the_tasks_user() -> None:
    agent = running()
    agent.handle(BEGIN, START)
    assert silent(agent.handle(order(BEGUN), START)) == [i.MakeDirectory(ID, "/d/checkpoints/j/c1", "a", "")]
    assert silent(agent.handle(order(BEGUN), START)) == []
    result = (("checkpoint_id", "c1"), ("directory", "/d/checkpoints/j/c1"), ("tier", "local"))
    assert silent(agent.handle(e.DirectoryMade(ID), START)) == [i.GuardianReply(SLOT, "1", result)]
    assert silent(agent.handle(order(BEGUN), START)) == []
    assert agent.counters["late_reply"] == 2


def test_a_shared_checkpoint_keeps_the_controllers_directory() -> None:
    agent = running()
    agent.handle(BEGIN, START)
    shared = m.TaskReply(ID, SLOT, checkpoint="c1", directory="/s/c1", tier="shared", state="BEGUN")
    assert silent(agent.handle(order(shared), START)) == [i.MakeDirectory(ID, "/s/c1", "a", "")]


@pytest.mark.parametrize(("full", "reason"), [(True, Reason.STORAGE_FULL), (False, Reason.PERMISSION_DENIED)])
def test_case_g8_a_directory_that_cannot_be_made_fails_the_save_and_tells_the_controller(
    full: bool, reason: Reason
) -> None:
    agent = running()
    agent.handle(BEGIN, START)
    agent.handle(order(BEGUN), START)
    failed = m.TaskCall(ID ^ 1, SLOT, TOKEN, m.CheckpointFailedCall(CHECKPOINT, reason, "no room"))
    assert silent(agent.handle(e.DirectoryFailed(ID, full, "no room"), START)) == [
        i.GuardianReply(SLOT, "1", error=reason, message="no room"),
        i.SendTaskCall(failed),
    ]
    # nobody waits for the answer to the agent's own report
    assert silent(agent.handle(order(m.TaskReply(ID ^ 1, SLOT)), START)) == []


def test_a_refusal_reaches_the_task() -> None:
    agent = running()
    agent.handle(BEGIN, START)
    refused = m.TaskReply(ID, SLOT, error=Reason.STALE, error_message="a later step")
    assert silent(agent.handle(order(refused), START)) == [
        i.GuardianReply(SLOT, "1", error=Reason.STALE, message="a later step")
    ]


def test_prepared_and_wait_are_answered_with_a_state() -> None:
    agent = running()
    arguments = (("checkpoint_id", "c1"), ("step", 7), ("size_bytes", 9), ("digest", "d"), ("file", "rank-00000.shard"))
    called = e.TaskCalled(SLOT, TOKEN, "1", "checkpoint_prepared", arguments)
    body = m.CheckpointPreparedCall(CheckpointId("c1"), 7, 9, "d", "rank-00000.shard")
    assert silent(agent.handle(called, START)) == [i.SendTaskCall(m.TaskCall(ID, SLOT, TOKEN, body))]
    assert silent(agent.handle(order(m.TaskReply(ID, SLOT, state="PREPARED")), START)) == [
        i.GuardianReply(SLOT, "1", (("state", "PREPARED"),))
    ]


def test_unanswered_calls_are_sent_again_after_a_reconnect_and_from_time_to_time() -> None:
    agent = running()
    agent.handle(BEGIN, START)
    agent.handle(e.Disconnected(), START)
    second = e.TaskCalled(SLOT, TOKEN, "2", "checkpoint_wait", (("checkpoint_id", "c1"),))
    assert silent(agent.handle(second, START)) == []
    agent.handle(e.Connected(), START)
    waiting = m.TaskCall(stable_call_id("g1", SLOT, "2"), SLOT, TOKEN, m.CheckpointWaitCall(CheckpointId("c1")))
    both = [SENT, i.SendTaskCall(waiting)]
    assert silent(agent.handle(order(m.Welcome(1000, "cluster")), START)) == both
    for second_ in range(1, 5):
        assert silent(agent.handle(order(m.BeatAck(0)), START + second_ * SECOND)) == []
    assert silent(agent.handle(e.Tick(), START + 4 * SECOND)) == []
    assert silent(agent.handle(e.Tick(), START + 5 * SECOND)) == both
    # told twice by the guardian, after its connection broke: still one call
    assert silent(agent.handle(BEGIN, START + 5 * SECOND)) == [SENT]


@pytest.mark.parametrize(
    ("call", "arguments", "what"),
    [
        ("checkpoint_begin", (("step", "7"),), "step"),
        ("checkpoint_begin", (("step", True),), "step"),
        ("checkpoint_begin", (("step", -1),), "step"),
        ("checkpoint_begin", (), "step"),
        ("checkpoint_wait", (("checkpoint_id", "../etc"),), "checkpoint_id"),
        ("checkpoint_failed", (("checkpoint_id", "c1"), ("reason", "x" * 1001), ("message", "")), "reason"),
        ("format_disk", (), "unknown call"),
    ],
)
def test_a_malformed_call_is_refused_by_name(
    call: str, arguments: tuple[tuple[str, e.ArgumentValue], ...], what: str
) -> None:
    (reply,) = silent(running().handle(e.TaskCalled(SLOT, TOKEN, "1", call, arguments), START))
    assert isinstance(reply, i.GuardianReply)
    assert reply.error == Reason.INVALID_SPEC
    assert what in reply.message


def test_pending_calls_are_bounded() -> None:
    agent = running()
    for number in range(PENDING_MAX):
        agent.handle(e.TaskCalled(SLOT, TOKEN, str(number), "checkpoint_begin", (("step", 7),)), START)
    (reply,) = silent(agent.handle(e.TaskCalled(SLOT, TOKEN, "last", "checkpoint_begin", (("step", 7),)), START))
    assert isinstance(reply, i.GuardianReply)
    assert reply.error == Reason.OVERLOADED


def test_a_call_of_a_slot_that_is_over_is_fenced() -> None:
    agent: AgentCore = running()
    agent.handle(e.TaskExited(SLOT, TOKEN, m.TaskExit(m.ExitReason.EXITED)), START)
    (reply,) = silent(agent.handle(BEGIN, START))
    assert isinstance(reply, i.GuardianReply)
    assert reply.error == Reason.FENCED
