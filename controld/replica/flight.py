"""What the leader's own loops have asked for and not yet been answered: nothing is asked twice meanwhile.

A tick sees only what is committed, so until a command is decided and committed it would be wanted again by every
tick. One that was refused or failed is held back for a while: the next ticks want it just as much.
"""

from __future__ import annotations

from controld.core import commands as c
from controld.core.commands import Command

FlightKey = tuple[str, ...]


def flight_key(command: Command) -> FlightKey:
    """Equal for two commands of which one makes the other pointless, whatever else is in them."""
    kind = type(command).__name__
    match command:
        case c.SubmitJob() | c.CancelJob() | c.PlaceHold() | c.ReleaseHold() | c.DrainNode() | c.RemoveNode():
            return (kind, command.request_id)
        case c.AdmitNode() | c.ReportInventory() | c.MarkSuspect() | c.MarkLive() | c.MarkExpired():
            return (kind, *command.incarnation)
        case c.ExpireLeases():
            return (kind, *command.incarnation, *command.slots)
        case c.ReleaseMember():
            return (kind, command.job, str(command.generation), command.slot)
        case c.PrepareShard():
            return (kind, command.job, command.checkpoint, str(command.rank))
        case c.ReportBadShard():
            return (kind, command.job, command.checkpoint, str(command.generation), str(command.rank))
        case c.AbortCheckpoint() | c.ForgetCheckpoint():
            return (kind, command.job, command.checkpoint)
        case c.BeginCheckpoint():
            return (kind, command.job, str(command.generation), str(command.step))
        case c.CollectCheckpoints():
            return (kind, command.job, *command.checkpoints)
        case c.StartGeneration():
            return (kind, command.job, str(command.number))
        case c.CommitGo() | c.MarkActive() | c.MarkProgress() | c.StopGeneration() | c.EndGeneration():
            return (kind, command.job, str(command.generation))
        case c.CreateJoinToken():
            return (kind, command.secret_sha256)
        case c.UseJoinToken():
            return (kind, command.secret_sha256, command.key_sha256)
        case c.Prune():
            return (kind,)


class Flight:
    """The keys that are in flight, and those held back until a time (BOOTTIME, ns)."""

    def __init__(self, hold_back_ns: int) -> None:
        self._hold_back_ns = hold_back_ns
        self._flying: set[FlightKey] = set()
        self._held_until_ns: dict[FlightKey, int] = {}

    def take_off(self, key: FlightKey, now_ns: int) -> bool:
        """Whether the command may be queued now; if so it is in flight until `land`."""
        if key in self._flying or self._held_until_ns.get(key, 0) > now_ns:
            return False
        self._held_until_ns.pop(key, None)
        self._flying.add(key)
        return True

    def land(self, key: FlightKey, now_ns: int, *, carried_out: bool) -> None:
        self._flying.discard(key)
        if carried_out:
            return
        # Bounded by what was refused within one hold-back.
        for old in [k for k, until_ns in self._held_until_ns.items() if until_ns <= now_ns]:
            del self._held_until_ns[old]
        self._held_until_ns[key] = now_ns + self._hold_back_ns

    def __len__(self) -> int:
        return len(self._flying)
