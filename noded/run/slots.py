"""The state machine of a node's slots: events in, actions out. Pure: `now` is an argument, nothing is touched.

    PREPARING -> PREPARED -> STARTING -> RUNNING -> STOPPING -> EXITED -> (forgotten)
                                                       `----> STUCK ----^

Duties of the driver (noded/run/service.py), in this order:
1. Call `tick(now)` before anything else is served, at least every 100 ms.
2. Carry out the actions of one call in order, before the next call.
3. After Kill, look at the slot at least every 100 ms, kill again whatever is there, and call `emptied` once nothing is.
4. Call `ended` as soon as the task's own exit is known, whether or not anything asked for it.

Laws (tests/property/test_guardian_slots.py): a passed deadline is never moved; a device key has at most one slot that
is not EXITED; a slot reaches EXITED only through `emptied`, or without ever having started; an older token of a job
is never
prepared or started once a newer one was seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

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

NS_PER_MS: Final = 1_000_000
STUCK_AFTER_NS: Final = 10_000 * NS_PER_MS
"""SIGKILL to empty took <= 30 ms on two loaded cores; ten seconds is a task the kernel does not let go of."""
JOBS_REMEMBERED_MAX: Final = 10_000
SPENT_REMEMBERED_MAX: Final = 10_000
SLOTS_MAX: Final = 192
"""As many as fit into one beat, with the longest names of jobs: a control message has at most 64 KiB."""


class Phase(StrEnum):
    PREPARING = "PREPARING"
    PREPARED = "PREPARED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    EXITED = "EXITED"
    STUCK = "STUCK"


_SHOWN: Final = {
    Phase.PREPARING: SlotState.PREPARED,
    Phase.PREPARED: SlotState.PREPARED,
    Phase.STARTING: SlotState.RUNNING,
    Phase.RUNNING: SlotState.RUNNING,
    Phase.STOPPING: SlotState.STOPPING,
    Phase.EXITED: SlotState.EXITED,
    Phase.STUCK: SlotState.STUCK,
}


@dataclass(frozen=True, slots=True)
class Refused:
    reason: Refusal
    message: str


# -- actions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserve:
    """Hold the port, make socket, logs and cgroup, check user, command and directory; then prepared/prepare_failed."""

    slot: str


@dataclass(frozen=True, slots=True)
class Launch:
    slot: str
    env_add: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SetDeadline:
    """Tell the slot's launcher, the second enforcer of the same deadline."""

    slot: str
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Terminate:
    slot: str


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL everything of the slot; from here on nothing the task says is believed (its connections are cut)."""

    slot: str


@dataclass(frozen=True, slots=True)
class Drop:
    """The slot holds no process any more: give back what Reserve took, except the held port and the logs."""

    slot: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Give back everything."""

    slot: str


@dataclass(frozen=True, slots=True)
class Persist:
    status: SlotStatus


@dataclass(frozen=True, slots=True)
class Announce:
    slot: str
    token: Token
    exit: Exit


Action = Reserve | Launch | SetDeadline | Terminate | Kill | Drop | Forget | Persist | Announce


# -- state -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the task itself ended. `failure` is set when it never ran."""

    code: int | None = None
    signal: int | None = None
    oom: bool = False
    failure: str | None = None
    stderr_tail: str = ""


@dataclass(frozen=True, slots=True)
class Slot:
    request: PrepareRequest
    phase: Phase
    deadline_ns: int
    port: int = 0
    started: Started | None = None
    ending: ExitReason | None = None
    """Why we end it; None while only the task itself may."""
    kill_at_ns: int | None = None
    killed_at_ns: int | None = None
    outcome: Outcome | None = None
    exit: Exit | None = None
    progress: Progress | None = None
    launched: bool = False
    leftover: bool = False

    @property
    def id(self) -> str:
        return self.request.slot

    @property
    def token(self) -> Token:
        return self.request.token

    @property
    def status(self) -> SlotStatus:
        started = self.started
        return SlotStatus(
            slot=self.id,
            token=self.token,
            rank=self.request.rank,
            state=_SHOWN[self.phase],
            deadline_ns=self.deadline_ns,
            device_keys=self.request.device_keys,
            pid=started.pid if started else None,
            init_pid=started.init_pid if started else None,
            start_ticks=started.start_ticks if started else None,
            port=self.port,
            exit=self.exit,
            progress=self.progress,
        )


_UNSTARTED: Final = (Phase.PREPARING, Phase.PREPARED)
_ALIVE: Final = (Phase.STARTING, Phase.RUNNING, Phase.STOPPING)


