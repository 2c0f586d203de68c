"""Sessions, leases, guardians that come and go, leaders and clusters: exact instructions."""

from __future__ import annotations

from dataclasses import replace

from noded.core import events as e
from noded.core import instructions as i
from noded.core import messages as m
from noded.core.agent import AgentCore
from noded.core.slots import record_of
from tests.unit.noded_builders import (
    FACTS,
    GO,
    LEADER,
    LEASE_NS,
    MS,
    PREPARE,
    SECOND,
    SLOT,
    START,
    TOKEN,
    UID,
    beats,
    core,
    hello,
    online,
    order,
    ready,
    running,
    silent,
    state,
    status,
)
from virialpb.ids import NO_EPOCH, Epoch, Incarnation, JobId, SlotId, Token
from virialpb.reasons import ExitReason, Reason, StopReason

HELD = e.GuardianSlot(SLOT, TOKEN, 0, e.GuardianState.RUNNING, START + 9 * SECOND, pid=100, init_pid=99, start_ticks=7)
LOST = m.TaskExit(ExitReason.GUARDIAN_LOST)


def acked(agent: AgentCore, now_ns: int) -> list[i.Instruction]:
    """Acknowledge the newest beat."""
    (beat,) = beats(agent.handle(e.Tick(), now_ns))
    return silent(agent.handle(order(m.BeatAck(beat.seq)), now_ns + 30 * MS))


# -- hello and beats


def test_no_hello_before_a_guardian_was_met() -> None:
    assert core().handle(e.Connected(), START) == [i.NewSession()]


def test_a_stream_begins_with_a_hello_that_is_a_beat() -> None:
    agent = core()
    assert agent.handle(hello(), START) == []
    assert agent.handle(e.Connected(), START) == [
        i.SendHello(m.Hello(Incarnation(UID, "b1", "g1"), FACTS, "pidns", m.Beat(1)))
    ]


def test_a_beat_goes_out_each_renew_interval_and_lists_every_slot() -> None:
    agent = online()
    agent.handle(order(m.Welcome(500, "cluster")), START)
    assert beats(agent.handle(e.Tick(), START + 499 * MS)) == []
    assert beats(agent.handle(e.Tick(), START + 500 * MS)) == [m.Beat(2)]


def test_changes_within_twenty_milliseconds_share_a_beat() -> None:
    agent = running()
    (first,) = beats(agent.handle(e.Tick(), START + 30 * MS))
    assert [one.state for one in first.slots] == [m.SlotState.RUNNING]
    other = replace(PREPARE, slot=SlotId("k.1.0"), token=Token(JobId("k"), 1, Epoch(1, 21)))
    assert beats(agent.handle(order(other), START + 31 * MS)) == []
    assert beats(agent.handle(e.TaskExited(SLOT, TOKEN, LOST), START + 40 * MS)) == []
    (second,) = beats(agent.handle(e.Tick(), START + 50 * MS))
    assert [one.state for one in second.slots] == [m.SlotState.EXITED, m.SlotState.PREPARING]


def test_first_progress_is_told_at_once_and_later_progress_with_the_next_beat() -> None:
    agent = running()
    agent.handle(e.Tick(), START + 30 * MS)
    at_ns = START + 100 * MS
    (beat,) = beats(agent.handle(e.TaskProgressed(SLOT, TOKEN, e.Progress(0, (("loss", 2.5),), at_ns)), at_ns))
    assert [(one.progress_step, one.metrics) for one in beat.slots] == [(0, (("loss", 2.5),))]
    assert beats(agent.handle(e.TaskProgressed(SLOT, TOKEN, e.Progress(1, (), at_ns)), at_ns + 100 * MS)) == []


def test_readings_ride_on_one_beat() -> None:
    agent = online()
    sample = m.Sample("t", 40_000, "millidegrees_celsius", "ok", 5)
    agent.handle(e.ReadingsTaken((sample,)), START)
    (beat,) = beats(agent.handle(e.Tick(), START + SECOND))
    assert beat.readings == (sample,)
    (beat,) = beats(agent.handle(e.Tick(), START + 2 * SECOND))
    assert beat.readings == ()


def test_silence_of_three_seconds_dials_another_connection_and_touches_no_slot() -> None:
    agent = running()
    assert silent(agent.handle(e.Tick(), START + 2999 * MS)) == []
    assert silent(agent.handle(e.Tick(), START + 3000 * MS)) == [i.Redial()]
    assert silent(agent.handle(e.Tick(), START + 8999 * MS)) == []
    assert silent(agent.handle(e.Tick(), START + 9000 * MS)) == [i.Redial()]
    assert state(agent) == "RUNNING"


