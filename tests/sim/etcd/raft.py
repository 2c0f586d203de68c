"""What the members agree on: one log, a leader a term, and who has what of it when.

Not Raft's messages but what they come to: an entry is committed once a majority has it on disk and the leader knows;
a new leader has every committed entry, and of the others those that reached it; a reader is sure of nothing before the
leader has asked a majority. What is under way when a link or a member fails has arrived at some and not at others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from google.protobuf.message import Message

from controld.store.etcd_wire import WireError
from tests.sim.etcd.kv import Mvcc, no_space
from tests.sim.etcd.member import Member, unavailable
from tests.sim.fabric import Fabric, Port
from tests.sim.loop import SimLoop
from virialpb.etcd.v1 import etcd_pb2 as pb

ELECTION_S = (0.5, 1.0)
"""As our members are configured: heartbeats each 50 ms, an election after 500 ms."""
REVOKE_RETRY_S = 0.5
NEVER_S = float("inf")

Result = Message | WireError
Done = Callable[[Result], None]


@dataclass(eq=False, slots=True)
class Entry:
    """`held_s`, `acked_s`: when a member has it on disk, and the leader knows. `revision`, `compacted`: after it."""

    request: Message
    origin: str
    proposer: Member
    done: Done | None
    held_s: dict[str, float] = field(default_factory=dict[str, float])
    acked_s: dict[str, float] = field(default_factory=dict[str, float])
    result: Result = field(default_factory=pb.TxnResponse)
    revision: int = 0
    compacted: int = 0


class Raft:
    """`on_commit(request, origin, result, mvcc)` is called at the moment an entry is committed, once ever."""

    def __init__(self, loop: SimLoop, rng: Random, fabric: Fabric, names: Iterable[str]) -> None:
        self.loop = loop
        self.mvcc = Mvcc()
        self.members = [Member(loop, rng, name, number, self.mvcc) for number, name in enumerate(names, start=1)]
        self.term = 0
        self.leader: Member | None = None
        self.elections = 0
        self.full: set[int] = set()
        self.on_commit: Callable[[Message, str, Result], None] = lambda request, origin, result: None
        self._rng = rng
        self._fabric = fabric
        self._committed: list[Entry] = []
        self._pending: list[Entry] = []
        self._due_s = NEVER_S
        self._electing = False
        self._lease_ends_s: dict[int, tuple[float, float]] = {}
        fabric.changed.append(self.changed)
        self._become_leader(rng.choice(self.members))

    @property
    def quorum(self) -> int:
        return len(self.members) // 2 + 1

    def member(self, name: str) -> Member:
        return next(member for member in self.members if member.name == name)

    def contact(self, one: Member, other: Member) -> bool:
        """Bytes pass between two running members, both ways."""
        if one is other:
            return one.running
        cut = self._fabric.is_cut
        there, back = (one.name, other.name, Port.RAFT), (other.name, one.name, Port.RAFT)
        return one.running and other.running and not cut(there) and not cut(back)

    def leads(self, member: Member) -> bool:
        """Whether a majority follows it at this moment."""
        return self.leader is member and sum(self.contact(member, one) for one in self.members) >= self.quorum

    # -- writing

    def propose(self, member: Member, request: Message, origin: str, done: Done) -> None:
        """`done` is called at `member` once it has applied the entry; never where it is lost."""
        leader = member.leader
        if leader is not None:
            delay_s = 0.0 if leader is member else self._fabric.delay_s(member.name, leader.name)
            self.loop.after(delay_s, self._append, member, leader, self.term, request, origin, done)

    def _append(self, member: Member, leader: Member, term: int, request: Message, origin: str, done: Done) -> None:
        if self.leader is not leader or self.term != term or not self.contact(member, leader):
            return
        entry = Entry(request, origin, member, done)
        self._pending.append(entry)
        self._replicate(entry)

    def _replicate(self, entry: Entry) -> None:
        """Send it to every member that can be reached and has not got it."""
        leader, now_s = self.leader, self.loop.time()
        assert leader is not None
        for member in self.members:
            if not self.contact(leader, member):
                continue
            back_s = 0.0 if member is leader else self._fabric.delay_s(member.name, leader.name)
            if entry.held_s.get(member.name, NEVER_S) > now_s:
                there_s = 0.0 if member is leader else self._fabric.delay_s(leader.name, member.name)
                entry.held_s[member.name] = now_s + there_s + member.fsync_s()
            if entry.acked_s.get(member.name, NEVER_S) > now_s:
                entry.acked_s[member.name] = max(now_s, entry.held_s[member.name]) + back_s
        self._schedule()

    def _schedule(self) -> None:
        """Look again when the first pending entry may be committed."""
        if not self._pending:
            return
        acks = sorted(self._pending[0].acked_s.values())
        if len(acks) >= self.quorum and acks[self.quorum - 1] < self._due_s:
            self._due_s = max(acks[self.quorum - 1], self.loop.time())
            self.loop.after(self._due_s - self.loop.time(), self._look)

    def _look(self) -> None:
        self._due_s = NEVER_S
        now_s, leader = self.loop.time(), self.leader
        while self._pending and leader is not None and self.leads(leader):
            entry = self._pending[0]
            if sum(at_s <= now_s + 1e-9 for at_s in entry.acked_s.values()) < self.quorum:
                break
            self._pending.pop(0)
            self._commit(entry, leader)
        self._schedule()

    def _commit(self, entry: Entry, leader: Member) -> None:
        self._committed.append(entry)
        try:
            entry.result = self._apply(entry.request)
        except WireError as error:
            entry.result = error
        entry.revision, entry.compacted = self.mvcc.revision, self.mvcc.compacted
        self.on_commit(entry.request, entry.origin, entry.result)
        index = len(self._committed)
        done, proposer, lives = entry.done, entry.proposer, entry.proposer.lives
        if done is not None and proposer.alive:
            entry.done = None
            proposer.when_applied(index, lambda: done(entry.result) if proposer.lives == lives else None)
        for member in self.members:
            if self.contact(leader, member):
                delay_s = 0.0 if member is leader else self._fabric.delay_s(leader.name, member.name)
                held_s = entry.held_s.get(member.name, NEVER_S)
                if held_s < NEVER_S:
                    self.loop.after(max(delay_s, held_s - self.loop.time()), self._advance, member, index)

    def _apply(self, request: Message) -> Message:
        """Raises WireError."""
        mvcc = self.mvcc
        match request:
            case pb.TxnRequest():
                return mvcc.apply_txn(request, full=bool(self.full))
            case pb.CompactionRequest():
                mvcc.apply_compaction(request.revision)
                return pb.CompactionResponse()
            case pb.LeaseGrantRequest():
                mvcc.apply_grant(request.ID, full=bool(self.full))
                self._lease_ends_s[request.ID] = (self.loop.time() + request.TTL, float(request.TTL))
                self.loop.after(request.TTL, self._lease_due, request.ID)
                return pb.LeaseGrantResponse(ID=request.ID, TTL=request.TTL)
            case pb.LeaseRevokeRequest():
                mvcc.apply_revoke(request.ID)
                self._lease_ends_s.pop(request.ID, None)
                return pb.LeaseRevokeResponse()
            case pb.AlarmRequest():
                return self._apply_alarm(request)
            case _:
                raise NotImplementedError(repr(request))

    def _apply_alarm(self, request: pb.AlarmRequest) -> pb.AlarmResponse:
        if request.action == pb.AlarmRequest.ACTIVATE:
            self.full.add(request.member_id)
        else:
            self.full.discard(request.member_id)
        return pb.AlarmResponse()

    def _advance(self, member: Member, index: int) -> None:
        """The leader has told it that everything up to `index` is committed."""
        leader = self.leader
        if leader is None or not self.contact(leader, member):
            return
        while member.applied < index:
            entry = self._committed[member.applied]
            member.advance(member.applied + 1, entry.revision, entry.compacted)

    # -- reading

    def confirm(self, member: Member, then: Callable[[WireError | None], None]) -> None:
        """Linearizable: `then(None)` once `member` has everything that was committed at some moment after this call.

        Where the leader cannot be sure that it is one, an error, or nothing ever.
        """
        leader = member.leader
        if leader is None:
            return
        other = self._fabric.delay_s
        wait_s = 0.0 if leader is member else other(member.name, leader.name) + other(leader.name, member.name)
        round_s = min(
            (other(leader.name, one.name) + other(one.name, leader.name) for one in self.members if one is not leader),
            default=0.0,
        )
        self.loop.after(wait_s + round_s, self._confirmed, member, leader, self.term, member.lives, then)

    def _confirmed(
        self, member: Member, leader: Member, term: int, lives: int, then: Callable[[WireError | None], None]
    ) -> None:
        if not member.alive or member.lives != lives:
            return
        if member.frozen:
            member.hear(lambda: self._confirmed(member, leader, term, lives, then))
        elif self.term == term and self.leads(leader) and self.contact(member, leader):
            member.when_applied(len(self._committed), lambda: then(None))
        elif self._rng.random() < 0.5:
            then(unavailable("etcdserver: leader changed"))

    # -- leases

    def renew(self, member: Member, lease: int) -> int | None:
        """The seconds it has; 0: there is none. None: nobody answers."""
        leader = member.leader
        if leader is None or not self.contact(member, leader):
            return None
        if self.mvcc.has_lease(lease) and self.leads(leader):
            _, ttl_s = self._lease_ends_s[lease]
            self._lease_ends_s[lease] = (self.loop.time() + ttl_s, ttl_s)
            return int(ttl_s)
        return 0 if self.leads(leader) else 1  # one that leads no more does not know

    def _lease_due(self, lease: int) -> None:
        if lease not in self._lease_ends_s:
            return
        now_s = self.loop.time()
        end_s, _ = self._lease_ends_s[lease]
        if end_s > now_s:
            self.loop.after(max(end_s - now_s, 0.001), self._lease_due, lease)
            return
        if self.leader is not None and self.leads(self.leader):
            self.propose(self.leader, pb.LeaseRevokeRequest(ID=lease), "", lambda _: None)
        self.loop.after(REVOKE_RETRY_S, self._lease_due, lease)

    # -- who leads

    def changed(self) -> None:
        """Members or links are others than a moment ago."""
        self._settle()
        leader, now_s = self.leader, self.loop.time()
        if leader is not None and self.leads(leader):
            for entry in self._pending:
                self._replicate(entry)
        elif not self._electing:
            self._electing = True
            self.loop.after(self._rng.uniform(*ELECTION_S), self._elect)
        for member in self.members:
            self._look_for_leader(member, now_s)

    def _settle(self) -> None:
        """What was under way to a member that cannot be reached any more has not arrived."""
        leader, now_s = self.leader, self.loop.time()
        for member in self.members:
            missing = self._committed[member.log_length :]
            missing += self._pending[max(0, member.log_length - len(self._committed)) :]
            for entry in missing:
                if entry.held_s.get(member.name, NEVER_S) > now_s:
                    break
                member.log_length += 1
            if leader is None or not self.contact(leader, member):
                for entry in missing:
                    if entry.held_s.get(member.name, NEVER_S) > now_s:
                        entry.held_s.pop(member.name, None)
                for entry in self._pending:
                    if entry.acked_s.get(member.name, NEVER_S) > now_s:
                        entry.acked_s.pop(member.name, None)

    def _look_for_leader(self, member: Member, now_s: float) -> None:
        if not member.running:
            return
        leader = self.leader
        if leader is not None and self.contact(leader, member) and (member is not leader or self.leads(leader)):
            member.leader = leader
            self._sync(leader, member)
        elif member.leader is not None:
            self.loop.after(self._rng.uniform(*ELECTION_S), self._lose_leader, member, self.term, member.lives)

    def _lose_leader(self, member: Member, term: int, lives: int) -> None:
        """Nothing was heard of it for an election's time; of a leader: no majority was."""
        leader = self.leader
        if member.leader is None or member.lives != lives or not member.running:
            return
        if leader is not None and self.contact(leader, member) and (member is not leader or self.leads(leader)):
            return
        member.leader = None
        member.leader_lost_s = self.loop.time()
        # Streams that asked for it end when there is none for long.
        self.loop.after(self._rng.uniform(*ELECTION_S) * 2, self._end_streams, member, lives)

    def _end_streams(self, member: Member, lives: int) -> None:
        if member.lives == lives and member.running and member.leader is None:
            member.watches.fail(unavailable("etcdserver: no leader"), only=lambda watch: watch.needs_leader)

    def _sync(self, leader: Member, member: Member) -> None:
        """Bring it up to what is committed."""
        index = len(self._committed)
        if member.applied < index:
            delay_s = self._fabric.delay_s(leader.name, member.name) + member.fsync_s()
            for entry in self._committed[member.log_length :]:
                entry.held_s[member.name] = min(entry.held_s.get(member.name, NEVER_S), self.loop.time() + delay_s)
            self.loop.after(delay_s, self._advance, member, index)

    def _elect(self) -> None:
        self._electing = False
        self._settle()
        if self.leader is not None and self.leads(self.leader):
            return
        able = [member for member in self.members if self._may_win(member)]
        if able:
            self._become_leader(self._rng.choice(able))
        else:
            self._electing = True
            self.loop.after(self._rng.uniform(*ELECTION_S) / 2, self._elect)

    def _may_win(self, one: Member) -> bool:
        votes = [other for other in self.members if self.contact(one, other) and other.log_length <= one.log_length]
        return len(votes) >= self.quorum

    def move_leader(self) -> None:
        """Another one that could win does."""
        self._settle()
        able = [member for member in self.members if member is not self.leader and self._may_win(member)]
        if able:
            self._become_leader(self._rng.choice(able))

    def _become_leader(self, member: Member) -> None:
        """Entries of the former leader that have not reached it are gone for good."""
        self.term += 1
        self.elections += 1
        self.leader = member
        kept = max(0, member.log_length - len(self._committed))
        for other in self.members:
            other.log_length = min(other.log_length, len(self._committed) + kept)
        del self._pending[kept:]
        now_s = self.loop.time()
        for entry in self._pending:
            entry.acked_s.clear()
            entry.held_s = {name: at_s for name, at_s in entry.held_s.items() if at_s <= now_s}
        for lease, (end_s, ttl_s) in self._lease_ends_s.items():
            self._lease_ends_s[lease] = (max(end_s, now_s + ttl_s), ttl_s)
        self.changed()

    # -- members

    def state_at(self, index: int) -> tuple[int, int]:
        if index == 0:
            return 1, 0
        entry = self._committed[index - 1]
        return entry.revision, entry.compacted

    def crash(self, member: Member) -> None:
        self._settle()
        member.crash()
        self.changed()

    def start(self, member: Member) -> None:
        member.start(self.state_at)
        self.changed()

    def freeze(self, member: Member) -> None:
        self._settle()
        member.freeze()
        self.changed()

    def thaw(self, member: Member) -> None:
        member.thaw()
        self.changed()

    def require_space(self) -> None:
        """Raises WireError."""
        if self.full:
            raise no_space()