class SlotTable:
    """All slots of one guardian. `root_needs_user`: refuse a task without a user (the guardian is root)."""

    def __init__(self, *, root_needs_user: bool = False) -> None:
        self._root_needs_user = root_needs_user
        self._slots: dict[str, Slot] = {}
        self._newest: dict[str, Token] = {}
        self._spent: dict[tuple[str, Token], None] = {}

    # -- reading

    def get(self, slot: str) -> Slot | None:
        return self._slots.get(slot)

    def all(self) -> tuple[Slot, ...]:
        return tuple(self._slots.values())

    def live(self) -> tuple[Slot, ...]:
        """Slots that hold their devices: every phase but EXITED."""
        return tuple(slot for slot in self._slots.values() if slot.phase is not Phase.EXITED)

    def next_wake_ns(self) -> int | None:
        """When tick next has something to do."""
        times = [time for slot in self.live() for time in (self._due_ns(slot),) if time is not None]
        return min(times, default=None)

    # -- requests of noded

    def prepare(self, request: PrepareRequest, now_ns: int) -> list[Action] | Refused:
        """An empty list: the same owner asked again, and it is reserved (or being reserved) already."""
        known = self._slots.get(request.slot)
        if known is not None:
            if known.token == request.token:
                return [] if known.phase is not Phase.EXITED else Refused(Refusal.ALREADY_ENDED, "the slot has ended")
            if request.token.order < known.token.order:
                return self._stale(request.slot, known.token)
            return Refused(Refusal.SLOT_EXISTS, f"{request.slot} is held under {known.token}; release that first")
        if request.deadline_ns <= now_ns:
            return Refused(Refusal.DEADLINE_PASSED, f"deadline_ns {request.deadline_ns} is not after {now_ns}")
        if (request.slot, request.token) in self._spent:
            return Refused(Refusal.ALREADY_ENDED, f"{request.slot} has run and was released under this token")
        newest = self._newest.get(request.token.job)
        if newest is not None and request.token.order < newest.order:
            return self._stale(request.slot, newest)
        if self._root_needs_user and request.spec.user is None:
            return Refused(Refusal.USER_REQUIRED, "the guardian runs as root: name a user, or --allow-root-tasks")
        if len(self._slots) >= SLOTS_MAX:
            return Refused(Refusal.OVERLOADED, f"{SLOTS_MAX} slots are here; release those that have ended")
        for slot in self.live():
            busy = sorted(set(slot.request.device_keys) & set(request.device_keys))
            if busy:
                return Refused(Refusal.DEVICE_BUSY, f"{', '.join(busy)} held by {slot.id} ({slot.phase})")
        self._see(request.token)
        slot = Slot(request, Phase.PREPARING, request.deadline_ns)
        return [self._put(slot), Reserve(slot.id)]

    def start(
        self, slot_id: str, token: Token, env_add: dict[str, str], now_ns: int
    ) -> list[Action] | Started | Refused:
        """Started: it runs already. A list that is empty: it is being started."""
        slot = self._owned(slot_id, token)
        if isinstance(slot, Refused):
            return slot
        if slot.phase is Phase.RUNNING and slot.started is not None:
            return slot.started
        if slot.phase is Phase.STARTING:
            return []
        if slot.phase is Phase.PREPARING:
            return Refused(Refusal.NOT_READY, f"{slot_id} is still being prepared")
        if slot.phase is not Phase.PREPARED:
            return Refused(Refusal.ALREADY_ENDED, f"{slot_id} is {slot.phase}")
        if slot.deadline_ns <= now_ns:
            return Refused(Refusal.DEADLINE_PASSED, f"{slot_id}: deadline_ns {slot.deadline_ns} has passed")
        newest = self._newest.get(token.job)
        if newest is not None and token.order < newest.order:
            return self._stale(slot_id, newest)
        persist = self._put(replace(slot, phase=Phase.STARTING, launched=True))
        return [
            SetDeadline(slot_id, slot.deadline_ns),
            Launch(slot_id, tuple(sorted(env_add.items()))),
            persist,
        ]

    def extend(self, deadlines: dict[str, int], now_ns: int) -> tuple[list[str], list[Action]]:
        """(refused, actions). A deadline that has passed is never moved, and none is ever moved back."""
        refused: list[str] = []
        actions: list[Action] = []
        for slot_id, deadline_ns in deadlines.items():
            slot = self._slots.get(slot_id)
            if slot is None or slot.phase in (Phase.EXITED, Phase.STUCK) or self._lost(slot, now_ns):
                refused.append(slot_id)
            elif deadline_ns > slot.deadline_ns:
                self._slots[slot_id] = replace(slot, deadline_ns=deadline_ns)
                actions.append(SetDeadline(slot_id, deadline_ns))
        return refused, actions

    def stop(self, slot_id: str, grace_ms: int, now_ns: int) -> list[Action] | Refused:
        """Idempotent; a second stop may shorten the grace of the first, not lengthen it."""
        slot = self._slots.get(slot_id)
        if slot is None:
            return Refused(Refusal.NOT_FOUND, f"{slot_id} is not known")
        if slot.phase in _UNSTARTED:
            return self._end_unstarted(slot, Outcome(), ExitReason.STOPPED, now_ns)
        if slot.phase not in _ALIVE or slot.killed_at_ns is not None or slot.outcome is not None:
            return []
        kill_at_ns = now_ns + grace_ms * NS_PER_MS
        if slot.kill_at_ns is not None:
            kill_at_ns = min(kill_at_ns, slot.kill_at_ns)
        first = slot.phase is not Phase.STOPPING
        stopping = replace(slot, phase=Phase.STOPPING, ending=ExitReason.STOPPED, kill_at_ns=kill_at_ns)
        if kill_at_ns <= now_ns:
            return self._kill(stopping, now_ns)
        persist = self._put(stopping)
        return [Terminate(slot_id), persist] if first else []

    def release(self, slot_id: str) -> list[Action] | Refused:
        slot = self._slots.get(slot_id)
        if slot is None:
            return []
        if slot.phase not in (*_UNSTARTED, Phase.EXITED):
            return Refused(Refusal.NOT_EMPTY, f"{slot_id} is {slot.phase}")
        del self._slots[slot_id]
        if slot.launched:
            # A prepare and start that were sent twice, the second late, must not run a rank again.
            self._spent[slot_id, slot.token] = None
            if len(self._spent) > SPENT_REMEMBERED_MAX:
                del self._spent[next(iter(self._spent))]
        return [Forget(slot_id), Persist(replace(slot.status, state=SlotState.RELEASED))]

    # -- what the driver saw

    def prepared(self, slot_id: str, port: int) -> list[Action]:
        slot = self._slots.get(slot_id)
        if slot is None or slot.phase is not Phase.PREPARING:
            return []
        return [self._put(replace(slot, phase=Phase.PREPARED, port=port))]

    def prepare_failed(self, slot_id: str) -> list[Action]:
        slot = self._slots.get(slot_id)
        if slot is None or slot.phase is not Phase.PREPARING:
            return []
        del self._slots[slot_id]
        return [Forget(slot_id), Persist(replace(slot.status, state=SlotState.RELEASED))]

    def started(self, slot_id: str, started: Started) -> list[Action]:
        slot = self._slots.get(slot_id)
        if slot is None or slot.started is not None:
            return []
        phase = Phase.RUNNING if slot.phase is Phase.STARTING else slot.phase
        slot = replace(slot, phase=phase, started=started)
        persist = self._put(slot)
        # A stop that came while the task was being started had no process to signal yet.
        late_stop = phase is Phase.STOPPING and slot.killed_at_ns is None
        return [Terminate(slot_id), persist] if late_stop else [persist]

    def progressed(self, slot_id: str, progress: Progress) -> list[Action]:
        slot = self._slots.get(slot_id)
        if slot is None or slot.phase not in (Phase.RUNNING, Phase.STOPPING):
            return []
        return [self._put(replace(slot, progress=progress))]

    def ended(self, slot_id: str, outcome: Outcome, now_ns: int) -> list[Action]:
        """The task's own process is gone, or its helper is. Whatever it left behind is killed now."""
        slot = self._slots.get(slot_id)
        if slot is None or slot.outcome is not None or slot.phase is Phase.EXITED:
            return []
        if slot.phase in _UNSTARTED:
            return self._end_unstarted(slot, outcome, ExitReason.START_FAILED, now_ns)
        return self._kill(replace(slot, outcome=outcome), now_ns)

    def emptied(self, slot_id: str, now_ns: int) -> list[Action]:
        """Nothing of the slot is left: proven by its namespace's init, its cgroup or a scan."""
        slot = self._slots.get(slot_id)
        if slot is None or slot.killed_at_ns is None or slot.phase is Phase.EXITED:
            return []
        end = self._exit(slot, now_ns, empty=True)
        persist = self._put(replace(slot, phase=Phase.EXITED, exit=end))
        return [Drop(slot_id), persist, Announce(slot_id, slot.token, end)]

    def adopt_leftover(self, status: SlotStatus, *, empty: bool, now_ns: int) -> list[Action]:
        """A slot of an earlier guardian. An exit proven then is kept as it was: noded never acknowledged it."""
        known = status.exit if status.exit is not None and status.exit.empty else None
        end = known or Exit(ExitReason.GUARDIAN_LOST, None, None, now_ns, "", empty)
        started = None
        if status.pid is not None and status.init_pid is not None and status.start_ticks is not None:
            started = Started(status.pid, status.init_pid, status.start_ticks)
        self._see(status.token)
        slot = Slot(
            request=_request_of(status),
            phase=Phase.EXITED if empty else Phase.STUCK,
            deadline_ns=status.deadline_ns,
            started=started,
            ending=end.reason,
            killed_at_ns=now_ns,
            exit=end,
            progress=status.progress,
            launched=started is not None,
            leftover=True,
        )
        return [self._put(slot)]

    def tick(self, now_ns: int) -> list[Action]:
        """Deadlines first, then graces that ran out, then what SIGKILL could not remove."""
        actions: list[Action] = []
        for slot in self.live():
            due_ns = self._due_ns(slot)
            if due_ns is None or due_ns > now_ns:
                continue
            if slot.killed_at_ns is not None:
                end = self._exit(slot, now_ns, empty=False)
                persist = self._put(replace(slot, phase=Phase.STUCK, exit=end))
                actions += [persist, Announce(slot.id, slot.token, end)]
            elif slot.phase in _UNSTARTED:
                actions += self._end_unstarted(slot, Outcome(), ExitReason.LEASE_EXPIRED, now_ns)
            elif slot.deadline_ns <= now_ns:
                actions += self._kill(replace(slot, ending=ExitReason.LEASE_EXPIRED), now_ns)
            else:
                actions += self._kill(slot, now_ns)
        return actions

    # -- helpers

    @staticmethod
    def _lost(slot: Slot, now_ns: int) -> bool:
        return slot.deadline_ns <= now_ns or slot.ending is ExitReason.LEASE_EXPIRED

    def _due_ns(self, slot: Slot) -> int | None:
        if slot.phase is Phase.STUCK:
            return None
        if slot.killed_at_ns is not None:
            return slot.killed_at_ns + STUCK_AFTER_NS
        return slot.deadline_ns if slot.kill_at_ns is None else min(slot.deadline_ns, slot.kill_at_ns)

    def _kill(self, slot: Slot, now_ns: int) -> list[Action]:
        if slot.killed_at_ns is not None:
            self._slots[slot.id] = slot
            return []
        persist = self._put(replace(slot, phase=Phase.STOPPING, killed_at_ns=now_ns))
        return [Kill(slot.id), persist]

    def _end_unstarted(self, slot: Slot, outcome: Outcome, reason: ExitReason, now_ns: int) -> list[Action]:
        end = Exit(reason, None, None, now_ns, outcome.failure or outcome.stderr_tail, empty=True)
        persist = self._put(replace(slot, phase=Phase.EXITED, outcome=outcome, ending=reason, exit=end))
        return [Drop(slot.id), persist, Announce(slot.id, slot.token, end)]

    def _exit(self, slot: Slot, now_ns: int, *, empty: bool) -> Exit:
        outcome = slot.outcome or Outcome()
        if slot.leftover and slot.exit is not None:
            return replace(slot.exit, empty=empty)
        if slot.ending is not None:
            reason = slot.ending
        elif outcome.failure is not None:
            reason = ExitReason.START_FAILED
        elif outcome.oom:
            reason = ExitReason.OOM
        elif outcome.signal is not None:
            reason = ExitReason.SIGNALED
        else:
            reason = ExitReason.EXITED
        tail = outcome.failure or outcome.stderr_tail
        return Exit(reason, outcome.code, outcome.signal, now_ns, tail, empty)

    def _put(self, slot: Slot) -> Persist:
        self._slots[slot.id] = slot
        return Persist(slot.status)

    def _owned(self, slot_id: str, token: Token) -> Slot | Refused:
        slot = self._slots.get(slot_id)
        if slot is None:
            return Refused(Refusal.NOT_FOUND, f"{slot_id} is not known")
        if slot.token != token:
            return self._stale(slot_id, slot.token)
        return slot

    def _see(self, token: Token) -> None:
        newest = self._newest.pop(token.job, token)
        self._newest[token.job] = max(newest, token, key=lambda candidate: candidate.order)
        if len(self._newest) > JOBS_REMEMBERED_MAX:
            busy = {slot.token.job for slot in self._slots.values()}
            oldest = next((job for job in self._newest if job not in busy), None)
            if oldest is not None:
                del self._newest[oldest]

    @staticmethod
    def _stale(slot_id: str, newest: Token) -> Refused:
        return Refused(
            Refusal.STALE_GENERATION,
            f"{slot_id}: job {newest.job} is at generation {newest.generation}, epoch {newest.epoch}",
        )


def _request_of(status: SlotStatus) -> PrepareRequest:
    return PrepareRequest(
        slot=status.slot,
        token=status.token,
        spec=TaskSpec((), {}),
        deadline_ns=status.deadline_ns,
        rank=status.rank,
        device_keys=status.device_keys,
    )
