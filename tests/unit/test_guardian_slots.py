"""The guardian's slot table, called directly: exact actions for exact events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from noded.run import slots
from noded.run.protocol import (
    Exit,
    ExitReason,
    PrepareRequest,
    Progress,
    Refusal,
    SlotState,
    SlotStatus,
    Started,
    TaskSpec,
    Token,
)
from noded.run.slots import (
    NS_PER_MS,
    STUCK_AFTER_NS,
    Action,
    Announce,
    Drop,
    Forget,
    Kill,
    Launch,
    Outcome,
    Persist,
    Refused,
    Reserve,
    SetDeadline,
    SlotTable,
    Terminate,
)

NOW = 1_000_000_000
DEADLINE = NOW + 5_000 * NS_PER_MS
TOKEN = Token("train", 3, (0, 70))
SLOT = "train.3.0"
STARTED = Started(pid=101, init_pid=100, start_ticks=7)


def ask(slot: str = SLOT, token: Token = TOKEN, devices: tuple[str, ...] = ("gpu-a",)) -> PrepareRequest:
    return PrepareRequest(slot, token, TaskSpec(("train",), {}, user="ann"), DEADLINE, rank=0, device_keys=devices)


def refusal(result: object) -> Refusal | None:
    return result.reason if isinstance(result, Refused) else None


def kinds(actions: object) -> list[str]:
    assert isinstance(actions, list)
    return [type(action).__name__ for action in actions]  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]


def status(table: SlotTable, slot: str = SLOT) -> SlotStatus:
    found = table.get(slot)
    assert found is not None
    return found.status


def prepared() -> SlotTable:
    table = SlotTable()
    table.prepare(ask(), NOW)
    table.prepared(SLOT, 29500)
    return table


def running() -> SlotTable:
    table = prepared()
    table.start(SLOT, TOKEN, {}, NOW)
    table.started(SLOT, STARTED)
    return table


def test_prepare_reserves_and_starts_nothing() -> None:
    table = SlotTable()
    actions = table.prepare(ask(), NOW)
    assert actions == [Persist(status(table)), Reserve(SLOT)]
    assert table.prepared(SLOT, 29500) == [Persist(status(table))]
    assert (status(table).state, status(table).port) == (SlotState.PREPARED, 29500)


@pytest.mark.parametrize(
    ("request_", "now_ns", "reason"),
    [
        (ask(), DEADLINE, Refusal.DEADLINE_PASSED),
        (ask("other.1.0", Token("other", 1, (0, 71))), NOW, Refusal.DEVICE_BUSY),
        (ask("train.2.0", Token("train", 2, (0, 60)), ("gpu-b",)), NOW, Refusal.STALE_GENERATION),
        (ask(SLOT, Token("train", 3, (0, 71))), NOW, Refusal.SLOT_EXISTS),
        (ask(SLOT, Token("train", 3, (0, 69))), NOW, Refusal.STALE_GENERATION),
    ],
)
def test_prepare_refuses(request_: PrepareRequest, now_ns: int, reason: Refusal) -> None:
    table = SlotTable() if reason is Refusal.DEADLINE_PASSED else prepared()
    before = table.all()
    assert refusal(table.prepare(request_, now_ns)) is reason
    assert table.all() == before


def test_a_refusal_names_the_device_and_its_holder() -> None:
    result = prepared().prepare(ask("other.1.0", Token("other", 1, (0, 71))), NOW)
    assert result == Refused(Refusal.DEVICE_BUSY, f"gpu-a held by {SLOT} (PREPARED)")


def test_root_needs_a_user() -> None:
    table = SlotTable(root_needs_user=True)
    nobody_named = replace(ask(), spec=TaskSpec(("train",), {}))
    assert refusal(table.prepare(nobody_named, NOW)) is Refusal.USER_REQUIRED
    assert kinds(table.prepare(ask(), NOW)) == ["Persist", "Reserve"]


def test_a_restored_store_may_go_back_in_generation_but_not_in_history() -> None:
    table = SlotTable()
    table.prepare(ask("train.9.0", Token("train", 9, (0, 90))), NOW)
    table.release("train.9.0")
    assert kinds(table.prepare(ask("train.4.0", Token("train", 4, (1, 20))), NOW)) == ["Persist", "Reserve"]
    assert refusal(table.prepare(ask("train.10.0", Token("train", 10, (0, 99)), ()), NOW)) is Refusal.STALE_GENERATION


def test_start_launches_with_the_deadline_told_first() -> None:
    table = prepared()
    actions = table.start(SLOT, TOKEN, {"RANK": "0"}, NOW)
    assert actions == [SetDeadline(SLOT, DEADLINE), Launch(SLOT, (("RANK", "0"),)), Persist(status(table))]
    assert table.start(SLOT, TOKEN, {"RANK": "0"}, NOW) == []
    table.started(SLOT, STARTED)
    assert table.start(SLOT, TOKEN, {}, NOW) == STARTED
    assert (status(table).pid, status(table).init_pid, status(table).state) == (101, 100, SlotState.RUNNING)


def test_start_refuses_an_old_generation_prepared_earlier() -> None:
    table = prepared()
    table.prepare(ask("train.4.0", Token("train", 4, (0, 80)), ("gpu-b",)), NOW)
    assert refusal(table.start(SLOT, TOKEN, {}, NOW)) is Refusal.STALE_GENERATION


@pytest.mark.parametrize(
    ("table", "slot", "token", "now_ns", "reason"),
    [
        (SlotTable(), SLOT, TOKEN, NOW, Refusal.NOT_FOUND),
        (prepared(), SLOT, Token("train", 3, (0, 69)), NOW, Refusal.STALE_GENERATION),
        (prepared(), SLOT, TOKEN, DEADLINE, Refusal.DEADLINE_PASSED),
    ],
)
def test_start_refuses(table: SlotTable, slot: str, token: Token, now_ns: int, reason: Refusal) -> None:
    assert refusal(table.start(slot, token, {}, now_ns)) is reason


def test_start_before_prepare_was_answered() -> None:
    table = SlotTable()
    table.prepare(ask(), NOW)
    assert refusal(table.start(SLOT, TOKEN, {}, NOW)) is Refusal.NOT_READY


def test_extend_moves_forward_only() -> None:
    table = running()
    later = DEADLINE + 1
    assert table.extend({SLOT: later, "gone.1.0": later}, NOW) == (["gone.1.0"], [SetDeadline(SLOT, later)])
    assert table.extend({SLOT: NOW + 1}, NOW) == ([], [])
    assert status(table).deadline_ns == later


def test_extend_never_revives() -> None:
    table = running()
    assert table.extend({SLOT: DEADLINE + 1}, DEADLINE) == ([SLOT], [])
    table.tick(DEADLINE)
    assert table.extend({SLOT: DEADLINE + 10}, NOW) == ([SLOT], [])


def test_deadline_kills_at_once_and_is_announced_when_empty() -> None:
    table = running()
    assert table.next_wake_ns() == DEADLINE
    assert table.tick(DEADLINE - 1) == []
    assert table.tick(DEADLINE) == [Kill(SLOT), Persist(status(table))]
    assert table.tick(DEADLINE) == []
    assert table.ended(SLOT, Outcome(signal=9, stderr_tail="x"), DEADLINE + 5) == []
    end = Exit(ExitReason.LEASE_EXPIRED, None, 9, DEADLINE + 6, "x", True)
    assert table.emptied(SLOT, DEADLINE + 6) == [Drop(SLOT), Persist(status(table)), Announce(SLOT, TOKEN, end)]
    assert status(table).exit == end


def test_deadline_of_what_never_started() -> None:
    table = prepared()
    assert kinds(table.tick(DEADLINE)) == ["Drop", "Persist", "Announce"]
    assert status(table).state is SlotState.EXITED
    assert refusal(table.start(SLOT, TOKEN, {}, NOW)) is Refusal.ALREADY_ENDED


def test_stop_terminates_then_kills_after_the_grace() -> None:
    table = running()
    assert table.stop(SLOT, 1000, NOW) == [Terminate(SLOT), Persist(status(table))]
    assert table.stop(SLOT, 1000, NOW) == []
    assert table.next_wake_ns() == NOW + 1000 * NS_PER_MS
    assert kinds(table.tick(NOW + 1000 * NS_PER_MS)) == ["Kill", "Persist"]
    table.ended(SLOT, Outcome(signal=9), NOW)
    table.emptied(SLOT, NOW)
    assert status(table).exit == Exit(ExitReason.STOPPED, None, 9, NOW)


def test_a_second_stop_shortens_the_grace_only() -> None:
    table = running()
    table.stop(SLOT, 1000, NOW)
    table.stop(SLOT, 2000, NOW)
    assert table.next_wake_ns() == NOW + 1000 * NS_PER_MS
    assert kinds(table.stop(SLOT, 0, NOW)) == ["Kill", "Persist"]


def test_stop_while_being_started_reaches_the_task_late() -> None:
    table = prepared()
    table.start(SLOT, TOKEN, {}, NOW)
    table.stop(SLOT, 1000, NOW)
    assert kinds(table.started(SLOT, STARTED)) == ["Terminate", "Persist"]


def test_a_lease_can_be_extended_during_a_long_grace_but_still_ends_it() -> None:
    table = running()
    table.stop(SLOT, 60_000, NOW)
    assert table.extend({SLOT: DEADLINE + 9}, NOW) == ([], [SetDeadline(SLOT, DEADLINE + 9)])
    assert kinds(table.tick(DEADLINE + 9)) == ["Kill", "Persist"]
    table.emptied(SLOT, DEADLINE + 10)
    end = status(table).exit
    assert end is not None
    assert end.reason is ExitReason.LEASE_EXPIRED


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome(code=0), ExitReason.EXITED),
        (Outcome(code=3), ExitReason.EXITED),
        (Outcome(signal=11), ExitReason.SIGNALED),
        (Outcome(signal=9, oom=True), ExitReason.OOM),
        (Outcome(failure="exec: no"), ExitReason.START_FAILED),
    ],
)
def test_why_a_task_ended(outcome: Outcome, reason: ExitReason) -> None:
    table = running()
    assert kinds(table.ended(SLOT, outcome, NOW)) == ["Kill", "Persist"], "what it left behind is killed"
    assert status(table).state is SlotState.STOPPING
    assert table.stop(SLOT, 0, NOW) == [], "a stop that comes too late does not change why"
    table.emptied(SLOT, NOW)
    end = status(table).exit
    assert end is not None
    assert (end.reason, end.code, end.signal, end.empty) == (reason, outcome.code, outcome.signal, True)


def test_what_cannot_be_killed_is_stuck_and_keeps_its_devices() -> None:
    table = running()
    table.stop(SLOT, 0, NOW)
    actions = table.tick(NOW + STUCK_AFTER_NS)
    end = Exit(ExitReason.STOPPED, None, None, NOW + STUCK_AFTER_NS, "", False)
    assert actions == [Persist(status(table)), Announce(SLOT, TOKEN, end)]
    assert status(table).state is SlotState.STUCK
    assert table.next_wake_ns() is None
    assert refusal(table.release(SLOT)) is Refusal.NOT_EMPTY
    assert refusal(table.prepare(ask("new.1.0", Token("new", 1, (0, 99))), NOW)) is Refusal.DEVICE_BUSY
    assert kinds(table.emptied(SLOT, NOW)) == ["Drop", "Persist", "Announce"]
    assert kinds(table.prepare(ask("new.1.0", Token("new", 1, (0, 99))), NOW)) == ["Persist", "Reserve"]


def test_release_only_what_is_empty() -> None:
    table = running()
    assert refusal(table.release(SLOT)) is Refusal.NOT_EMPTY
    table.ended(SLOT, Outcome(code=0), NOW)
    assert refusal(table.release(SLOT)) is Refusal.NOT_EMPTY
    table.emptied(SLOT, NOW)
    released = replace(status(table), state=SlotState.RELEASED)
    assert table.release(SLOT) == [Forget(SLOT), Persist(released)]
    assert table.release(SLOT) == []
    assert table.all() == ()


def test_what_ran_is_not_run_again_under_its_token() -> None:
    table = running()
    table.ended(SLOT, Outcome(code=0), NOW)
    table.emptied(SLOT, NOW)
    table.release(SLOT)
    assert refusal(table.prepare(ask(), NOW)) is Refusal.ALREADY_ENDED
    unstarted = prepared()
    unstarted.release(SLOT)
    assert kinds(unstarted.prepare(ask(), NOW)) == ["Persist", "Reserve"]


def test_progress_counts_only_while_it_may_run() -> None:
    progress = Progress(12, {"loss": 0.5}, NOW)
    table = running()
    assert kinds(table.progressed(SLOT, progress)) == ["Persist"]
    assert status(table).progress == progress
    assert prepared().progressed(SLOT, progress) == []


def test_leftovers_hold_devices_until_gone_and_keep_an_unacknowledged_exit() -> None:
    table = SlotTable()
    lost = SlotStatus("a.1.0", Token("a", 1, (0, 5)), 0, SlotState.RUNNING, DEADLINE, ("gpu-a",), 11, 10, 5)
    done = Exit(ExitReason.EXITED, 0, None, NOW - 1)
    ended = SlotStatus("b.1.0", Token("b", 1, (0, 6)), 0, SlotState.EXITED, DEADLINE, ("gpu-b",), 21, 20, 5, exit=done)
    table.adopt_leftover(lost, empty=False, now_ns=NOW)
    table.adopt_leftover(ended, empty=True, now_ns=NOW)
    assert status(table, "a.1.0").exit == Exit(ExitReason.GUARDIAN_LOST, None, None, NOW, "", False)
    assert (status(table, "b.1.0").exit, status(table, "b.1.0").state) == (done, SlotState.EXITED)
    assert refusal(table.prepare(ask(), NOW)) is Refusal.DEVICE_BUSY
    table.emptied("a.1.0", NOW + 1)
    assert status(table, "a.1.0").exit == Exit(ExitReason.GUARDIAN_LOST, None, None, NOW, "", True)
    assert kinds(table.prepare(ask(), NOW)) == ["Persist", "Reserve"]
    assert refusal(table.prepare(ask("a.0.0", Token("a", 0, (0, 1)), ()), NOW)) is Refusal.STALE_GENERATION


def test_a_helper_that_dies_before_start_ends_the_slot() -> None:
    table = prepared()
    assert kinds(table.ended(SLOT, Outcome(signal=9), NOW)) == ["Drop", "Persist", "Announce"]
    end = status(table).exit
    assert end is not None
    assert end.reason is ExitReason.START_FAILED


class ForgetsItsOwner(SlotTable):
    """The seeded defect of C3: the owner of a reservation contends with its own."""

    def prepare(self, request: PrepareRequest, now_ns: int) -> list[Action] | Refused:
        if any(set(slot.request.device_keys) & set(request.device_keys) for slot in self.live()):
            return Refused(Refusal.DEVICE_BUSY, "held")
        return super().prepare(request, now_ns)


def prepare_twice(table: SlotTable) -> None:
    """Two kinds of device, asked for again by the same owner: while it is reserved, and once it is."""
    request = ask(devices=("gpu-a", "nic-a"))
    assert kinds(table.prepare(request, NOW)) == ["Persist", "Reserve"]
    assert table.prepare(request, NOW) == []
    table.prepared(SLOT, 29500)
    before = table.all()
    assert table.prepare(request, NOW) == []
    assert table.all() == before


def test_case_c3_the_same_owner_may_prepare_again() -> None:
    prepare_twice(SlotTable())


@pytest.mark.parametrize("defect", [ForgetsItsOwner])
def test_case_c3_catches_a_lock_that_does_not_know_its_owner(defect: type[SlotTable]) -> None:
    with pytest.raises(AssertionError):
        prepare_twice(defect())


def test_jobs_remembered_are_bounded() -> None:
    table = SlotTable()
    for number in range(slots.JOBS_REMEMBERED_MAX + 10):
        name = f"job{number}.1.0"
        table.prepare(ask(name, Token(f"job{number}", 1, (0, number)), ()), NOW)
        table.release(name)
    assert len(table._newest) == slots.JOBS_REMEMBERED_MAX
