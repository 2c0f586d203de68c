"""A world around the agent's core for Hypothesis: a guardian in a few lines, connections that lose what is on them.

The guardian here is a second, obvious implementation of the protocol: no launchers, no namespaces, only who holds what
until when.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from noded.core import events as e
from noded.core import instructions as i
from noded.core import messages as m
from noded.core.agent import AgentCore
from noded.core.slots import token_order
from virialpb.ids import NO_EPOCH, Epoch, NodeUid, SlotId, Token
from virialpb.lease import lease_length_ns
from virialpb.reasons import ExitReason, PrepareFailure

SECOND = 1_000_000_000
FENCE_AFTER_MS = 10_000
FACTS = m.NodeFacts("n1", "10.0.0.1", 8000, 1 << 30)


@dataclass
class Held:
    slot: SlotId
    token: Token
    rank: int | None
    deadline_ns: int
    state: e.GuardianState = e.GuardianState.PREPARED
    exit: m.TaskExit | None = None
    starts: int = 0

    @property
    def live(self) -> bool:
        return self.state is not e.GuardianState.EXITED

    def shown(self) -> e.GuardianSlot:
        pid = 100 if self.starts else 0
        return e.GuardianSlot(
            self.slot, self.token, self.rank, self.state, self.deadline_ns, pid=pid, init_pid=pid, exit=self.exit
        )


class Guardian:
    """Laws that it asserts about what it is asked are the agent's duties."""

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self.held: dict[SlotId, Held] = {}
        self.released: set[tuple[SlotId, Token]] = set()

    def serve(self, order: i.GuardianInstruction, now_ns: int) -> list[e.Event]:
        match order:
            case i.GuardianPrepare():
                return self._prepare(order, now_ns)
            case i.GuardianStart(slot, token):
                return self._start(slot, token, now_ns)
            case i.GuardianExtend(deadlines):
                for slot, deadline_ns in deadlines:
                    held = self.held.get(slot)
                    if held is not None and held.live and held.deadline_ns > now_ns:
                        held.deadline_ns = max(held.deadline_ns, deadline_ns)
                return []
            case i.GuardianStop(slot, token):
                held = self.held.get(slot)
                if held is None or held.token != token:
                    return [e.StopFailed(slot, token)]
                if held.state is e.GuardianState.RUNNING:
                    held.state = e.GuardianState.STOPPING  # it takes its time
                    return []
                return self.end(held, ExitReason.STOPPED) if held.state is e.GuardianState.PREPARED else []
            case i.GuardianRelease(slot, token):
                held = self.held.get(slot)
                if held is not None and held.state not in (e.GuardianState.EXITED, e.GuardianState.PREPARED):
                    return [e.ReleaseFailed(slot, token)]
                self.held.pop(slot, None)
                self.released.add((slot, token))
                return [e.ReleaseDone(slot, token)]
            case _:
                return []

    def _prepare(self, order: i.GuardianPrepare, now_ns: int) -> list[e.Event]:
        assert (order.slot, order.token) not in self.released, "a released slot was prepared again"
        held = self.held.get(order.slot)
        if held is not None and held.token == order.token:
            done = e.PrepareDone(order.slot, order.token)
            return [done] if held.live else [e.PrepareFailed(order.slot, order.token, PrepareFailure.DEVICE_BUSY)]
        others = [one for one in self.held.values() if one.token.job == order.token.job and one.token != order.token]
        assert not any(one.live for one in others), "two generations of a job on one node"
        if order.deadline_ns <= now_ns:
            return [e.PrepareFailed(order.slot, order.token, PrepareFailure.DEADLINE_PASSED)]
        self.held[order.slot] = Held(order.slot, order.token, order.rank, order.deadline_ns)
        return [e.PrepareDone(order.slot, order.token)]

    def _start(self, slot: SlotId, token: Token, now_ns: int) -> list[e.Event]:
        held = self.held.get(slot)
        assert held is None or held.rank is not None, "a spare was started"
        if held is None or held.token != token or not held.live or held.deadline_ns <= now_ns:
            return [e.StartFailed(slot, token, "gone")]
        if held.state is e.GuardianState.PREPARED:
            held.state = e.GuardianState.RUNNING
            held.starts += 1
        return [e.StartDone(slot, token, 100, 100, 1)]

    def end(self, held: Held, reason: ExitReason) -> list[e.Event]:
        if not held.live:
            return []
        held.state = e.GuardianState.EXITED
        held.exit = m.TaskExit(reason)
        return [e.TaskExited(held.slot, held.token, held.exit)]

    def reap(self) -> list[e.Event]:
        """Graces run out."""
        stopping = [held for held in self.held.values() if held.state is e.GuardianState.STOPPING]
        return [event for held in stopping for event in self.end(held, ExitReason.STOPPED)]

    def expire(self, now_ns: int) -> list[e.Event]:
        late = [held for held in self.held.values() if held.live and held.deadline_ns <= now_ns]
        return [event for held in late for event in self.end(held, ExitReason.LEASE_EXPIRED)]


