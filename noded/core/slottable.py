"""Which slots there are, which there were, and the newest token of each job: bounded, and keyed once."""

from __future__ import annotations

from collections import Counter
from typing import Final

from noded.core.instructions import Forget, Instruction
from noded.core.messages import SlotStatus
from noded.core.slots import Phase, Slot, token_order
from virialpb.ids import JobId, SlotId, Token

REMEMBERED_MAX: Final = 4096
"""Released slots and newest tokens kept, so that a late Prepare revives nothing."""
SLOTS_MAX: Final = 192
"""As many as the guardian takes, and as fit into one beat with the longest names of jobs."""
GONE_MAX: Final = 200
"""They all stand in a hello, which is a control message of at most 64 KiB."""


class SlotTable:
    """Invariant: a slot id has one token at a time; a slot leaves only by a release that the guardian confirmed."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._slots: dict[SlotId, Slot] = {}
        self._newest: dict[JobId, Token] = {}
        self._finished: dict[SlotId, Token] = {}
        self.gone: dict[SlotId, Token] = {}
        """Slots of former incarnations whose processes are proven gone, until the controller has released them."""
        self.changed = False
        """A slot is shown differently than in the last beat."""

    def get(self, slot: SlotId) -> Slot | None:
        return self._slots.get(slot)

    def all(self) -> tuple[Slot, ...]:
        return tuple(self._slots.values())

    def statuses(self, now_ns: int) -> tuple[SlotStatus, ...]:
        return tuple(slot.status(now_ns) for slot in self._slots.values())

    def _forget(self, slot: Slot) -> list[Instruction]:
        del self._slots[slot.id]
        self._finish(slot.id, slot.token)
        self.changed = True
        return [Forget(slot.id)] if slot.in_guardian else []

    def _gone(self, slot: SlotId, token: Token) -> None:
        self._finish(slot, token)  # it was granted to a former incarnation: this one must not run it
        self.gone[slot] = token
        if len(self.gone) > GONE_MAX:
            del self.gone[next(iter(self.gone))]

    def _owned(self, slot_id: SlotId, token: Token, *phases: Phase) -> Slot | None:
        slot = self._slots.get(slot_id)
        if slot is None or slot.token != token:
            self._counters["late_outcome"] += 1
            return None
        return slot if slot.phase in phases else None

    def _see(self, token: Token) -> None:
        newest = self._newest.pop(token.job, token)
        self._newest[token.job] = max(newest, token, key=token_order)
        if len(self._newest) > REMEMBERED_MAX:
            del self._newest[next(iter(self._newest))]

    def _finish(self, slot: SlotId, token: Token) -> None:
        self._see(token)
        self._finished.pop(slot, None)
        self._finished[slot] = token
        if len(self._finished) > REMEMBERED_MAX:
            del self._finished[next(iter(self._finished))]