def test_a_broken_stream_stops_nothing() -> None:
    agent = running()
    assert silent(agent.handle(e.Disconnected(), START)) == []
    refused = m.SessionRefused(Reason.DUPLICATE_NODE, "elsewhere")
    agent.handle(e.Connected(), START)
    assert silent(agent.handle(order(refused), START)) == []
    assert state(agent) == "RUNNING"


# -- the lease


def test_each_acknowledged_renewal_extends_every_lease_from_its_send_time() -> None:
    agent = running()
    assert acked(agent, START + SECOND) == [i.GuardianExtend(((SLOT, START + SECOND + LEASE_NS),))]


def test_an_extension_that_came_while_reserving_is_made_up_for() -> None:
    agent = online()
    agent.handle(order(PREPARE), START)
    assert acked(agent, START + SECOND) == []
    assert silent(agent.handle(e.PrepareDone(SLOT, TOKEN), START + 2 * SECOND)) == [
        i.GuardianExtend(((SLOT, START + SECOND + LEASE_NS),))
    ]


def test_a_passed_deadline_is_never_revived_and_its_task_not_believed() -> None:
    agent = running()
    late = START + LEASE_NS
    assert acked(agent, late) == []
    assert state(agent, now_ns=late) == "STOPPING"
    agent.handle(e.TaskProgressed(SLOT, TOKEN, e.Progress(5, (), late)), late)
    found = status(agent, now_ns=late)
    assert found is not None
    assert found.progress_step == -1
    assert silent(agent.handle(e.TaskCalled(SLOT, TOKEN, "1", "checkpoint_begin", (("step", 5),)), late)) == [
        i.GuardianReply(SLOT, "1", error=Reason.FENCED, message="the lease of this task is over")
    ]


def test_nothing_is_renewed_while_the_guardian_does_not_answer() -> None:
    agent = running()
    agent.handle(e.GuardianLost(), START)
    (beat,) = beats(agent.handle(e.Tick(), START + SECOND))
    assert beat.guardian_ok is False
    assert silent(agent.handle(order(m.BeatAck(beat.seq)), START + SECOND)) == []
    agent.handle(e.GuardianAnswered(()), START + SECOND)
    assert acked(agent, START + 2 * SECOND) == [i.GuardianExtend(((SLOT, START + 2 * SECOND + LEASE_NS),))]


def test_with_a_silent_guardian_the_agent_enforces_the_deadline() -> None:
    agent = running()
    agent.handle(e.Disconnected(), START)
    agent.handle(e.GuardianLost(), START)
    assert agent.handle(e.Tick(), START + LEASE_NS) == []
    kill = [i.KillSlot(SLOT, 100, 99, 7)]
    assert agent.handle(e.Tick(), START + LEASE_NS + 500 * MS) == kill
    agent.handle(e.GuardianAnswered(()), START + LEASE_NS + SECOND)
    assert agent.handle(e.Tick(), START + LEASE_NS + SECOND) == []


def test_a_guardian_that_hangs_past_every_deadline_is_replaced() -> None:
    agent = running()
    agent.handle(e.GuardianLost(), START)
    end = START + LEASE_NS + 10 * SECOND
    assert i.ReplaceGuardian() not in agent.handle(e.Tick(), end - MS)
    assert i.ReplaceGuardian() in agent.handle(e.Tick(), end)
    assert i.ReplaceGuardian() not in agent.handle(e.Tick(), end + 9 * SECOND)
    assert i.ReplaceGuardian() in agent.handle(e.Tick(), end + 10 * SECOND)
    agent.handle(e.GuardianAnswered(()), end + 11 * SECOND)
    assert i.ReplaceGuardian() not in agent.handle(e.Tick(), end + 30 * SECOND)


# -- the guardian


def test_case_f10_a_restarted_agent_adopts_what_runs_and_extends_it() -> None:
    agent = core()
    record = record_of(PREPARE)
    assert agent.handle(hello(HELD, records=(record,)), START) == []
    assert state(agent) == "RUNNING"
    (said,) = agent.handle(e.Connected(), START + SECOND)
    assert isinstance(said, i.SendHello)
    assert [(one.slot, one.state) for one in said.hello.beat.slots] == [(SLOT, m.SlotState.RUNNING)]
    agent.handle(order(m.Welcome(1000, "cluster")), START + SECOND)
    assert silent(agent.handle(order(m.BeatAck(1)), START + SECOND)) == [
        i.GuardianExtend(((SLOT, START + SECOND + LEASE_NS),))
    ]


def test_an_adopted_slot_without_a_record_is_never_extended() -> None:
    agent = core()
    other = replace(record_of(PREPARE), token=Token(JobId("j"), 1, Epoch(1, 2)))
    agent.handle(hello(HELD, records=(other,)), START)
    agent.handle(e.Connected(), START)
    agent.handle(order(m.Welcome(1000, "cluster")), START)
    assert silent(agent.handle(order(m.BeatAck(1)), START)) == []


