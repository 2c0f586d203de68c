"""One slot as the agent sees it: where it stands, and how it is shown to the controller.

    WAITING -> VERIFYING -> RESERVING -> READY -> STARTING -> RUNNING -> STOPPING -> EXITED -> RELEASING -> (forgotten)
       `----------`------------`--> FAILED                                   `----> STUCK

WAITING: something that passes is missing (the inventory, an acknowledged renewal, the end of an older generation).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from noded.core.events import GuardianSlot, GuardianState, Progress
from noded.core.messages import DeviceGrant, Prepare, SlotRecord, SlotState, SlotStatus, TaskExit
from virialpb.ids import SlotId, Token
from virialpb.lease import NS_PER_MS
from virialpb.reasons import ExitReason, PrepareFailure


class Phase(Enum):
    WAITING = auto()
    VERIFYING = auto()
    RESERVING = auto()
    READY = auto()
    FAILED = auto()
    STARTING = auto()
    RUNNING = auto()
    STOPPING = auto()
    EXITED = auto()
    RELEASING = auto()
    STUCK = auto()


_SHOWN: Final = {
    Phase.WAITING: SlotState.PREPARING,
    Phase.VERIFYING: SlotState.PREPARING,
    Phase.RESERVING: SlotState.PREPARING,
    Phase.READY: SlotState.READY,
    Phase.FAILED: SlotState.PREPARE_FAILED,
    Phase.STARTING: SlotState.READY,
    Phase.RUNNING: SlotState.RUNNING,
    Phase.STOPPING: SlotState.STOPPING,
    Phase.EXITED: SlotState.EXITED,
    Phase.RELEASING: SlotState.EXITED,
    Phase.STUCK: SlotState.STUCK,
}
_ADOPTED: Final = {
    GuardianState.PREPARED: Phase.READY,
    GuardianState.RUNNING: Phase.RUNNING,
    GuardianState.STOPPING: Phase.STOPPING,
    GuardianState.EXITED: Phase.EXITED,
    GuardianState.STUCK: Phase.STUCK,
}
_LEASED: Final = (Phase.READY, Phase.STARTING, Phase.RUNNING, Phase.STOPPING)
_ENDED: Final = (Phase.FAILED, Phase.EXITED, Phase.RELEASING)


@dataclass(slots=True)
class Slot:
    """`prepare` is None for a slot that a former life of this agent prepared."""

    record: SlotRecord
    phase: Phase
    prepare: Prepare | None = None
    deadline_ns: int = 0
    """The last one given to the guardian. Never moved once it has passed."""
    port: int = 0
    pid: int = 0
    init_pid: int = 0
    start_ticks: int = 0
    exit: TaskExit | None = None
    progress: Progress | None = None
    failure: PrepareFailure | None = None
    failure_detail: str = ""
    start_failure: str = ""
    prepared_bytes: int = 0
    """Of the shard that it is to start from: read and right so far."""
    in_guardian: bool = False
    """A prepare was sent, so the guardian may hold something until it confirms a release."""
    stop_grace_ms: int = 0
    stop_reason: str = ""
    may_live: bool = False
    """A start was asked for, so processes of it may exist until they are seen gone."""
    release_wanted: bool = False
    releases_failed: int = 0
    release_at_ns: int = field(default=0)

    @property
    def id(self) -> SlotId:
        return self.record.slot

    @property
    def token(self) -> Token:
        return self.record.token

    @property
    def leased(self) -> bool:
        """Reserved or running in the guardian, so that its deadline is to be extended."""
        return self.phase in _LEASED

    @property
    def holds(self) -> bool:
        """Its devices are taken: reserved, running, or not proven gone."""
        return self.leased or self.phase in (Phase.RESERVING, Phase.STUCK)

    @property
    def ended(self) -> bool:
        """Nothing of it runs or is reserved, and nothing more will come of it."""
        return self.phase in _ENDED

    def expired(self, now_ns: int) -> bool:
        """Its lease ran out: what the task still says must not count."""
        return self.leased and self.deadline_ns <= now_ns

    def status(self, now_ns: int) -> SlotStatus:
        progress = self.progress
        return SlotStatus(
            slot=self.id,
            token=self.token,
            # Whatever the guardian still has to tell: with its lease over, it does not run any more.
            state=SlotState.STOPPING if self.expired(now_ns) else _SHOWN[self.phase],
            port=self.port,
            exit=self.exit,
            progress_step=-1 if progress is None else progress.step,
            metrics=() if progress is None else progress.metrics,
            failure=self.failure,
            failure_detail=self.failure_detail,
            prepared_bytes=self.prepared_bytes if self.phase is Phase.VERIFYING else 0,
            progress_age_ms=0 if progress is None else max(0, now_ns - progress.at_ns) // NS_PER_MS,
        )


def record_of(order: Prepare) -> SlotRecord:
    """What is kept of a Prepare for a restarted agent."""
    return SlotRecord(
        slot=order.slot,
        token=order.token,
        rank=order.rank,
        fence_after_ms=order.fence_after_ms,
        cpu_millis=order.cpu_millis,
        devices=order.devices,
        user=order.task.user,
        group=order.task.group,
        restore=order.restore,
        cause_id=order.cause_id,
        user_env=tuple(sorted(name for name, _ in order.task.env)),
    )


def adopted(held: GuardianSlot, record: SlotRecord | None) -> Slot:
    """A slot that the guardian kept. Without a record of the same token its lease is never extended."""
    if record is None or record.token != held.token:
        devices = tuple(DeviceGrant(key) for key in held.device_keys)
        record = SlotRecord(held.slot, held.token, held.rank, fence_after_ms=0, devices=devices)
    return Slot(
        record,
        _ADOPTED[held.state],
        deadline_ns=held.deadline_ns,
        port=held.port,
        pid=held.pid,
        init_pid=held.init_pid,
        start_ticks=held.start_ticks,
        exit=held.exit,
        progress=held.progress,
        in_guardian=True,
        may_live=held.pid != 0,
    )


def token_order(token: Token) -> tuple[int, int, int]:
    """Newer is larger. History first: after a restore from backup a generation may go back, the counter never does."""
    return (token.epoch.history, token.generation, token.epoch.revision)


STOPPED: Final = TaskExit(ExitReason.STOPPED)
