"""What must be true of several controllers, judged from etcd's own log as it is committed, whoever believes what."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from controld.core.state import State
from controld.replica.election import Why
from controld.replica.errors import NotLeaderError
from controld.replica.hub import Cursor
from controld.replica.leader import Leader
from controld.replica.peers import Ping
from controld.store.etcd_keys import Keys, read_claim, read_head, read_history
from controld.store.port import Leadership, StoredChange
from tests.sim.etcd.raft import Result
from virialpb.etcd.v1 import etcd_pb2 as pb
from virialpb.ids import NO_EPOCH, Epoch

if TYPE_CHECKING:
    from tests.sim.replicas import SimReplica
    from tests.sim.several import SeveralWorld

SETTLED_S = 2.4
"""What has been so for as long cannot have been otherwise when a peer's answer that is still good was given."""
PING_GAP_S = 0.5
PROOF_MARGIN = 1.02
"""Clocks of hosts drift by less than one hundredth; and a timer is a little late."""
TABLES = ("cluster", "nodes", "jobs", "generations", "checkpoints", "requests", "events", "created")


@dataclass(slots=True)
class Reign:
    """One leadership, as the log has it. `before`: the token that it took the place of."""

    epoch: Epoch
    identity: str
    before: int
    last_commit: int
    seq: int = 0
    writer: str = ""
    # Its evidence was gone at some moment.
    lapsed: bool = False
    ended_s: float | None = None
    changes: dict[str, bytes | None] = field(default_factory=dict[str, "bytes | None"])


@dataclass(slots=True)
class Hearing:
    """Of one listener: pings of one leadership, without a gap since."""

    epoch: Epoch = NO_EPOCH
    since_s: float = 0.0
    last_s: float = 0.0


