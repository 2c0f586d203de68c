"""A node as the controller hears it: does at once what it is ordered, and nothing by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from controld.core.agent import Beat, DropCheckpoint, Go, Order, Prepare, Release, SlotState, SlotStatus, Stop
from controld.core.ids import CheckpointId, Incarnation, JobId, SlotId
from controld.core.model import Device, TaskExit
from virialpb.reasons import ExitReason

Logs = dict[tuple[SlotId, str], bytes]


@dataclass(slots=True)
class FakeAgent:
    """`cut`: neither beats nor orders pass. `dropped`: checkpoints whose files it was told to delete."""

    name: str
    incarnation: Incarnation
    cpu_millis: int
    memory_bytes: int
    devices: tuple[Device, ...]
    labels: tuple[tuple[str, str], ...]
    slots: dict[SlotId, SlotStatus] = field(default_factory=dict[SlotId, SlotStatus])
    dropped: list[tuple[JobId, CheckpointId]] = field(default_factory=list[tuple[JobId, CheckpointId]])
    logs: Logs = field(default_factory=Logs)
    seq: int = 0
    cut: bool = False

    def obey(self, order: Order) -> None:
        match order:
            case Prepare():
                self.slots.setdefault(order.slot, SlotStatus(order.slot, order.token, SlotState.READY, port=29_500))
            case Go():
                self._become(order.slot, SlotState.READY, SlotState.RUNNING)
            case Stop():
                self.end(order.slot, TaskExit(ExitReason.STOPPED))
            case Release():
                self.slots.pop(order.slot, None)
            case DropCheckpoint():
                self.dropped.append((order.job, order.checkpoint))
            case _:
                pass  # answers to what a fake never asks

    def _become(self, slot: SlotId, before: SlotState, after: SlotState) -> None:
        status = self.slots.get(slot)
        if status is not None and status.state is before:
            self.slots[slot] = replace(status, state=after)

    def end(self, slot: SlotId, exit_: TaskExit) -> None:
        """The task of a slot is over, unless it is already."""
        status = self.slots.get(slot)
        if status is not None and status.state is not SlotState.EXITED:
            self.slots[slot] = replace(status, state=SlotState.EXITED, exit=exit_)

    def progress(self, slot: SlotId, step: int, metrics: Mapping[str, float]) -> None:
        status = self.slots.get(slot)
        if status is not None and status.state is SlotState.RUNNING:
            self.slots[slot] = replace(status, progress_step=step, metrics=tuple(sorted(metrics.items())))

    def reboot(self) -> None:
        """Back, with nothing of what ran: a new life of the same host."""
        before = self.incarnation
        count = int(before.boot_id.rpartition("-")[2]) + 1
        self.incarnation = Incarnation(before.node_uid, f"boot-{count}", f"guardian-{count}")
        self.slots.clear()
        self.cut = False

    def beat(self) -> Beat:
        self.seq += 1
        return Beat(self.seq, tuple(self.slots.values()))
