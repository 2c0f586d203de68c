"""Each row of the table that the agent keeps out, with the defect that would let it in: its test must fail then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from noded.core import agent as agent_module
from noded.core import environment, lease, ledger, slotbook, slottable
from noded.core.agent import AgentCore
from noded.core.events import GuardianHello
from noded.core.instructions import Instruction
from noded.core.messages import SlotState, SlotStatus
from noded.core.slotbook import SlotBook
from noded.core.slots import Phase, Slot
from tests.unit import test_noded_agent_session as sessions
from tests.unit import test_noded_agent_slots as slots
from tests.unit import test_noded_environment as environments
from tests.unit import test_noded_ledger as ledgers
from virialpb.ids import SlotId, Token
from virialpb.reasons import Reason

Seed = Callable[[pytest.MonkeyPatch], None]


def prepares_without_inventory(patch: pytest.MonkeyPatch) -> None:
    original = SlotBook.advance

    def advance(self: SlotBook, now_ns: int) -> list[Instruction]:
        self.devices = {} if self.devices is None else self.devices
        return original(self, now_ns)

    patch.setattr(SlotBook, "advance", advance)


def adopts_nothing(patch: pytest.MonkeyPatch) -> None:
    original = AgentCore.handle

    def handle(self: AgentCore, event: agent_module.Event, now_ns: int) -> list[Instruction]:
        if isinstance(event, GuardianHello):
            event = dataclasses.replace(event, slots=())
        return original(self, event, now_ns)

    patch.setattr(AgentCore, "handle", handle)


def forgets_a_failed_release(patch: pytest.MonkeyPatch) -> None:
    def release_failed(self: SlotBook, slot_id: SlotId, token: Token, now_ns: int) -> list[Instruction]:
        return self.released(slot_id, token)

    patch.setattr(SlotBook, "release_failed", release_failed)


def runs_an_older_generation_beside_a_newer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slot, "ended", property(lambda _: True))


def believes_any_token(patch: pytest.MonkeyPatch) -> None:
    def owned(self: slottable.SlotTable, slot_id: SlotId, token: Token, *phases: Phase) -> Slot | None:
        slot = self.get(slot_id)
        return slot if slot is not None and slot.phase in phases else None

    patch.setattr(slottable.SlotTable, "_owned", owned)


def tells_an_exit_once(patch: pytest.MonkeyPatch) -> None:
    original = SlotBook.statuses
    told: set[SlotId] = set()

    def statuses(self: SlotBook, now_ns: int) -> tuple[SlotStatus, ...]:
        shown = tuple(one for one in original(self, now_ns) if one.slot not in told)
        told.update(one.slot for one in shown if one.state is SlotState.EXITED)
        return shown

    patch.setattr(SlotBook, "statuses", statuses)


def runs_old_work_in_a_new_life(patch: pytest.MonkeyPatch) -> None:
    def restart(self: SlotBook, held: object, leftovers: object, records: object) -> list[Instruction]:
        return []

    patch.setattr(SlotBook, "restart", restart)


def lets_the_save_fail_in_silence(patch: pytest.MonkeyPatch) -> None:
    def directory_failed(self: ledger.CallLedger, event: object, now_ns: int, *, online: bool) -> list[Instruction]:
        return []

    patch.setattr(ledger.CallLedger, "directory_failed", directory_failed)


def shows_every_device(patch: pytest.MonkeyPatch) -> None:
    def shown(granted: object, devices: object) -> dict[str, str]:
        return {}

    patch.setattr(environments, "visible_devices", shown)


def overwrites_what_the_user_set(patch: pytest.MonkeyPatch) -> None:
    original = environment.rank_environment

    def overwriting(record: slotbook.SlotRecord, *args: object, **kwargs: object) -> object:
        return original(dataclasses.replace(record, user_env=()), *args, **kwargs)  # type: ignore[arg-type]

    patch.setattr(environments, "rank_environment", overwriting)


def counts_a_lease_from_the_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    original = lease.LeaseClock.acknowledged

    def acknowledged(self: lease.LeaseClock, seq: int) -> bool:
        moved = original(self, seq)
        if moved and self.renewed_ns is not None:
            self.renewed_ns += 1
        return moved

    patch.setattr(lease.LeaseClock, "acknowledged", acknowledged)


ROWS: list[tuple[str, Callable[[], None], Seed]] = [
    ("C11", slots.test_case_c11_no_prepare_before_the_inventory_was_read, prepares_without_inventory),
    ("C13", sessions.test_case_f10_a_restarted_agent_adopts_what_runs_and_extends_it, adopts_nothing),
    ("F10", sessions.test_case_f10_a_restarted_agent_adopts_what_runs_and_extends_it, adopts_nothing),
    ("C15", slots.test_case_c15_a_failing_release_stays_an_obligation_with_back_off, forgets_a_failed_release),
    (
        "G5",
        slots.test_case_g5_a_newer_generation_waits_until_the_older_is_gone_from_the_node,
        runs_an_older_generation_beside_a_newer,
    ),
    ("H7", slots.test_case_h7_a_late_exit_of_another_token_fails_nothing, believes_any_token),
    ("H8", slots.test_case_h8_an_exit_is_reported_in_every_beat_until_it_is_released, tells_an_exit_once),
    (
        "G15",
        sessions.test_case_g15_a_new_guardian_is_a_new_incarnation_that_runs_nothing_of_the_old,
        runs_old_work_in_a_new_life,
    ),
    ("H10", environments.test_case_h10_without_a_request_every_vendors_devices_are_hidden, shows_every_device),
    ("H14", environments.test_case_h14_names_that_the_user_set_are_left_out, overwrites_what_the_user_set),
    (
        "C1",
        sessions.test_each_acknowledged_renewal_extends_every_lease_from_its_send_time,
        counts_a_lease_from_the_acknowledgement,
    ),
]


@pytest.mark.parametrize(
    ("defect", "test", "seed"),
    [
        pytest.param(seed.__name__, test, seed, marks=pytest.mark.row(row), id=f"{row}-{seed.__name__}")
        for row, test, seed in ROWS
    ],
)
def test_the_defect_is_caught(
    defect: str, test: Callable[[], None], seed: Seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    test()
    seed(monkeypatch)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        test()
    assert defect


def test_case_g8_catches_a_save_that_fails_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    check = ledgers.test_case_g8_a_directory_that_cannot_be_made_fails_the_save_and_tells_the_controller
    for defect in (lets_the_save_fail_in_silence,):
        check(True, Reason.STORAGE_FULL)
        defect(monkeypatch)
        with pytest.raises(AssertionError):
            check(True, Reason.STORAGE_FULL)
