"""What the leader knows and never stores: beats, slots as agents see them, readings, why jobs wait.

Mutable, one owner. Times are the leader's own BOOTTIME in ns; an agent's clock is never compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from controld.core.agent import Beat, Hello, Sample, SlotState, SlotStatus
from controld.core.ids import Incarnation, JobId, NodeUid, SlotId
from controld.health.phi import Arrivals
from controld.matching.port import Unplaced


@dataclass(slots=True)
class SessionView:
    """One node as THIS leader has heard it. `slots` is complete as of the last beat."""

    incarnation: Incarnation
    connected: bool = True
    last_receipt_ns: int | None = None
    # When this incarnation was first heard: leases of a former one are timed from here.
    since_ns: int = 0
    beat_seq: int = 0
    slots: dict[SlotId, SlotStatus] = field(default_factory=dict[SlotId, SlotStatus])
    readings: tuple[Sample, ...] = ()
    # A beat brings readings only after a sweep: their ages are of that beat.
    readings_ns: int = 0
    reported: bool = False
    guardian_ok: bool = True
    # Of slots whose shard is being read: how far that is, and since when.
    prepared: dict[SlotId, tuple[int, int]] = field(default_factory=dict[SlotId, tuple[int, int]])
    arrivals: Arrivals = field(default_factory=Arrivals)
    # When an order was last given on this stream, so that a level-triggered tick does not repeat it at once.
    sent_ns: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class Refusals:
    """How often a node failed to get ready for a job, and until when it is left out."""

    count: int = 0
    until_ns: int = 0


@dataclass(frozen=True, slots=True)
class Sighting:
    """A node as commits showed it to a replica that did not lead: since when this life of it is the present one, and
    since when that is SUSPECT (None: it is not)."""

    incarnation: Incarnation
    since_ns: int
    suspect_since_ns: int | None = None


@dataclass(slots=True)
class View:
    """`sighted` is what this leader saw happen before it took over. Nothing was acknowledged to a node after that, so
    its silence has lasted since then: else each election would give a dead node another lease (C8).
    """

    started_ns: int = 0
    sighted: dict[NodeUid, Sighting] = field(default_factory=dict[NodeUid, Sighting])
    sessions: dict[NodeUid, SessionView] = field(default_factory=dict[NodeUid, SessionView])
    explain: dict[JobId, Unplaced] = field(default_factory=dict[JobId, Unplaced])
    refusals: dict[tuple[JobId, NodeUid], Refusals] = field(default_factory=dict[tuple[JobId, NodeUid], Refusals])
    # When something was first seen in its present condition: (what, ...) -> BOOTTIME.
    since_ns: dict[tuple[str, ...], int] = field(default_factory=dict[tuple[str, ...], int])

    def hello(self, hello: Hello, now_ns: int) -> None:
        """A stream opened. A hello is a renewal; the same incarnation keeps what was known of it."""
        uid = hello.incarnation.node_uid
        known = self.sessions.get(uid)
        if known is None or known.incarnation != hello.incarnation:
            known = SessionView(hello.incarnation, since_ns=now_ns)
            self.sessions[uid] = known
        known.connected = True
        # Orders given on a former stream may be lost with it.
        known.sent_ns.clear()
        self.beat(uid, hello.beat, now_ns)

    def beat(self, uid: NodeUid, beat: Beat, now_ns: int) -> None:
        session = self.sessions.get(uid)
        if session is None:
            return
        if session.last_receipt_ns is not None and beat.seq > session.beat_seq:
            session.arrivals.add(now_ns - session.last_receipt_ns)
        session.last_receipt_ns = now_ns
        session.beat_seq = max(session.beat_seq, beat.seq)
        session.slots = {s.slot: s for s in beat.slots}
        session.prepared = {
            s.slot: known if (known := session.prepared.get(s.slot)) and known[0] == s.prepared_bytes else read
            for s in beat.slots
            if s.state is SlotState.PREPARING and (read := (s.prepared_bytes, now_ns))[0]
        }
        if beat.readings:
            session.readings = beat.readings
            session.readings_ns = now_ns
        session.guardian_ok = beat.guardian_ok

    def disconnected(self, uid: NodeUid) -> None:
        """A broken stream is no suspicion: only missing beats are."""
        session = self.sessions.get(uid)
        if session is not None:
            session.connected = False

    def mark_reported(self, uid: NodeUid) -> None:
        session = self.sessions.get(uid)
        if session is not None:
            session.reported = True

    def rearm(self, now_ns: int) -> None:
        """The leader itself stalled: beats may wait unread, so every session is timed anew. None counts as heard."""
        self.started_ns = now_ns
        self.sighted.clear()

    def silent_ns(self, uid: NodeUid, now_ns: int) -> int:
        """Time since the last renewal this leader received, but no longer than since its takeover or last stall; of a
        node that it saw SUSPECT before, since then."""
        session = self.sessions.get(uid)
        heard_ns = None if session is None else session.last_receipt_ns
        seen = self.sighted.get(uid)
        since_ns = seen.suspect_since_ns if seen is not None else None
        base_ns = self.started_ns if since_ns is None else since_ns
        return now_ns - max(base_ns, base_ns if heard_ns is None else heard_ns)

    def life_since_ns(self, incarnation: Incarnation) -> int:
        """Since when nothing was acknowledged to any former life of this node, as far as this leader knows."""
        seen = self.sighted.get(incarnation.node_uid)
        if seen is not None and seen.incarnation == incarnation:
            return seen.since_ns
        session = self.sessions.get(incarnation.node_uid)
        if session is None:
            return self.started_ns
        # A session of another life was acknowledged up to its last beat.
        known_ns = session.since_ns if session.incarnation == incarnation else session.last_receipt_ns
        return max(self.started_ns, known_ns or 0)

    def reads_nothing_ns(self, uid: NodeUid, slot: SlotId) -> int:
        """For how long a node has told of the same byte of the shard that it reads; 0 when it tells of none."""
        session = self.sessions.get(uid)
        if session is None or session.last_receipt_ns is None or slot not in session.prepared:
            return 0
        return session.last_receipt_ns - session.prepared[slot][1]

    def first_seen(self, now_ns: int, *what: str) -> int:
        """When `what` was first asked about. `what[1]` is its job: it is remembered until that has ended."""
        return self.since_ns.setdefault(what, now_ns)
