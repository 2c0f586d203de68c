"""The agent's state machine: `handle(event, now_ns)` gives the instructions that the event calls for.

Pure. The shell (noded.driver) carries the instructions out in order and tells their outcomes as events. Its duties:

1. A Tick at least every 100 ms, and `now_ns` read from CLOCK_BOOTTIME for each event, never backwards.
2. A beat or hello is sent at once or not at all: its send time is the `now_ns` that it was made with. Kept back, a
   later arrival at the controller would only make the agent stop earlier than it must.
3. GuardianLost when the guardian has not answered for GUARDIAN_PATIENCE; renewals stop until it answers again.
4. Disconnected before a new Connected.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

from noded.core.beats import BeatClock, fitted
from noded.core.epochs import Admission, LeaderEpoch
from noded.core.events import (
    Connected,
    DirectoryFailed,
    DirectoryMade,
    Disconnected,
    Event,
    FilesDropped,
    GuardianAnswered,
    GuardianHello,
    GuardianLost,
    InventoryRead,
    OrderReceived,
    PrepareDone,
    PrepareFailed,
    ReadingsTaken,
    ReleaseDone,
    ReleaseFailed,
    ShardRead,
    ShardVerified,
    ShutdownRequested,
    StartDone,
    StartFailed,
    StopFailed,
    TaskCalled,
    TaskExited,
    TaskProgressed,
    Tick,
)
from noded.core.instructions import (
    DropFiles,
    Forget,
    GuardianRelease,
    Instruction,
    NewSession,
    Redial,
    ReplaceGuardian,
    SaveLeader,
    SendBeat,
    SendDropDone,
    SendHello,
)
from noded.core.lease import LeaseClock
from noded.core.ledger import CallLedger
from noded.core.messages import (
    Beat,
    BeatAck,
    DropCheckpoint,
    DropDone,
    Go,
    Hello,
    NodeFacts,
    Order,
    Prepare,
    Sample,
    SessionRefused,
    TaskReply,
    Welcome,
)
from noded.core.slotbook import SlotBook
from virialpb.ids import NO_EPOCH, Epoch, Incarnation, NodeUid, SlotId
from virialpb.reasons import StopReason

GUARDIAN_PATIENCE_NS: Final = 3_000_000_000
GUARDIAN_HANGS_NS: Final = 10_000_000_000


class AgentCore:
    """One node's agent. `leader_epoch` and `cluster_uid` are what a former life of it saved, if any."""

    def __init__(
        self,
        node_uid: NodeUid,
        facts: NodeFacts,
        *,
        local_tier: str,
        leader_epoch: Epoch = NO_EPOCH,
        cluster_uid: str = "",
    ) -> None:
        self._node_uid = node_uid
        self._facts = facts
        self.counters: Counter[str] = Counter()
        """What was dropped, by why: data for metrics and logs."""
        self.leader = LeaderEpoch(leader_epoch)
        self.lease = LeaseClock()
        self.slots = SlotBook(self.lease, self.counters, node_name=facts.name, local_tier=local_tier)
        self._ledger = CallLedger(self.counters, self.slots.place)
        self._beats = BeatClock()
        self._cluster_uid = cluster_uid
        self._incarnation: Incarnation | None = None
        self._fencing = ""
        self._readings: tuple[Sample, ...] = ()
        self.guardian_ok = False
        self._silent_since_ns = 0
        self.connected = False
        self.welcomed = False
        self._foreign = False
        # Slots of former guardians that the hello of this connection told of as gone.
        self._told_gone: tuple[SlotId, ...] = ()

    @property
    def incarnation(self) -> Incarnation | None:
        """None before the first guardian was met."""
        return self._incarnation

    def handle(self, event: Event, now_ns: int) -> list[Instruction]:
        found = self._dispatch(event, now_ns) + self.slots.advance(now_ns)
        if isinstance(event, Tick) and not self.guardian_ok:
            found += self.slots.overdue(now_ns) + self._replace_guardian(now_ns)
        for instruction in found:
            if isinstance(instruction, Forget):
                self._ledger.forget(instruction.slot)
        return found + self._beat_if_due(now_ns)

    def next_wake_ns(self) -> int:
        """When a Tick has something to send; the shell ticks at least every 100 ms anyway."""
        return self._beats.due_ns(changed=self.slots.changed)

    def _dispatch(self, event: Event, now_ns: int) -> list[Instruction]:
        slots = self.slots
        match event:
            case Tick():
                return self._tick(now_ns)
            case OrderReceived():
                return self._order(event, now_ns)
            case Connected():
                return self._connected(now_ns)
            case Disconnected():
                self.connected = self.welcomed = self._foreign = False
                return []
            case GuardianHello():
                return self._guardian_hello(event, now_ns)
            case GuardianLost():
                if self.guardian_ok:
                    self.guardian_ok, self._silent_since_ns = False, now_ns
                return []
            case GuardianAnswered():
                self.guardian_ok = True
                return slots.observe(event.slots, now_ns)
            case TaskExited():
                return slots.exited(event.slot, event.token, event.exit, empty=event.empty)
            case TaskProgressed():
                return slots.progressed(event.slot, event.token, event.progress, now_ns)
            case TaskCalled():
                nonce = "" if self._incarnation is None else self._incarnation.guardian_nonce
                slot = slots.get(event.slot)
                return self._ledger.called(event, slot, now_ns, nonce=nonce, online=self.welcomed)
            case PrepareDone():
                return slots.prepare_done(event.slot, event.token, event.port, now_ns)
            case PrepareFailed():
                return slots.prepare_failed(event.slot, event.token, event.failure, event.detail)
            case ShardRead():
                return slots.shard_read(event.slot, event.token, event.read_bytes)
            case ShardVerified():
                return slots.shard_verified(event.slot, event.token, now_ns)
            case StartDone():
                return slots.started(event)
            case StartFailed():
                return slots.start_failed(event.slot, event.token, event.detail, retry=event.retry)
            case StopFailed():
                return slots.absent(event.slot, event.token)
            case ReleaseDone():
                return slots.released(event.slot, event.token)
            case ReleaseFailed():
                return slots.release_failed(event.slot, event.token, now_ns)
            case DirectoryMade():
                return self._ledger.directory_made(event.call_id)
            case DirectoryFailed():
                return self._ledger.directory_failed(event, now_ns, online=self.welcomed)
            case FilesDropped():
                return [SendDropDone(DropDone(event.job, event.checkpoint))] if self.welcomed else []
            case InventoryRead():
                slots.devices = {device.key: device for device in event.inventory.devices}
                return []
            case ReadingsTaken():
                self._readings = event.readings
                return []
            case ShutdownRequested():
                return slots.stop_all(event.grace_ms, StopReason.DRAIN)

    # -- the controller

    def _connected(self, now_ns: int) -> list[Instruction]:
        if self._incarnation is None:
            return [NewSession()]  # no identity yet: the shell connects too early
        self.connected, self.welcomed, self._foreign = True, False, False
        self._beats.heard_ns = now_ns  # the spells of silence go on growing until an acknowledgement comes
        self._told_gone = tuple(self.slots.gone)
        hello = Hello(
            incarnation=self._incarnation,
            facts=self._facts,
            fencing=self._fencing,
            beat=replace(self._beat(now_ns), readings=()),
            leader_epoch_seen=self.leader.seen,
            gone_slots=self._told_gone,
        )
        return [SendHello(hello)]

    def _order(self, event: OrderReceived, now_ns: int) -> list[Instruction]:
        order = event.order
        if isinstance(order, Welcome):
            return self._welcome(order, event.leader_epoch, now_ns)
        if self._foreign:
            self.counters["foreign_cluster"] += 1
            return []
        admission = self.leader.admit(event.leader_epoch)
        if admission is Admission.REFUSED:
            self.counters["stale_leader"] += 1
            return []
        return self._admitted(admission) + self._follow(order, now_ns)

    def _admitted(self, admission: Admission) -> list[Instruction]:
        if admission is Admission.CURRENT:
            return []
        found: list[Instruction] = [SaveLeader(self.leader.seen, self._cluster_uid)]
        if admission is Admission.NEW_HISTORY:
            found += self._stop_older_history()
        return found

    def _stop_older_history(self) -> list[Instruction]:
        return self.slots.stop_all(0, StopReason.HISTORY_CHANGED, before_history=self.leader.seen.history)

    def _welcome(self, order: Welcome, leader_epoch: Epoch, now_ns: int) -> list[Instruction]:
        """Epochs compare within one cluster only. Another one is joined when nothing of the former is left here."""
        if self._cluster_uid and order.cluster_uid != self._cluster_uid:
            if any(not slot.ended for slot in self.slots.all()):
                self._foreign = True
                self.counters["foreign_cluster"] += 1
                return []
            self.leader.adopt(NO_EPOCH)
        moved = order.cluster_uid != self._cluster_uid
        admission = self.leader.admit(leader_epoch)
        if admission is Admission.REFUSED:
            self.counters["stale_leader"] += 1
            return []
        self._cluster_uid = order.cluster_uid
        found = self._admitted(admission)
        if moved and not found:
            found = [SaveLeader(self.leader.seen, self._cluster_uid)]
        self.welcomed = True
        self._beats.set_interval(order.renew_interval_ms)
        return found + self._let_go() + self._ledger.resend(now_ns, all_of_them=True)

    def _let_go(self) -> list[Instruction]:
        """The hello is committed before it is answered, so what it told of as gone needs no guardian any more.

        The controller cannot order this: it may have forgotten the generation, and with it the token.
        """
        gone = self.slots.gone
        return [GuardianRelease(slot, gone[slot]) for slot in self._told_gone if slot in gone]

    def _follow(self, order: Order, now_ns: int) -> list[Instruction]:
        match order:
            case BeatAck():
                self._beats.heard(now_ns)
                return self.slots.extend(now_ns) if self.lease.acknowledged(order.seq) else []
            case TaskReply():
                return self._ledger.replied(order, self.slots.get(order.slot))
            case DropCheckpoint():
                place = self.slots.place(order.directory, order.job, order.checkpoint)
                return [DropFiles(order.job, order.checkpoint, place)]
            case SessionRefused():
                self.counters["session_refused"] += 1
                return []  # never a reason to stop anything: a stop is an order of its own
            case Welcome():
                return []  # taken before, in `_welcome`
            case Prepare() | Go() if order.token.epoch.history < self.leader.seen.history:
                self.counters["stale_token"] += 1
                return []
            case _:
                return self.slots.order(order)

    # -- the guardian

    def _guardian_hello(self, event: GuardianHello, now_ns: int) -> list[Instruction]:
        incarnation = Incarnation(self._node_uid, event.boot_id, event.nonce)
        first, same = self._incarnation is None, self._incarnation == incarnation
        self._incarnation, self._fencing = incarnation, event.fencing
        self.guardian_ok = True
        records = {record.slot: record for record in event.records}
        if same:
            return self.slots.resume(event.slots, records, now_ns)
        self._ledger.clear()
        self.lease.reset()
        found = self.slots.restart(event.slots, event.leftovers, records)
        known = {slot.id for slot in self.slots.all()}
        found += [Forget(slot) for slot in sorted(records) if slot not in known]
        if not first and self.connected:
            found.append(NewSession())
        return found + self._stop_older_history()

    def _replace_guardian(self, now_ns: int) -> list[Instruction]:
        """One that hangs for good must not cost the node. Past every deadline nobody is harmed by its end."""
        if self._incarnation is None or self._silent_since_ns + GUARDIAN_HANGS_NS > now_ns:
            return []
        if any(slot.leased and slot.deadline_ns + GUARDIAN_HANGS_NS > now_ns for slot in self.slots.all()):
            return []
        self._silent_since_ns = now_ns
        return [ReplaceGuardian()]

    # -- beats

    def _tick(self, now_ns: int) -> list[Instruction]:
        if not self.connected:
            return []
        if self._beats.unanswered(now_ns):
            self.counters["unanswered"] += 1
            return [Redial()]
        return self._ledger.resend(now_ns) if self.welcomed else []

    def _beat_if_due(self, now_ns: int) -> list[Instruction]:
        if not self.connected or self._beats.due_ns(changed=self.slots.changed) > now_ns:
            return []
        return [SendBeat(self._beat(now_ns))]

    def _beat(self, now_ns: int) -> Beat:
        seq = self._beats.next(now_ns)
        self.lease.sent(seq, now_ns, renews=self.guardian_ok)
        self.slots.changed = False
        statuses, readings = fitted(self.slots.statuses(now_ns), self._readings)
        self._readings = ()
        return Beat(seq, statuses, readings, self.guardian_ok)