class World:
    """One node. Messages to the guardian and back wait in queues until `step`; a broken connection loses them."""

    def __init__(self) -> None:
        self.now_ns = 1000 * SECOND
        self.lives = 1
        self.guardian = Guardian("g1")
        self.leftovers: tuple[e.GuardianSlot, ...] = ()
        self.records: dict[SlotId, m.SlotRecord] = {}
        self.saved: tuple[Epoch, str] = (NO_EPOCH, "")
        self.to_guardian: deque[i.GuardianInstruction] = deque()
        self.from_guardian: deque[e.Event] = deque()
        self.sent_ns: dict[int, int] = {}
        self.acked_ns = -1
        self.last_seq = 0
        self.told: dict[SlotId, m.SlotStatus] = {}
        self.agent = self._new_agent()
        self.meet()

    def _new_agent(self) -> AgentCore:
        return AgentCore(NodeUid("u1"), FACTS, local_tier="/d", leader_epoch=self.saved[0], cluster_uid=self.saved[1])

    # -- what may happen

    def tell(self, event: e.Event) -> None:
        """Let the agent see an event, and take what it asks for."""
        for instruction in self.agent.handle(event, self.now_ns):
            match instruction:
                case i.SendHello(hello):
                    self._beat(hello.beat)
                case i.SendBeat(beat):
                    self._beat(beat)
                case i.Remember(record):
                    self.records[record.slot] = record
                case i.Forget(slot):
                    self.records.pop(slot, None)
                case i.SaveLeader(epoch, uid):
                    assert epoch >= self.saved[0], "the leader epoch fell"
                    self.saved = (epoch, uid)
                case (
                    i.GuardianPrepare()
                    | i.GuardianStart()
                    | i.GuardianExtend()
                    | i.GuardianStop()
                    | i.GuardianRelease()
                    | i.GuardianReply()
                    | i.GuardianPush()
                ):
                    self._check_deadlines(instruction)
                    self.to_guardian.append(instruction)
                case _:
                    pass

    def advance(self, ns: int) -> None:
        self.now_ns += ns
        self.from_guardian.extend(self.guardian.expire(self.now_ns))

    def graces_run_out(self) -> None:
        self.from_guardian.extend(self.guardian.reap())

    def step(self, requests: int, answers: int) -> None:
        """The guardian serves so many requests, then the agent hears so many of its words."""
        for _ in range(min(requests, len(self.to_guardian))):
            self.from_guardian.extend(self.guardian.serve(self.to_guardian.popleft(), self.now_ns))
        for _ in range(min(answers, len(self.from_guardian))):
            self.tell(self.from_guardian.popleft())

    def settle(self) -> None:
        while self.to_guardian or self.from_guardian:
            self.step(1, len(self.from_guardian))

    def break_guardian_connection(self) -> None:
        self.to_guardian.clear()
        self.from_guardian.clear()
        self.tell(e.GuardianLost())

    def meet(self) -> None:
        shown = tuple(held.shown() for held in self.guardian.held.values())
        records = tuple(self.records.values())
        self.tell(e.GuardianHello(self.guardian.nonce, "b1", "pidns", shown, self.leftovers, records))

    def restart_agent(self) -> None:
        # Nothing sent to its former life can reach it: streams end with the process. So it need not remember releases.
        self.guardian.released.clear()
        self.to_guardian.clear()
        self.from_guardian.clear()
        self.agent = self._new_agent()
        self.sent_ns.clear()
        self.last_seq = 0
        self.acked_ns = -1
        self.meet()
        self.tell(e.InventoryRead(m.Inventory()))

    def kill_guardian(self) -> None:
        """Its tasks die with it; the next one finds what they left."""
        exited = replace_all(self.guardian)
        self.lives += 1
        self.guardian = Guardian(f"g{self.lives}")
        self.leftovers = (*self.leftovers, *exited)
        self.to_guardian.clear()
        self.from_guardian.clear()
        self.tell(e.GuardianLost())
        self.sent_ns.clear()
        self.acked_ns = -1
        self.meet()

    def connect(self) -> None:
        self.tell(e.Disconnected())
        self.tell(e.Connected())

    def acknowledge(self, seq: int, leader: Epoch) -> None:
        valid = [at_ns for sent, at_ns in self.sent_ns.items() if sent <= seq <= self.last_seq]
        if leader >= self.agent.leader.seen and valid:
            self.acked_ns = max(self.acked_ns, valid[-1])
        self.tell(e.OrderReceived(leader, m.BeatAck(seq)))

    # -- laws

    def _beat(self, beat: m.Beat) -> None:
        assert beat.seq > self.last_seq, "a beat's number was used twice"
        self.last_seq = beat.seq
        if beat.guardian_ok:
            self.sent_ns[beat.seq] = self.now_ns
        self.told = {status.slot: status for status in beat.slots}

    def _check_deadlines(self, order: i.GuardianInstruction) -> None:
        """No deadline is later than what an acknowledged renewal of this incarnation, by its send time, allows."""
        match order:
            case i.GuardianPrepare(deadline_ns=deadline_ns):
                given = [deadline_ns]
            case i.GuardianExtend(deadlines):
                given = [deadline_ns for _, deadline_ns in deadlines]
            case _:
                return
        for deadline_ns in given:
            assert deadline_ns <= self.acked_ns + lease_length_ns(FENCE_AFTER_MS) or self._kept(order), order

    def _kept(self, order: i.GuardianInstruction) -> bool:
        """A prepare that is asked again after a lost connection keeps the deadline it was given first."""
        if not isinstance(order, i.GuardianPrepare):
            return False
        held = self.guardian.held.get(order.slot)
        return held is not None and held.token == order.token and order.deadline_ns <= held.deadline_ns


def replace_all(guardian: Guardian) -> tuple[e.GuardianSlot, ...]:
    """What a new guardian shows of a dead one's slots."""
    lost = m.TaskExit(ExitReason.GUARDIAN_LOST)
    return tuple(
        replace(held.shown(), state=e.GuardianState.EXITED, exit=held.exit or lost) for held in guardian.held.values()
    )


def newest_first(tokens: list[Token]) -> list[Token]:
    return sorted(tokens, key=token_order, reverse=True)
