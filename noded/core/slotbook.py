"""All slots of a node, and what each order and each word of the guardian means for them.

Level-triggered: any order may be lost, repeated, late or out of turn. An order is carried out, is already carried out,
or is dropped and counted; none has to be heard twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from noded.core.environment import rank_environment
from noded.core.events import GuardianSlot, GuardianState, Progress, StartDone
from noded.core.instructions import (
    Forget,
    GuardianExtend,
    GuardianPrepare,
    GuardianPush,
    GuardianRelease,
    GuardianStart,
    GuardianStop,
    Instruction,
    KillSlot,
    Remember,
    VerifyShard,
)
from noded.core.lease import LeaseClock
from noded.core.messages import (
    WHOLE_THOUSANDTHS,
    CheckpointOutcome,
    Device,
    Go,
    Prepare,
    Release,
    SaveNow,
    SlotOrder,
    SlotRecord,
    Stop,
    TaskExit,
)
from noded.core.slots import STOPPED, Phase, Slot, adopted, record_of, token_order
from noded.core.slottable import SLOTS_MAX, SlotTable
from virialpb.ids import CheckpointId, SlotId, Token
from virialpb.lease import NS_PER_MS
from virialpb.reasons import ExitReason, PrepareFailure, StopReason

KILL_SLACK_NS: Final = 500 * NS_PER_MS
"""The guardian, then the slot's launcher, kill at the deadline; this agent is the third and leaves them this long."""
RELEASE_RETRY_NS: Final = 200 * NS_PER_MS
RELEASE_RETRY_NS_MAX: Final = 10_000 * NS_PER_MS
RUNTIMES: Final = ("", "process")