def test_an_adopted_reserved_slot_can_be_started() -> None:
    agent = core()
    held = replace(HELD, state=e.GuardianState.PREPARED, port=4000)
    agent.handle(hello(held, records=(record_of(PREPARE),)), START)
    assert (state(agent), getattr(status(agent), "port", 0)) == ("READY", 4000)
    assert not any(isinstance(one, i.GuardianStart) for one in agent.handle(order(GO), START))
    agent.handle(e.InventoryRead(m.Inventory()), START)  # C11: without it, the rank would see no devices
    (start,) = silent(agent.handle(order(GO), START))
    assert isinstance(start, i.GuardianStart)
    assert dict(start.env)["OMP_NUM_THREADS"] == "2"


def test_a_record_without_a_slot_runs_nothing_and_is_forgotten() -> None:
    agent = core()
    assert agent.handle(hello(records=(record_of(PREPARE),)), START) == [i.Forget(SLOT)]
    assert state(agent) == "-"


def test_case_g15_a_new_guardian_is_a_new_incarnation_that_runs_nothing_of_the_old() -> None:
    agent = running()
    left = replace(HELD, state=e.GuardianState.EXITED, exit=LOST)
    found = silent(agent.handle(hello(nonce="g2", leftovers=(left,)), START))
    assert found == [i.NewSession()]
    agent.handle(e.Disconnected(), START)
    (said,) = agent.handle(e.Connected(), START)
    assert isinstance(said, i.SendHello)
    assert said.hello.incarnation == Incarnation(UID, "b1", "g2")
    assert (said.hello.beat.slots, said.hello.gone_slots) == ((), (SLOT,))
    # an acknowledgement meant for the old incarnation renews nothing
    agent.handle(order(m.Welcome(1000, "cluster")), START)
    agent.handle(order(m.BeatAck(1)), START)
    assert agent.lease.renewed_ns is None
    assert silent(agent.handle(order(PREPARE), START)) == []
    assert agent.counters["stale_token"] == 1


def test_what_a_new_guardian_cannot_prove_gone_stays_stuck() -> None:
    agent = running()
    agent.handle(hello(nonce="g2"), START)
    assert state(agent) == "STUCK"
    agent = running()
    agent.handle(hello(nonce="g2", leftovers=(replace(HELD, state=e.GuardianState.STUCK),)), START)
    assert state(agent) == "STUCK"
    agent.handle(e.TaskExited(SLOT, TOKEN, LOST), START)
    assert state(agent) == "EXITED"


def test_what_was_only_reserved_by_a_dead_guardian_is_gone() -> None:
    agent = ready()
    agent.handle(hello(nonce="g2"), START)
    assert state(agent) == "-"
    assert tuple(agent.slots.gone) == (SLOT,)


def test_gone_slots_are_told_in_every_hello_until_they_are_released() -> None:
    agent = running()
    agent.handle(hello(nonce="g2", leftovers=(replace(HELD, state=e.GuardianState.EXITED),)), START)
    for _ in range(2):
        agent.handle(e.Disconnected(), START)
        (said,) = agent.handle(e.Connected(), START)
        assert isinstance(said, i.SendHello)
        assert said.hello.gone_slots == (SLOT,)
    assert silent(agent.handle(order(m.Release(SLOT, TOKEN)), START)) == [i.GuardianRelease(SLOT, TOKEN)]
    assert silent(agent.handle(e.ReleaseDone(SLOT, TOKEN), START)) == [i.Forget(SLOT)]
    assert tuple(agent.slots.gone) == ()


def test_gone_slots_are_let_go_once_their_hello_is_answered() -> None:
    """Found by the simulation: nobody released them, so a guardian kept what its forerunners had run for ever."""
    agent = running()
    agent.handle(hello(nonce="g2", leftovers=(replace(HELD, state=e.GuardianState.EXITED),)), START)
    agent.handle(e.Disconnected(), START)
    agent.handle(e.Connected(), START)
    assert i.GuardianRelease(SLOT, TOKEN) in agent.handle(order(m.Welcome(1000, "cluster")), START)
    assert silent(agent.handle(e.ReleaseDone(SLOT, TOKEN), START)) == [i.Forget(SLOT)]
    agent.handle(e.Disconnected(), START)
    (said,) = agent.handle(e.Connected(), START)
    assert isinstance(said, i.SendHello)
    assert said.hello.gone_slots == ()


