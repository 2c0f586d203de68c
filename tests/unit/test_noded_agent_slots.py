"""What each order means for a slot: exact instructions, whatever was lost, repeated or late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from noded.core import events as e
from noded.core import instructions as i
from noded.core import messages as m
from noded.core.slots import record_of
from noded.core.slottable import SLOTS_MAX
from noded.run.slots import SLOTS_MAX as GUARDIAN_SLOTS_MAX
from tests.unit.noded_builders import (
    CHECKPOINT,
    GO,
    GPU,
    LEASE_NS,
    MS,
    NEXT,
    PREPARE,
    RESTORE,
    SECOND,
    SLOT,
    START,
    TASK,
    TOKEN,
    beats,
    online,
    order,
    ready,
    running,
    silent,
    state,
    status,
)
from virialpb.ids import Epoch, JobId, SlotId, Token
from virialpb.reasons import ExitReason, PrepareFailure, StopReason

STOP = m.Stop(SLOT, TOKEN, 5000, StopReason.CANCELLED)
RELEASE = m.Release(SLOT, TOKEN)
EXIT = m.TaskExit(ExitReason.EXITED, code=3)
PREPARED = [
    i.Remember(record_of(PREPARE)),
    i.GuardianPrepare(SLOT, TOKEN, 0, START + LEASE_NS, TASK, cpu_millis=2000),
]


# -- prepare


def test_prepare_reserves_with_a_deadline_from_the_last_acknowledged_renewal() -> None:
    agent = online()
    assert silent(agent.handle(order(PREPARE), START + SECOND)) == PREPARED
    assert state(agent) == "PREPARING"


def test_a_repeated_prepare_asks_for_nothing() -> None:
    agent = online()
    agent.handle(order(PREPARE), START)
    assert silent(agent.handle(order(PREPARE), START)) == []
    assert silent(running().handle(order(PREPARE), START)) == []


def test_ready_carries_the_held_port_at_once() -> None:
    agent = online()
    agent.handle(order(PREPARE), START + SECOND)
    (beat,) = beats(agent.handle(e.PrepareDone(SLOT, TOKEN, 4000), START + SECOND + 50 * MS))
    assert [(one.state, one.port) for one in beat.slots] == [(m.SlotState.READY, 4000)]


def test_case_c11_no_prepare_before_the_inventory_was_read() -> None:
    agent = online(inventory=False)
    assert silent(agent.handle(order(PREPARE), START)) == []
    assert state(agent) == "PREPARING"
    assert silent(agent.handle(e.InventoryRead(m.Inventory((GPU,))), START)) == PREPARED


def test_a_device_that_is_not_there_fails_the_prepare_and_names_it() -> None:
    agent = online()
    wanted = replace(PREPARE, devices=(m.DeviceGrant("gpu-0"), m.DeviceGrant("gpu-9")))
    assert silent(agent.handle(order(wanted), START)) == []
    found = status(agent)
    assert found is not None
    assert (found.state, found.failure) == (m.SlotState.PREPARE_FAILED, PrepareFailure.INVENTORY_MISSING)
    assert "gpu-9" in found.failure_detail


def test_a_prepare_waits_for_a_renewal_when_the_last_one_is_too_old() -> None:
    agent = online()
    late = START + LEASE_NS
    assert silent(agent.handle(order(PREPARE), late)) == []
    assert state(agent, now_ns=late) == "PREPARING"
    (beat,) = beats(agent.handle(e.Tick(), late + SECOND)) or beats(agent.handle(e.Tick(), late + 2 * SECOND))
    found = silent(agent.handle(order(m.BeatAck(beat.seq)), late + 3 * SECOND))
    assert [type(one) for one in found] == [i.Remember, i.GuardianPrepare]


def test_parts_of_a_device_are_counted_and_whole_devices_left_to_the_guardian() -> None:
    agent = online()

    def asked(name: str, share: int) -> list[i.Instruction]:
        token = Token(JobId(name), 1, Epoch(1, 40))
        grant = (m.DeviceGrant("gpu-0", share),)
        return silent(
            agent.handle(order(replace(PREPARE, slot=SlotId(f"{name}.1.0"), token=token, devices=grant)), START)
        )

    for name in ("a", "b"):
        prepare = asked(name, 500)[1]
        assert isinstance(prepare, i.GuardianPrepare)
        assert prepare.device_keys == ()
    assert asked("c", 250) == []
    found = status(agent, SlotId("c.1.0"))
    assert found is not None
    assert (found.failure, found.failure_detail) == (PrepareFailure.DEVICE_BUSY, "gpu-0 held by a.1.0, b.1.0")


def test_slots_are_bounded_since_every_beat_lists_all_of_them() -> None:
    agent = online()
    for number in range(SLOTS_MAX + 3):
        token = Token(JobId(f"j{number}"), 1, Epoch(1, 40))
        agent.handle(order(replace(PREPARE, slot=SlotId(f"j{number}.1.0"), token=token)), START)
    assert len(agent.slots.all()) == SLOTS_MAX == GUARDIAN_SLOTS_MAX
    assert agent.counters["too_many_slots"] == 3


def test_an_unknown_runtime_is_refused() -> None:
    agent = online()
    agent.handle(order(replace(PREPARE, task=replace(TASK, runtime="container"))), START)
    found = status(agent)
    assert found is not None
    assert found.failure is PrepareFailure.KIND_UNSUPPORTED


def test_a_restore_is_verified_before_anything_is_reserved() -> None:
    agent = online()
    prepare = replace(PREPARE, restore=RESTORE)
    directory = f"/d/checkpoints/j/{CHECKPOINT}"
    assert silent(agent.handle(order(prepare), START)) == [i.VerifyShard(SLOT, TOKEN, 0, directory, RESTORE)]
    found = silent(agent.handle(e.ShardVerified(SLOT, TOKEN), START))
    assert [type(one) for one in found] == [i.Remember, i.GuardianPrepare]


def test_how_much_of_a_shard_was_read_is_told_until_it_is_verified() -> None:
    agent = online()
    agent.handle(order(replace(PREPARE, restore=RESTORE)), START)
    agent.handle(e.ShardRead(SLOT, TOKEN, 64 << 20), START)
    found = status(agent)
    assert found is not None
    assert found.prepared_bytes == 64 << 20
    agent.handle(e.ShardVerified(SLOT, TOKEN), START)
    agent.handle(e.ShardRead(SLOT, TOKEN, 96 << 20), START)  # said by the thread before it ended
    found = status(agent)
    assert found is not None
    assert found.prepared_bytes == 0


def test_a_bad_shard_fails_the_prepare() -> None:
    agent = online()
    agent.handle(order(replace(PREPARE, restore=RESTORE)), START)
    agent.handle(e.PrepareFailed(SLOT, TOKEN, PrepareFailure.SHARD_CORRUPT, "stripe 3"), START)
    found = status(agent)
    assert found is not None
    assert (found.failure, found.failure_detail) == (PrepareFailure.SHARD_CORRUPT, "stripe 3")
    # nothing was reserved, so a release has nothing to ask the guardian
    assert silent(agent.handle(order(RELEASE), START)) == []
    assert state(agent) == "-"


def test_a_refused_prepare_is_released_in_the_guardian_too() -> None:
    agent = online()
    agent.handle(order(PREPARE), START)
    agent.handle(e.PrepareFailed(SLOT, TOKEN, PrepareFailure.DEVICE_BUSY), START)
    assert silent(agent.handle(order(RELEASE), START)) == [i.GuardianRelease(SLOT, TOKEN)]


def test_a_spare_reserves_devices_verifies_nothing_and_is_never_started() -> None:
    agent = online()
    spare = SlotId("j.1.s0")
    prepare = replace(PREPARE, slot=spare, rank=None, restore=RESTORE, devices=(m.DeviceGrant("gpu-0"),))
    found = silent(agent.handle(order(prepare), START))
    assert isinstance(found[1], i.GuardianPrepare)
    assert (found[1].rank, found[1].device_keys) == (None, ("gpu-0",))
    agent.handle(e.PrepareDone(spare, TOKEN), START)
    assert state(agent, spare) == "READY"
    assert silent(agent.handle(order(replace(GO, slot=spare)), START)) == []
    assert agent.counters["spare_go"] == 1


# -- tokens


@pytest.mark.parametrize(
    "late",
    [GO, STOP, RELEASE, m.SaveNow(SLOT, TOKEN, -1, "x"), m.CheckpointOutcome(SLOT, TOKEN, CHECKPOINT, "COMMITTED")],
)
def test_an_order_of_another_token_is_dropped_and_counted(late: m.SlotOrder) -> None:
    agent = running()
    other = replace(late, token=Token(JobId("j"), 1, Epoch(1, 21)))
    assert silent(agent.handle(order(other), START)) == []
    assert agent.counters["stale_token"] == 1
    assert state(agent) == "RUNNING"


def test_an_older_generation_is_not_prepared_once_a_newer_was_seen() -> None:
    agent = online()
    agent.handle(order(replace(PREPARE, slot=SlotId("j.2.0"), token=NEXT)), START)
    assert silent(agent.handle(order(PREPARE), START)) == []
    assert agent.counters["stale_token"] == 1
    assert state(agent) == "-"


def test_case_g5_a_newer_generation_waits_until_the_older_is_gone_from_the_node() -> None:
    agent = running()
    slot = SlotId("j.2.0")
    newer = replace(PREPARE, slot=slot, token=NEXT)
    assert silent(agent.handle(order(newer), START)) == [i.GuardianStop(SLOT, TOKEN, 0, StopReason.SUPERSEDED)]
    assert (state(agent), state(agent, slot)) == ("STOPPING", "PREPARING")
    found = silent(agent.handle(e.TaskExited(SLOT, TOKEN, EXIT), START))
    assert [type(one) for one in found] == [i.Remember, i.GuardianPrepare]


def test_a_late_prepare_of_a_released_slot_revives_nothing() -> None:
    agent = online()
    agent.handle(order(RELEASE), START)  # the prepare before it was lost, or is late
    assert silent(agent.handle(order(PREPARE), START)) == []
    assert state(agent) == "-"


# -- go


def test_go_starts_with_the_environment_of_the_rank() -> None:
    (start,) = silent(ready().handle(order(GO), START))
    assert isinstance(start, i.GuardianStart)
    env = dict(start.env)
    assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_PORT"], env["VIRIAL_EPOCH"]) == ("0", "2", "29500", "1.20")
    assert "HOME" not in env


def test_a_repeated_go_starts_nothing_twice() -> None:
    agent = ready()
    agent.handle(order(GO), START)
    assert silent(agent.handle(order(GO), START)) == []
    agent.handle(e.StartDone(SLOT, TOKEN, 100, 99, 7), START)
    assert silent(agent.handle(order(GO), START)) == []


def test_a_go_before_ready_is_said_again_by_the_controller() -> None:
    agent = online()
    agent.handle(order(PREPARE), START)
    assert silent(agent.handle(order(GO), START)) == []
    agent.handle(e.PrepareDone(SLOT, TOKEN, 4000), START)
    assert [type(one) for one in silent(agent.handle(order(GO), START))] == [i.GuardianStart]


def test_a_guardian_that_was_not_ready_is_asked_again_by_the_next_go() -> None:
    agent = ready()
    agent.handle(order(GO), START)
    agent.handle(e.StartFailed(SLOT, TOKEN, retry=True), START)
    assert state(agent) == "READY"
    assert [type(one) for one in silent(agent.handle(order(GO), START))] == [i.GuardianStart]


def test_a_failed_start_is_reported_with_its_reason() -> None:
    agent = ready()
    agent.handle(order(GO), START)
    assert silent(agent.handle(e.StartFailed(SLOT, TOKEN, "no such file"), START)) == [
        i.GuardianStop(SLOT, TOKEN, 0, ExitReason.START_FAILED)
    ]
    agent.handle(e.TaskExited(SLOT, TOKEN, m.TaskExit(ExitReason.STOPPED)), START)
    found = status(agent)
    assert found is not None
    assert found.exit == m.TaskExit(ExitReason.START_FAILED, stderr_tail="no such file")


# -- stop


def test_stop_asks_the_guardian_each_time_it_is_said() -> None:
    agent = running()
    stopped = [i.GuardianStop(SLOT, TOKEN, 5000, StopReason.CANCELLED)]
    assert silent(agent.handle(order(STOP), START)) == stopped
    assert state(agent) == "STOPPING"
    assert silent(agent.handle(order(STOP), START)) == stopped


def test_stop_of_a_slot_that_reserved_nothing_ends_it() -> None:
    agent = online(inventory=False)
    agent.handle(order(PREPARE), START)
    assert silent(agent.handle(order(STOP), START)) == []
    assert state(agent) == "EXITED"
    assert silent(agent.handle(e.InventoryRead(m.Inventory()), START)) == []


def test_stop_while_the_guardian_reserves_ends_even_when_that_is_refused() -> None:
    agent = online()
    agent.handle(order(PREPARE), START)
    agent.handle(order(STOP), START)
    agent.handle(e.PrepareFailed(SLOT, TOKEN, PrepareFailure.DEVICE_BUSY), START)
    assert state(agent) == "EXITED"


def test_stop_of_a_slot_that_the_guardian_does_not_know_ends_it() -> None:
    agent = ready()
    agent.handle(order(STOP), START)
    agent.handle(e.StopFailed(SLOT, TOKEN), START)
    assert state(agent) == "EXITED"


def test_stop_of_an_unknown_slot_is_counted() -> None:
    agent = online()
    assert silent(agent.handle(order(STOP), START)) == []
    assert agent.counters["unknown_slot"] == 1


# -- the end


def test_case_h8_an_exit_is_reported_in_every_beat_until_it_is_released() -> None:
    agent = running()
    agent.handle(e.TaskExited(SLOT, TOKEN, EXIT), START)
    for second in (1, 2, 3):
        (beat,) = beats(agent.handle(e.Tick(), START + second * SECOND))
        assert [(one.state, one.exit) for one in beat.slots] == [(m.SlotState.EXITED, EXIT)]
    assert silent(agent.handle(order(RELEASE), START)) == [i.GuardianRelease(SLOT, TOKEN)]
    assert state(agent) == "EXITED"
    assert silent(agent.handle(e.ReleaseDone(SLOT, TOKEN), START)) == [i.Forget(SLOT)]
    assert state(agent) == "-"


def test_case_c15_a_failing_release_stays_an_obligation_with_back_off() -> None:
    agent = running()
    agent.handle(e.TaskExited(SLOT, TOKEN, EXIT), START)
    assert silent(agent.handle(order(RELEASE), START)) == [i.GuardianRelease(SLOT, TOKEN)]
    now_ns, tries = START, 0
    while tries < 20:
        agent.handle(e.ReleaseFailed(SLOT, TOKEN), now_ns)
        waited = 0
        while i.GuardianRelease(SLOT, TOKEN) not in agent.handle(e.Tick(), now_ns):
            now_ns += 100 * MS
            waited += 100
            assert waited <= 10_000
        tries += 1
    assert state(agent) == "EXITED"
    assert silent(agent.handle(e.ReleaseDone(SLOT, TOKEN), now_ns)) == [i.Forget(SLOT)]


def test_a_release_of_what_still_runs_stops_it_first() -> None:
    agent = running()
    assert silent(agent.handle(order(RELEASE), START)) == [i.GuardianStop(SLOT, TOKEN, 0, StopReason.FINISHED)]
    assert silent(agent.handle(e.TaskExited(SLOT, TOKEN, EXIT), START)) == [i.GuardianRelease(SLOT, TOKEN)]


def test_what_cannot_be_killed_is_stuck_until_it_is_seen_empty() -> None:
    agent = running()
    agent.handle(e.TaskExited(SLOT, TOKEN, EXIT, empty=False), START)
    assert state(agent) == "STUCK"
    assert silent(agent.handle(order(RELEASE), START)) == []
    assert silent(agent.handle(e.TaskExited(SLOT, TOKEN, EXIT), START)) == [i.GuardianRelease(SLOT, TOKEN)]


def test_case_h7_a_late_exit_of_another_token_fails_nothing() -> None:
    agent = running()
    agent.handle(e.TaskExited(SLOT, Token(JobId("j"), 1, Epoch(1, 3)), EXIT), START)
    assert state(agent) == "RUNNING"


# -- to the task


def test_save_now_and_outcomes_are_pushed_to_a_running_task_only() -> None:
    save = m.SaveNow(SLOT, TOKEN, -1, "drain")
    agent = running()
    assert silent(agent.handle(order(save), START)) == [
        i.GuardianPush(SLOT, (("push", "save_now"), ("step", None), ("reason", "drain")))
    ]
    outcome = m.CheckpointOutcome(SLOT, TOKEN, CHECKPOINT, "COMMITTED")
    assert silent(agent.handle(order(outcome), START)) == [
        i.GuardianPush(SLOT, (("push", "checkpoint"), ("checkpoint_id", "c1"), ("state", "COMMITTED")))
    ]
    assert silent(ready().handle(order(save), START)) == []


def test_drop_checkpoint_names_the_directory_and_tells_when_it_is_done() -> None:
    agent = online()
    local = m.DropCheckpoint(JobId("j"), CHECKPOINT, "", m.Tier.LOCAL)
    assert silent(agent.handle(order(local), START)) == [i.DropFiles(JobId("j"), CHECKPOINT, "/d/checkpoints/j/c1")]
    shared = m.DropCheckpoint(JobId("j"), CHECKPOINT, "/s/c1", m.Tier.SHARED)
    assert silent(agent.handle(order(shared), START)) == [i.DropFiles(JobId("j"), CHECKPOINT, "/s/c1")]
    assert silent(agent.handle(e.FilesDropped(JobId("j"), CHECKPOINT), START)) == [
        i.SendDropDone(m.DropDone(JobId("j"), CHECKPOINT))
    ]
