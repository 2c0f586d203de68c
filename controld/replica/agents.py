"""Sessions of agents: who may have one, what their reports do, when their renewals are acknowledged.

A renewal is acknowledged only after a barrier that STARTED after its receipt, never while an expiry of that
incarnation is on its way, and only of a node that is committed LIVE: else the acknowledgements of a deposed leader
would outlive the expiry that its successor commits, and a device would have two holders.
"""

from __future__ import annotations

from collections.abc import Iterable

from controld.core.agent import Beat, BeatAck, DropDone, Hello, Order, OrderTo, Report, SlotStatus, TaskCall, Welcome
from controld.core.commands import ReportInventory
from controld.core.ids import Epoch, Incarnation, NodeUid
from controld.core.model import Inventory, Liveness
from controld.replica.admission import Admission
from controld.replica.calls import Calls
from controld.replica.clock import SECOND_NS
from controld.replica.drops import Drops
from controld.replica.errors import OverloadedError, SessionClosedError
from controld.replica.futures import ignore_outcome
from controld.replica.hub import CommittedBatch
from controld.replica.observe import LogName
from controld.replica.office import Office
from controld.replica.outbox import Outbox, OutboxFullError
from controld.replica.session import NodeSession
from controld.replica.standing import stands
from controld.replica.writer import Source
from controld.store.port import StoreError
from virialpb.reasons import Reason

_Renewals = dict[NodeUid, tuple[NodeSession, int]]