class SlotBook(SlotTable):
    """The slots, and what to do about them."""

    def __init__(self, lease: LeaseClock, counters: Counter[str], *, node_name: str, local_tier: str) -> None:
        super().__init__(counters)
        self._lease = lease
        self._node_name = node_name
        self._local_tier = local_tier
        self.devices: dict[str, Device] | None = None
        """None until the inventory was read once: nothing is prepared before that (nomad#9473)."""

    def place(self, directory: str, job: str, checkpoint: CheckpointId) -> str:
        """Where a checkpoint lies: as named when absolute, else in this node's own tier, never outside it."""
        if directory.startswith("/"):
            return directory
        parts = directory.split("/")
        inside = directory if directory and not {"", ".", ".."} & set(parts) else f"{job}/{checkpoint}"
        return f"{self._local_tier}/{inside}"

    # -- orders

    def order(self, order: SlotOrder) -> list[Instruction]:
        """Only notes what is wanted where that may have to wait; `advance` does it."""
        if isinstance(order, Prepare):
            return self._prepare(order)
        slot = self._slots.get(order.slot)
        if slot is None:
            if isinstance(order, Release):
                self._finish(order.slot, order.token)
                if self.gone.get(order.slot) == order.token:
                    return [GuardianRelease(order.slot, order.token)]
            else:
                self._counters["unknown_slot"] += 1
            return []
        if slot.token != order.token:
            self._counters["stale_token"] += 1
            return []
        match order:
            case Go():
                return self._go(slot, order)
            case Stop():
                return self._stop(slot, order.grace_ms, order.reason)
            case Release():
                slot.release_wanted = True
                return []
            case SaveNow():
                step = None if order.step < 0 else order.step
                return self._push(slot, (("push", "save_now"), ("step", step), ("reason", order.reason)))
            case CheckpointOutcome():
                pushed = (("push", "checkpoint"), ("checkpoint_id", order.checkpoint), ("state", order.state))
                return self._push(slot, pushed)

    def stop_all(self, grace_ms: int, reason: StopReason, *, before_history: int | None = None) -> list[Instruction]:
        """Stop every slot, or those whose token is of an older history of the store."""
        found: list[Instruction] = []
        for slot in self.all():
            if before_history is None or slot.token.epoch.history < before_history:
                found += self._stop(slot, grace_ms, reason)
        return found

    def _prepare(self, order: Prepare) -> list[Instruction]:
        known = self._slots.get(order.slot)
        if known is not None and known.token == order.token:
            return []
        newest = self._newest.get(order.token.job)
        stale = newest is not None and token_order(order.token) < token_order(newest)
        if stale or self._finished.get(order.slot) == order.token:
            self._counters["stale_token"] += 1
            return []
        if known is None and len(self._slots) >= SLOTS_MAX:
            self._counters["too_many_slots"] += 1
            return []
        self._see(order.token)
        superseded: list[Instruction] = []
        for slot in self.all():
            if slot.token.job == order.token.job and slot.token != order.token:
                superseded += self._stop(slot, 0, StopReason.SUPERSEDED)
        if known is not None:  # under an older token of another history: its end comes first, the order will come again
            return superseded
        slot = Slot(record_of(order), Phase.WAITING, prepare=order)
        self._slots[slot.id] = slot
        self.changed = True
        return superseded

    def _go(self, slot: Slot, order: Go) -> list[Instruction]:
        if slot.record.rank is None:
            self._counters["spare_go"] += 1
            return []
        if slot.phase is not Phase.READY or self.devices is None:
            return []  # running already, or not ready yet: the controller sees which, and says Go again
        slot.phase, slot.may_live = Phase.STARTING, True
        restore = slot.record.restore
        directory = "" if restore is None else self.place(restore.directory, slot.token.job, restore.checkpoint)
        devices = self.devices.values()
        env = rank_environment(slot.record, order, devices, node_name=self._node_name, checkpoint_directory=directory)
        return [GuardianStart(slot.id, slot.token, env)]

    def _stop(self, slot: Slot, grace_ms: int, reason: StopReason) -> list[Instruction]:
        match slot.phase:
            case Phase.EXITED | Phase.RELEASING | Phase.STUCK:
                return []
            case Phase.WAITING | Phase.VERIFYING | Phase.FAILED:
                slot.phase, slot.exit = Phase.EXITED, STOPPED
                self.changed = True
                return []
            case _:
                if slot.phase is not Phase.STOPPING:
                    slot.phase = Phase.STOPPING
                    self.changed = True
                slot.stop_grace_ms, slot.stop_reason = grace_ms, reason
                return [GuardianStop(slot.id, slot.token, grace_ms, reason)]

    def _push(self, slot: Slot, message: tuple[tuple[str, str | int | None], ...]) -> list[Instruction]:
        return [GuardianPush(slot.id, message)] if slot.phase is Phase.RUNNING else []

    # -- preparing

    def advance(self, now_ns: int) -> list[Instruction]:
        """What has become possible or due."""
        found: list[Instruction] = []
        for slot in self.all():
            if slot.phase is Phase.WAITING:
                found += self._advance_prepare(slot, now_ns)
            elif slot.release_wanted:
                found += self._advance_release(slot, now_ns)
        return found

    def overdue(self, now_ns: int) -> list[Instruction]:
        """With the guardian silent, this agent enforces the deadlines."""
        return [
            KillSlot(slot.id, slot.pid, slot.init_pid, slot.start_ticks)
            for slot in self.all()
            if slot.leased and slot.pid and slot.deadline_ns + KILL_SLACK_NS <= now_ns
        ]

    def _advance_prepare(self, slot: Slot, now_ns: int) -> list[Instruction]:
        order = slot.prepare
        deadline_ns = self._lease.deadline_ns(slot.record.fence_after_ms)
        if order is None or self.devices is None or deadline_ns is None or deadline_ns <= now_ns:
            return []
        if any(
            other.token.job == slot.token.job and other.token != slot.token and not other.ended for other in self.all()
        ):
            return []  # the old generation's cgroup is not empty yet
        missing = sorted(set(slot.record.device_keys) - set(self.devices))
        if missing:
            return self._fail(slot, PrepareFailure.INVENTORY_MISSING, f"no such device here: {', '.join(missing)}")
        busy = self._overbooked(slot)
        if busy:
            return self._fail(slot, PrepareFailure.DEVICE_BUSY, busy)
        if order.task.runtime not in RUNTIMES:
            return self._fail(slot, PrepareFailure.KIND_UNSUPPORTED, order.task.runtime)
        if order.restore is None or order.rank is None:
            return self._reserve(slot, order, deadline_ns)
        slot.phase = Phase.VERIFYING
        directory = self.place(order.restore.directory, slot.token.job, order.restore.checkpoint)
        return [VerifyShard(slot.id, slot.token, order.rank, directory, order.restore)]

    def _reserve(self, slot: Slot, order: Prepare, deadline_ns: int) -> list[Instruction]:
        slot.phase, slot.deadline_ns, slot.in_guardian = Phase.RESERVING, deadline_ns, True
        return [
            Remember(slot.record),
            GuardianPrepare(
                slot=slot.id,
                token=slot.token,
                rank=order.rank,
                deadline_ns=deadline_ns,
                task=order.task,
                cpu_millis=order.cpu_millis,
                memory_bytes=order.memory_bytes,
                device_keys=slot.record.whole_devices,
                hold_port=order.hold_port,
            ),
        ]

    def _overbooked(self, slot: Slot) -> str:
        """The device of which more than the whole would be given out, and who has it. The guardian keeps whole devices
        apart by itself; parts are counted here."""
        for grant in slot.record.devices:
            held = [
                (other.id, part.share_thousandths)
                for other in self.all()
                for part in other.record.devices
                if other.holds and part.device_key == grant.device_key
            ]
            if grant.share_thousandths + sum(share for _, share in held) > WHOLE_THOUSANDTHS and held:
                return f"{grant.device_key} held by {', '.join(holder for holder, _ in held)}"
        return ""

    def _fail(self, slot: Slot, failure: PrepareFailure, detail: str) -> list[Instruction]:
        slot.phase, slot.failure, slot.failure_detail = Phase.FAILED, failure, detail
        self.changed = True
        return []

    def shard_read(self, slot_id: SlotId, token: Token, read_bytes: int) -> list[Instruction]:
        slot = self._owned(slot_id, token, Phase.VERIFYING)
        if slot is not None:
            slot.prepared_bytes = read_bytes
        return []

    def shard_verified(self, slot_id: SlotId, token: Token, now_ns: int) -> list[Instruction]:
        slot = self._owned(slot_id, token, Phase.VERIFYING)
        if slot is None or slot.prepare is None:
            return []
        deadline_ns = self._lease.deadline_ns(slot.record.fence_after_ms)
        if deadline_ns is None or deadline_ns <= now_ns:
            slot.phase = Phase.WAITING  # renewals stopped meanwhile; the digest is read again once they are back
            return []
        return self._reserve(slot, slot.prepare, deadline_ns)

    def prepare_failed(self, slot_id: SlotId, token: Token, failure: PrepareFailure, detail: str) -> list[Instruction]:
        slot = self._owned(slot_id, token, Phase.VERIFYING, Phase.RESERVING, Phase.STOPPING)
        if slot is None:
            return []
        if slot.phase is Phase.STOPPING:
            return self.absent(slot_id, token)
        return self._fail(slot, failure, detail)

    def prepare_done(self, slot_id: SlotId, token: Token, port: int, now_ns: int) -> list[Instruction]:
        slot = self._owned(slot_id, token, Phase.RESERVING)
        if slot is None:
            return []
        slot.phase, slot.port = Phase.READY, port
        self.changed = True
        return self.extend(now_ns)

    # -- the lease

    def extend(self, now_ns: int) -> list[Instruction]:
        """New deadlines after a renewal; a passed one stays where it is."""
        moved: list[tuple[SlotId, int]] = []
        for slot in self.all():
            deadline_ns = self._lease.deadline_ns(slot.record.fence_after_ms)
            if slot.leased and deadline_ns is not None and slot.deadline_ns > now_ns and deadline_ns > slot.deadline_ns:
                slot.deadline_ns = deadline_ns
                moved.append((slot.id, deadline_ns))
        return [GuardianExtend(tuple(moved))] if moved else []

    # -- words of the guardian

    def started(self, event: StartDone) -> list[Instruction]:
        slot = self._owned(event.slot, event.token, Phase.STARTING, Phase.RUNNING, Phase.STOPPING)
        if slot is None:
            return []
        slot.pid, slot.init_pid, slot.start_ticks = event.pid, event.init_pid, event.start_ticks
        if slot.phase is Phase.STARTING:
            slot.phase = Phase.RUNNING
            self.changed = True
        return []

    def start_failed(self, slot_id: SlotId, token: Token, detail: str, *, retry: bool) -> list[Instruction]:
        slot = self._owned(slot_id, token, Phase.STARTING)
        if slot is None:
            return []
        if retry:
            slot.phase = Phase.READY
            return []
        slot.start_failure = detail
        slot.phase = Phase.STOPPING
        self.changed = True
        return [GuardianStop(slot.id, slot.token, 0, ExitReason.START_FAILED)]

    def exited(self, slot_id: SlotId, token: Token, task_exit: TaskExit | None, *, empty: bool) -> list[Instruction]:
        slot = self._owned(slot_id, token, *(phase for phase in Phase if phase not in (Phase.EXITED, Phase.RELEASING)))
        if slot is None:
            return []
        if slot.phase is Phase.FAILED:
            return []  # the guardian's own end of a slot that it could not prepare; its reason is known already
        if slot.start_failure:
            task_exit = TaskExit(ExitReason.START_FAILED, stderr_tail=slot.start_failure)
        if slot.phase is Phase.STUCK and not empty:
            return []
        slot.phase, slot.exit = (Phase.EXITED if empty else Phase.STUCK), task_exit
        self.changed = True
        return []

    def progressed(self, slot_id: SlotId, token: Token, progress: Progress, now_ns: int) -> list[Instruction]:
        slot = self._owned(slot_id, token, Phase.STARTING, Phase.RUNNING, Phase.STOPPING)
        if slot is None or slot.expired(now_ns):
            return []
        if slot.progress is None:
            self.changed = True  # the first progress of a rank ends its start deadline: do not wait for the next beat
        if slot.progress is None or progress.at_ns >= slot.progress.at_ns:
            slot.progress = progress
        return []

    def observe(self, held: Iterable[GuardianSlot], now_ns: int) -> list[Instruction]:
        """A `list` of the guardian. It may be older than an order in flight, so it only ever moves a slot forward."""
        found: list[Instruction] = []
        for seen in held:
            slot = self._slots.get(seen.slot)
            if slot is None or slot.token != seen.token:
                continue
            if seen.progress is not None:
                found += self.progressed(seen.slot, seen.token, seen.progress, now_ns)
            if seen.pid and slot.phase in (Phase.STARTING, Phase.RUNNING):
                slot.pid, slot.init_pid, slot.start_ticks = seen.pid, seen.init_pid, seen.start_ticks
            if seen.state in (GuardianState.EXITED, GuardianState.STUCK):
                empty = seen.state is GuardianState.EXITED
                found += self.exited(seen.slot, seen.token, seen.exit, empty=empty)
        return found

    # -- a guardian is met, again or for the first time

    def resume(
        self, held: Iterable[GuardianSlot], records: Mapping[SlotId, SlotRecord], now_ns: int
    ) -> list[Instruction]:
        """The same guardian as before, or the first one this agent meets: what was in flight is asked again."""
        listed = {seen.slot: seen for seen in held}
        found: list[Instruction] = []
        for seen in listed.values():
            known = self._slots.get(seen.slot)
            if known is None or known.token != seen.token:
                self._adopt(seen, records)
        for slot in self.all():
            seen = listed.get(slot.id)
            if seen is None:
                found += self._resume_absent(slot)
            else:
                found += self._resume_held(slot, seen, now_ns)
        return found + self.extend(now_ns)

    def _resume_held(self, slot: Slot, seen: GuardianSlot, now_ns: int) -> list[Instruction]:
        if seen.state in (GuardianState.EXITED, GuardianState.STUCK):
            empty = seen.state is GuardianState.EXITED
            if slot.phase is Phase.RELEASING:
                return [GuardianRelease(slot.id, slot.token)]
            return self.exited(slot.id, slot.token, seen.exit, empty=empty)
        slot.deadline_ns = seen.deadline_ns  # an extension may have been lost on the way
        match slot.phase:
            case Phase.RESERVING if slot.prepare is not None:
                return self._reserve(slot, slot.prepare, seen.deadline_ns)
            case Phase.STARTING | Phase.READY:
                running = seen.state is GuardianState.RUNNING
                slot.phase = Phase.RUNNING if running else Phase.READY  # GO will come again
                slot.pid, slot.init_pid, slot.start_ticks = seen.pid, seen.init_pid, seen.start_ticks
                self.changed = True
            case Phase.STOPPING:
                return [GuardianStop(slot.id, slot.token, slot.stop_grace_ms, slot.stop_reason)]
            case Phase.RELEASING:
                return [GuardianRelease(slot.id, slot.token)]
            case _:
                pass
        return []

    def _resume_absent(self, slot: Slot) -> list[Instruction]:
        match slot.phase:
            case Phase.RESERVING if slot.prepare is not None:
                return self._reserve(slot, slot.prepare, slot.deadline_ns)
            case Phase.RELEASING:
                return self._forget(slot)
            case Phase.READY | Phase.STARTING | Phase.RUNNING | Phase.STOPPING:
                return self.absent(slot.id, slot.token)
            case _:
                return []

    def restart(
        self,
        held: Iterable[GuardianSlot],
        leftovers: Iterable[GuardianSlot],
        records: Mapping[SlotId, SlotRecord],
    ) -> list[Instruction]:
        """Another guardian than before: a new incarnation. It runs nothing that was granted to the old one.

        What the old one ran is `gone` once the new guardian saw its processes gone. A slot that had been started and of
        which the new guardian knows nothing is not proven gone, and stays STUCK: its devices remain locked.
        """
        proof = {seen.slot: seen.state is GuardianState.EXITED for seen in leftovers}
        before = self.all()
        self._slots.clear()
        self.changed = True
        for slot in before:
            self._finish(slot.id, slot.token)
            if proof.get(slot.id, slot.ended or not slot.may_live):
                self._gone(slot.id, slot.token)
            elif slot.id not in proof:
                self._slots[slot.id] = replace(slot, phase=Phase.STUCK)
        for seen in leftovers:
            if seen.state is GuardianState.EXITED:
                self._gone(seen.slot, seen.token)
            else:
                self._adopt(seen, records)
        for seen in held:
            self._adopt(seen, records)
        return []

    def _adopt(self, seen: GuardianSlot, records: Mapping[SlotId, SlotRecord]) -> None:
        self._slots[seen.slot] = adopted(seen, records.get(seen.slot))
        self._see(seen.token)
        self.changed = True

    def absent(self, slot_id: SlotId, token: Token) -> list[Instruction]:
        """The guardian does not know the slot: a prepare that it refused, then a stop."""
        slot = self._owned(slot_id, token, Phase.READY, Phase.STARTING, Phase.RUNNING, Phase.STOPPING)
        if slot is not None:
            slot.phase, slot.exit = Phase.EXITED, TaskExit(ExitReason.GUARDIAN_LOST) if slot.may_live else STOPPED
            self.changed = True
        return []

    # -- the end of a slot

    def _advance_release(self, slot: Slot, now_ns: int) -> list[Instruction]:
        if slot.phase is Phase.STUCK:
            return []
        if not slot.in_guardian:
            return self._forget(slot)
        if slot.phase in (Phase.FAILED, Phase.EXITED, Phase.READY):
            if slot.release_at_ns > now_ns:
                return []
            slot.phase = Phase.RELEASING
            return [GuardianRelease(slot.id, slot.token)]
        if slot.phase in (Phase.STOPPING, Phase.RELEASING):
            return []
        # The controller has written this slot off, so nothing of it may go on.
        return self._stop(slot, 0, StopReason.FINISHED)

    def released(self, slot_id: SlotId, token: Token) -> list[Instruction]:
        if slot_id not in self._slots and self.gone.get(slot_id) == token:
            del self.gone[slot_id]
            return [Forget(slot_id)]
        slot = self._owned(slot_id, token, Phase.RELEASING)
        return [] if slot is None else self._forget(slot)

    def release_failed(self, slot_id: SlotId, token: Token, now_ns: int) -> list[Instruction]:
        slot = self._owned(slot_id, token, Phase.RELEASING)
        if slot is not None:
            wait_ns = min(RELEASE_RETRY_NS << min(slot.releases_failed, 16), RELEASE_RETRY_NS_MAX)
            slot.phase = Phase.EXITED
            slot.releases_failed += 1
            slot.release_at_ns = now_ns + wait_ns
        return []