class Judge:
    def __init__(self, world: SeveralWorld) -> None:
        self._world = world
        self._keys = Keys("virial")
        self._revision = 1
        self._reigns: dict[int, Reign] = {}
        self._token = 0
        self._history = 0
        self._commits: dict[int, tuple[Epoch, int, dict[str, bytes | None]]] = {}
        self._last_commit = 0
        self._order: list[int] = []
        self._hearings: dict[str, Hearing] = {}

    def _accuse(self, checker: str, text: str) -> None:
        self._world.checkers.accuse(checker, text)

    @property
    def _now_s(self) -> float:
        return self._world.loop.time()

    @property
    def reign(self) -> Reign | None:
        """Who leads, by the log."""
        return self._reigns.get(self._token)

    # -- the log

    def committed(self, request: Message, origin: str, result: Result) -> None:
        del request, result
        mvcc = self._world.raft.mvcc
        if mvcc.revision == self._revision:
            return
        self._revision = mvcc.revision
        head: bytes | None = None
        changes: list[StoredChange] = []
        for event in mvcc.events[self._revision]:
            key, gone = event.kv.key, event.type == pb.Event.DELETE
            if key.startswith(self._keys.records):
                changes.append(StoredChange(self._keys.name(key), None if gone else event.kv.value))
            elif key == self._keys.leader:
                self._take(None if gone else event.kv)
            elif key == self._keys.head and not gone:
                head = event.kv.value
            elif key == self._keys.history:
                self._history = read_history(event.kv.value)[0]
            elif key == self._keys.evidence and gone and self.reign is not None:
                self.reign.lapsed = True
        if changes:
            self._write(head, changes, origin)

    def _take(self, kv: pb.KeyValue | None) -> None:
        former = self.reign
        if former is not None and former.ended_s is None:
            former.ended_s = self._now_s
        before, self._token = self._token, 0
        if kv is not None:
            claim = read_claim(kv.value)
            self._token = kv.mod_revision
            epoch = Epoch(self._history, self._token)
            self._reigns[self._token] = Reign(epoch, claim.identity, before, self._last_commit)
            self._world.trace.note("reign", claim.identity, epoch)

    def _write(self, head: bytes | None, stored: list[StoredChange], origin: str) -> None:
        reign, revision = self.reign, self._revision
        changes = {change.key: change.value for change in stored}
        if head is None or reign is None:
            self._accuse("one_writer", f"revision {revision} is written by {origin} without a head or a leader")
        else:
            by, seq = read_head(head, self._token)
            self._world.checkers.written(by, reign.epoch)
            self._order.append(revision)
            self._commits[revision] = (by, seq, changes)
            if by == reign.epoch:
                self._judge_turn(reign, seq, changes, origin)
        self._last_commit = revision
        self._world.checkers.committed(revision, tuple(stored))

    def _judge_turn(self, reign: Reign, seq: int, changes: dict[str, bytes | None], origin: str) -> None:
        if seq != reign.seq + 1:
            self._accuse("one_writer", f"commit {seq} of {reign.epoch} comes after commit {reign.seq}")
        elif changes == reign.changes:
            self._accuse("one_writer", f"commits {seq - 1} and {seq} of {reign.epoch} are one and the same")
        if origin.partition(".")[0] != reign.identity or (reign.writer and origin != reign.writer):
            self._accuse(
                "one_writer", f"{origin} writes in {reign.epoch}, which {reign.writer or reign.identity} leads"
            )
        reign.seq, reign.changes, reign.writer = seq, changes, origin

    # -- what the store has promised

    def told_committed(
        self, leadership: Leadership, seq: int, revision: int, changes: tuple[StoredChange, ...]
    ) -> None:
        by, number, found = self._commits.get(revision, (NO_EPOCH, 0, {}))
        wanted = {change.key: change.value for change in changes}
        # Deleting what is not there leaves no trace.
        lost = [key for key, value in wanted.items() if found.get(key) != value]
        if (by, number) != (leadership.epoch, seq) or lost:
            self._accuse("acknowledged", f"commit {seq} of {leadership.epoch} is not what revision {revision} holds")

    def proved(self, leadership: Leadership, began_s: float) -> None:
        reign = self._reigns.get(leadership.token)
        if reign is None or (reign.ended_s is not None and reign.ended_s < began_s):
            self._accuse("barrier", f"{leadership.epoch} is proved by a barrier that began after its end")

    def took_over(self, leadership: Leadership, token: int) -> None:
        reign = self._reigns.get(leadership.token)
        if reign is None or reign.before != token:
            before = None if reign is None else reign.before
            self._accuse("takeover", f"{leadership.epoch} was to follow {token}, and follows {before}")

    # -- the election

    def takes_over(self, replica: SimReplica, token: int, why: str) -> None:
        """A healthy leader stays: it proves itself, and the third controller hears it."""
        reign = self.reign
        if reign is None or self._token != token:
            return
        leader = self._world.replica(reign.identity)
        if why == Why.NO_EVIDENCE and not reign.lapsed:
            self._accuse("deposed", f"{replica.name} deposes {leader.name} for lack of evidence that was always there")
        if why != Why.AGREED or not self._healthy(leader, reign):
            return
        third = next(r for r in self._world.controllers if r is not leader and r is not replica)
        hearing = self._hearings.get(third.name, Hearing())
        hears = (
            hearing.epoch == reign.epoch
            and self._now_s - hearing.last_s < PING_GAP_S
            and hearing.last_s - hearing.since_s > SETTLED_S
        )
        down = third.process is None or (not third.process.alive and self._now_s - third.died_s > SETTLED_S)
        if hears or down:
            state = "hears it" if hears else "is down"
            self._accuse(
                "deposed", f"{replica.name} deposes {leader.name}, which is well, although {third.name} {state}"
            )

    def _healthy(self, leader: SimReplica, reign: Reign) -> bool:
        """It has been leading, and never been without a fresh proof, for long enough."""
        process = leader.process
        proof_max_s = self._world.timings.proof_max_ns / 1e9
        return (
            process is not None
            and process.running
            and leader.leading
            and leader.leader is not None
            and leader.leader.epoch == reign.epoch
            and self._now_s - leader.proved_s < proof_max_s / 2
            and self._now_s - leader.stale_s > SETTLED_S
        )

    def pinged(self, replica: SimReplica, ping: Ping) -> None:
        """Sent: it says that its sender leads, as of a moment that is not long ago."""
        age_s = self._now_s - replica.shown_s
        most_s = self._world.timings.proof_max_ns / 1e9
        if age_s > most_s * PROOF_MARGIN:
            self._accuse("stale_ping", f"{replica.name} pings for {ping.epoch} on a proof that is {age_s:.3f} s old")

    def heard(self, listener: str, ping: Ping) -> None:
        now_s = self._now_s
        hearing = self._hearings.setdefault(listener, Hearing())
        if hearing.epoch != ping.epoch or now_s - hearing.last_s > PING_GAP_S:
            hearing.epoch, hearing.since_s = ping.epoch, now_s
        hearing.last_s = now_s

    def watched(self, who: str, controller: str, after: Cursor, found: list[int]) -> None:
        """A reader that had everything up to `after` was given these next."""
        last = max(found, default=after.revision)
        first = bisect_right(self._order, after.revision)
        due = self._order[first : bisect_right(self._order, last)]
        if found != due:
            missing = sorted(set(due) - set(found))
            self._accuse("watch", f"{controller} gives {who} {found} after {after.revision}; missing: {missing}")

    # -- copies

    def leads(self, replica: SimReplica, leader: Leader) -> None:
        """It decides from now on: on everything that was committed before it."""
        reign = self._reigns.get(leader.epoch.revision)
        state = leader.state
        if reign is None or state.revision < reign.last_commit:
            self._accuse("copy", f"{replica.name} leads at {leader.epoch} on a copy of revision {state.revision}")
        self._compare(replica.name, state, "copy")

    def compare_copies(self, *, at_the_end: bool = False) -> None:
        """Whoever has come as far as the log has the same."""
        for replica in self._world.controllers:
            if replica.process is None or not replica.process.running or replica.replica is None:
                continue
            try:
                state = replica.replica.state
            except NotLeaderError:
                if at_the_end:
                    self._accuse("standby", f"{replica.name} has no copy")
                continue
            self._compare(replica.name, state, "standby")
            if at_the_end and state.revision < self._last_commit:
                self._accuse("standby", f"{replica.name} is at {state.revision}, the log at {self._last_commit}")

    def _compare(self, name: str, state: State, checker: str) -> None:
        truth = self._world.checkers.state
        if state.revision < truth.revision:
            return
        for table in TABLES:
            if getattr(state, table) != getattr(truth, table):
                self._accuse(checker, f"the {table} of {name} at revision {state.revision} are not the log's")