class Agents:
    def __init__(self, office: Office) -> None:
        self._office = office
        self._calls = Calls(office, self._put)
        self._drops = Drops()
        self._admission = Admission(office)
        self._sessions: dict[NodeUid, NodeSession] = {}
        # Renewals that no barrier has started for, and those the barrier under way will prove.
        self._received: _Renewals = {}
        self._proving: _Renewals = {}
        self._expiring: dict[Incarnation, int] = {}
        self._next_doubt_ns = 0

    async def open(self, hello: Hello) -> NodeSession:
        """Admit the node and begin its session. Raises SessionRefusedError, OverloadedError, StoreError."""
        office = self._office
        receipt_ns = office.clock.boottime_ns()
        uid = hello.incarnation.node_uid
        if self.newer(hello.beat.slots) or hello.leader_epoch_seen > office.epoch:
            await self._admission.refuse_newer(hello)
        async with self._admission.door(uid):
            self._admission.refuse_duplicate(hello, self._sessions.get(uid), receipt_ns)
            await self._admission.admit(hello)
            return self._begin(hello, receipt_ns)

    def _begin(self, hello: Hello, receipt_ns: int) -> NodeSession:
        office = self._office
        former = self._sessions.pop(hello.incarnation.node_uid, None)
        if former is not None:
            self._end(former, SessionClosedError(Reason.STALE, "replaced by a newer connection of this node"))
        settings = office.settings
        outbox = Outbox(
            orders_max=settings.session_orders_max,
            replies_max=settings.session_replies_max,
            stands=lambda order: stands(office.state, order),
        )
        session = NodeSession(hello.incarnation, outbox, self)
        self._sessions[session.uid] = session
        # The hello is a renewal, from when it came in. But beats of the former stream may have come after it, and been
        # acknowledged: neither this life's leases nor those of a former one may be timed from before them.
        seen = office.view.sessions.get(session.uid)
        if seen is not None and seen.last_receipt_ns is not None:
            receipt_ns = max(receipt_ns, seen.last_receipt_ns)
        office.view.hello(hello, receipt_ns)
        self._received[session.uid] = (session, hello.beat.seq)
        cluster = office.state.cluster
        outbox.put(Welcome(settings.renew_interval_ms, "" if cluster is None else cluster.uid))
        office.log(LogName.SESSION_OPENED, node=hello.name, uid=session.uid)
        office.wake()
        return session

    def receive(self, session: NodeSession, report: Report) -> None:
        match report:
            case Beat():
                self._receive_beat(session, report)
            case TaskCall():
                self._calls.take(session, report)
            case DropDone():
                self._receive_drop_done(session, report)
            case Hello():
                self._drop(session, SessionClosedError(Reason.INVALID_SPEC, "a second hello on one stream"))

    async def receive_inventory(self, session: NodeSession, inventory: Inventory) -> None:
        if session.closed:
            raise SessionClosedError(Reason.STALE, "the session is over; say hello first")
        await self._office.writer.offer(ReportInventory(session.incarnation, inventory), Source.AGENT)
        view = self._office.view
        seen = view.sessions.get(session.uid)
        if seen is not None and seen.incarnation == session.incarnation:
            view.mark_reported(session.uid)
            self._office.wake()

    def left(self, session: NodeSession) -> None:
        if not session.closed:
            self._drop(session, SessionClosedError(Reason.STALE, "the stream ended"))

    def deliver(self, orders: Iterable[OrderTo]) -> None:
        """Put orders where their agents take them; one for a node without a session is given again by a later tick."""
        for order in orders:
            session = self._sessions.get(order.node)
            if session is not None:
                self._put(session, order.order)

    def committed(self, batch: CommittedBatch) -> None:
        """Sessions of nodes that are gone or live another life are over; waits for checkpoints look again."""
        self._calls.committed(batch)
        nodes = self._office.state.nodes
        for change in batch.changes:
            kind, _, rest = change.key.partition("/")
            if kind == "checkpoints" and change.record is None:
                self._drops.forgotten(change.key)
            elif kind == "nodes" and (session := self._sessions.get(NodeUid(rest))) is not None:
                node = nodes.get(session.uid)
                if node is None or node.incarnation != session.incarnation:
                    self._drop(session, SessionClosedError(Reason.STALE, "this node lives another life by now"))

    def expiry_began(self, incarnation: Incarnation) -> None:
        self._expiring[incarnation] = self._expiring.get(incarnation, 0) + 1

    def expiry_ended(self, incarnation: Incarnation) -> None:
        self._expiring[incarnation] -= 1
        if not self._expiring[incarnation]:
            del self._expiring[incarnation]

    def newer(self, slots: Iterable[SlotStatus]) -> bool:
        """Whether any token was granted after what this leader knows: by another one, then."""
        state = self._office.state
        return any(s.token.epoch > Epoch(state.history, state.revision) for s in slots)

    def doubt(self, why: str) -> None:
        """Step down unless a barrier proves that this is the leader still. At most one proof a second."""
        now_ns = self._office.clock.boottime_ns()
        if now_ns >= self._next_doubt_ns:
            self._next_doubt_ns = now_ns + SECOND_NS
            self._office.crew.start(self._prove(why), "doubt")

    async def _prove(self, why: str) -> None:
        try:
            await self._admission.prove_or_lose(why)
        except StoreError:
            return  # the leadership is over, and whoever waits for that has been told

    def barrier_began(self) -> None:
        self._proving, self._received = self._received, {}

    def barrier_failed(self) -> None:
        self._received = self._proving | self._received
        self._proving = {}

    def barrier_proved(self) -> None:
        proved, self._proving = self._proving, {}
        for session, seq in proved.values():
            liveness = self._renewable(session)
            if liveness is Liveness.LIVE:
                self._put(session, BeatAck(seq))
            elif liveness is Liveness.SUSPECT and session.uid not in self._received:
                self._received[session.uid] = (session, seq)  # on its way back: LIVE by the next barrier

    def _renewable(self, session: NodeSession) -> Liveness | None:
        """What its node is for everyone; None where nothing may be acknowledged.

        SUSPECT is not enough: a next leader times a node from when it saw it SUSPECT, and an acknowledgement after
        that would outlive the expiry.
        """
        node = self._office.state.nodes.get(session.uid)
        if session.closed or session.incarnation in self._expiring:
            return None
        return node.liveness if node is not None and node.incarnation == session.incarnation else None

    def end(self, error: SessionClosedError) -> None:
        """The leadership is over: every agent looks for the next leader."""
        for session in tuple(self._sessions.values()):
            self._drop(session, error)

    def _receive_beat(self, session: NodeSession, beat: Beat) -> None:
        office = self._office
        seen = office.view.sessions.get(session.uid)
        node = office.state.nodes.get(session.uid)
        changed = (
            seen is None or seen.guardian_ok != beat.guardian_ok or _phases(seen.slots.values()) != _phases(beat.slots)
        )
        office.view.beat(session.uid, beat, office.clock.boottime_ns())
        _, former_seq = self._received.get(session.uid, (session, 0))
        self._received[session.uid] = (session, max(beat.seq, former_seq))
        # Most beats say nothing new: at one a second from each of thousands of nodes, these may wait for the next tick.
        if changed or node is None or node.liveness is not Liveness.LIVE:
            office.wake()

    def _receive_drop_done(self, session: NodeSession, report: DropDone) -> None:
        command = self._drops.done(self._office.state, session.uid, report)
        if command is not None:
            try:
                ignore_outcome(self._office.writer.offer(command, Source.AGENT))
            except (OverloadedError, StoreError):
                return  # the order to drop is given again, and so is this answer

    def _put(self, session: NodeSession, order: Order) -> None:
        try:
            session.outbox.put(order)
        except OutboxFullError:
            self._drop(session, SessionClosedError(Reason.OVERLOADED, "the agent does not read what it is told"))

    def _drop(self, session: NodeSession, error: SessionClosedError) -> None:
        """End a session that no other takes the place of."""
        if self._sessions.get(session.uid) is session:
            del self._sessions[session.uid]
            self._office.view.disconnected(session.uid)
        self._end(session, error)

    def _end(self, session: NodeSession, error: SessionClosedError) -> None:
        session.end(error)
        self._calls.left(session, error)
        self._office.log(LogName.SESSION_CLOSED, uid=session.uid, reason=error.reason, message=error.message)


def _phases(slots: Iterable[SlotStatus]) -> frozenset[tuple[object, ...]]:
    """What of slots makes the control loop act. A step that grows does not, the first one does."""
    return frozenset((s.slot, s.token, s.state, s.port, s.failure, s.progress_step >= 0) for s in slots)
