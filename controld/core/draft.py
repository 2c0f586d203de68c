"""A draft of one transition: what has been changed so far, read through to the state underneath.

Several rules may touch the same record in one commit (a key stands once in it), so each reads what the
former left behind.
"""

from __future__ import annotations

from dataclasses import replace

from controld.core import keys
from controld.core.ids import CheckpointId, Incarnation, JobId, NodeUid
from controld.core.model import (
    Checkpoint,
    Cluster,
    Event,
    Generation,
    Job,
    LeaseState,
    Member,
    Node,
    Record,
)
from controld.core.outcome import Reply, Transition
from controld.core.state import Change, State


class Draft:
    def __init__(self, state: State) -> None:
        self.state = state
        self._changes: dict[str, Change] = {}
        self._events: list[Event] = []

    def put(self, record: Record) -> None:
        key = keys.of(record)
        self._changes[key] = Change(key, record)

    def delete(self, key: str) -> None:
        self._changes[key] = Change(key, None)

    def tell(self, event: Event) -> None:
        self._events.append(event)

    def done(self, reply: Reply | None = None) -> Transition:
        return Transition(tuple(self._changes.values()), tuple(self._events), reply or Reply())

    def cluster(self) -> Cluster:
        changed = self._changes.get(keys.CLUSTER)
        record = changed.record if changed is not None else self.state.cluster
        if not isinstance(record, Cluster):
            raise ValueError("the cluster record is missing: the leader writes it before anything else")
        return record

    def job(self, job: JobId) -> Job | None:
        changed = self._changes.get(keys.job(job))
        record = changed.record if changed is not None else self.state.jobs.get(job)
        return record if isinstance(record, Job) else None

    def node(self, uid: NodeUid) -> Node | None:
        changed = self._changes.get(keys.node(uid))
        record = changed.record if changed is not None else self.state.nodes.get(uid)
        return record if isinstance(record, Node) else None

    def generation(self, job: JobId, number: int) -> Generation | None:
        changed = self._changes.get(keys.generation(job, number))
        record = changed.record if changed is not None else self.state.generations.get(job, {}).get(number)
        return record if isinstance(record, Generation) else None

    def checkpoints(self, job: JobId) -> tuple[Checkpoint, ...]:
        """Every checkpoint of a job as this draft leaves it, oldest id first."""
        ids = sorted(self.state.checkpoints.get(job, {}))
        found = (self.checkpoint(job, id_) for id_ in ids)
        return tuple(c for c in found if c is not None)

    def checkpoint(self, job: JobId, id_: CheckpointId) -> Checkpoint | None:
        changed = self._changes.get(keys.checkpoint(job, id_))
        record = changed.record if changed is not None else self.state.checkpoints.get(job, {}).get(id_)
        return record if isinstance(record, Checkpoint) else None

    def leased(self) -> tuple[Generation, ...]:
        """Every generation that held a lease before this draft, as it leaves it."""
        found = (self.generation(g.job, g.number) for g in self.state.leased())
        return tuple(g for g in found if g is not None)

    def change_member(self, generation: Generation, member: Member) -> Generation:
        """Put `generation` with `member` in place of the one of the same slot."""
        place = generation.place_of(member.slot)
        if place is None:
            return generation
        members = (*generation.members[:place], member, *generation.members[place + 1 :])
        changed = replace(generation, members=members)
        self.put(changed)
        return changed

    def held_on(self, uid: NodeUid) -> tuple[tuple[Generation, Member], ...]:
        """Leases that hold something on a node, of any incarnation of it."""
        return tuple((g, m) for g in self.leased() for m in g.members if m.node == uid and m.lease.holds)

    def held_by_node(self) -> dict[NodeUid, list[Member]]:
        """The same of every node at once."""
        found: dict[NodeUid, list[Member]] = {}
        for generation in self.leased():
            for member in generation.members:
                if member.lease.holds:
                    found.setdefault(member.node, []).append(member)
        return found

    def free_leases(
        self, uid: NodeUid, incarnation: Incarnation, to: LeaseState
    ) -> tuple[tuple[Generation, Member], ...]:
        """End every lease of one incarnation of a node; returns what was ended, as it was before."""
        ended: list[tuple[Generation, Member]] = []
        for generation, member in self.held_on(uid):
            if member.incarnation == incarnation:
                current = self.generation(generation.job, generation.number) or generation
                self.change_member(current, replace(member, lease=to))
                ended.append((generation, member))
        return tuple(ended)