def test_a_guardian_that_is_met_again_is_asked_again_for_what_was_in_flight() -> None:
    agent = online()
    kept = replace(HELD, deadline_ns=START + LEASE_NS)
    agent.handle(order(PREPARE), START)
    again = [i.Remember, i.GuardianPrepare]
    assert [type(one) for one in silent(agent.handle(hello(), START))] == again
    held = replace(kept, state=e.GuardianState.PREPARED)
    assert [type(one) for one in silent(agent.handle(hello(held), START))] == again
    agent.handle(e.PrepareDone(SLOT, TOKEN, 1), START)
    agent.handle(order(GO), START)
    agent.handle(hello(held), START)
    assert state(agent) == "READY"
    agent.handle(hello(kept), START)
    assert state(agent) == "RUNNING"
    stop = m.Stop(SLOT, TOKEN, 5000, StopReason.DRAIN)
    agent.handle(order(stop), START)
    assert silent(agent.handle(hello(kept), START)) == [i.GuardianStop(SLOT, TOKEN, 5000, StopReason.DRAIN)]
    exited = replace(kept, state=e.GuardianState.EXITED, exit=LOST)
    agent.handle(hello(exited), START)
    assert state(agent) == "EXITED"
    agent.handle(order(m.Release(SLOT, TOKEN)), START)
    assert silent(agent.handle(hello(exited), START)) == [i.GuardianRelease(SLOT, TOKEN)]
    assert silent(agent.handle(hello(), START)) == [i.Forget(SLOT)]


def test_a_list_of_the_guardian_moves_a_slot_forward_only() -> None:
    agent = ready()
    agent.handle(e.GuardianAnswered(()), START)
    agent.handle(e.GuardianAnswered((replace(HELD, state=e.GuardianState.PREPARED),)), START)
    assert state(agent) == "READY"
    agent.handle(order(GO), START)
    agent.handle(e.GuardianAnswered((replace(HELD, state=e.GuardianState.EXITED, exit=LOST),)), START)
    assert state(agent) == "EXITED"
    agent.handle(e.GuardianAnswered((HELD,)), START)
    assert state(agent) == "EXITED"


# -- leaders and clusters


def test_orders_of_a_lower_leader_are_refused() -> None:
    agent = running()
    newer = Epoch(1, 9)
    assert i.SaveLeader(newer, "cluster") in agent.handle(order(m.BeatAck(0), newer), START)
    stop = m.Stop(SLOT, TOKEN, 0, StopReason.CANCELLED)
    assert silent(agent.handle(order(stop, LEADER), START)) == []
    assert agent.counters["stale_leader"] == 1
    assert state(agent) == "RUNNING"


def test_an_acknowledgement_of_a_deposed_leader_renews_nothing() -> None:
    agent = running()
    agent.handle(order(m.BeatAck(0), Epoch(1, 9)), START)
    assert acked(agent, START + SECOND) == []


def test_a_new_history_stops_what_was_granted_before_it() -> None:
    agent = running()
    restored = Epoch(2, 1)
    assert silent(agent.handle(order(m.BeatAck(0), restored), START)) == [
        i.SaveLeader(restored, "cluster"),
        i.GuardianStop(SLOT, TOKEN, 0, StopReason.HISTORY_CHANGED),
    ]
    assert silent(agent.handle(order(replace(PREPARE, slot=SlotId("k.1.0")), restored), START)) == []


def test_a_restarted_agent_keeps_the_highest_leader_and_stops_older_history() -> None:
    agent = AgentCore(UID, FACTS, local_tier="/d", leader_epoch=Epoch(2, 1), cluster_uid="cluster")
    assert agent.handle(hello(HELD, records=(record_of(PREPARE),)), START) == [
        i.GuardianStop(SLOT, TOKEN, 0, StopReason.HISTORY_CHANGED)
    ]
    agent.handle(e.Connected(), START)
    agent.handle(order(m.Welcome(1000, "cluster"), Epoch(1, 99)), START)
    assert agent.welcomed is False


def test_another_cluster_is_not_obeyed_while_work_of_the_first_is_here() -> None:
    agent = running()
    agent.handle(e.Disconnected(), START)
    agent.handle(e.Connected(), START)
    other = order(m.Welcome(1000, "other"), Epoch(9, 9))
    assert silent(agent.handle(other, START)) == []
    assert silent(agent.handle(order(m.Stop(SLOT, TOKEN, 0, StopReason.DRAIN), Epoch(9, 9)), START)) == []
    assert (state(agent), agent.leader.seen) == ("RUNNING", LEADER)


def test_another_cluster_is_joined_when_nothing_is_left_of_the_first() -> None:
    agent = online()
    assert silent(agent.handle(order(m.Welcome(1000, "other"), Epoch(1, 1)), START)) == [
        i.SaveLeader(Epoch(1, 1), "other")
    ]
    assert agent.leader.seen == Epoch(1, 1)
    assert agent.leader.seen > NO_EPOCH


def test_shutdown_stops_every_task() -> None:
    agent = running()
    assert silent(agent.handle(e.ShutdownRequested(3000), START)) == [
        i.GuardianStop(SLOT, TOKEN, 3000, StopReason.DRAIN)
    ]
