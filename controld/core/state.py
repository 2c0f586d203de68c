"""The whole state in memory: typed tables of records, with the revision each was created at.

One owner mutates it through `apply`; everyone else reads. The leader keeps two: the head (what it has
decided) and the committed one (what it has told anyone).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeVar

from controld.core import keys
from controld.core.ids import NO_EPOCH, CheckpointId, Epoch, JobId, NodeUid
from controld.core.model import (
    Checkpoint,
    Cluster,
    Event,
    EventPack,
    Generation,
    Job,
    JoinToken,
    Node,
    Record,
    Request,
    RequestPack,
)

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Change:
    """Put `record` under `key`, or delete `key` when it is None."""

    key: str
    record: Record | None

    @staticmethod
    def put(record: Record) -> Change:
        return Change(keys.of(record), record)


NOTHING: Final[Mapping[str, Change]] = MappingProxyType({})


@dataclass(slots=True)
class State:
    history: int = 0
    revision: int = 0
    cluster: Cluster | None = None
    nodes: dict[NodeUid, Node] = field(default_factory=dict[NodeUid, Node])
    jobs: dict[JobId, Job] = field(default_factory=dict[JobId, Job])
    generations: dict[JobId, dict[int, Generation]] = field(default_factory=dict[JobId, dict[int, Generation]])
    checkpoints: dict[JobId, dict[CheckpointId, Checkpoint]] = field(
        default_factory=dict[JobId, dict[CheckpointId, Checkpoint]]
    )
    requests: dict[str, Request] = field(default_factory=dict[str, Request])
    events: dict[int, Event] = field(default_factory=dict[int, Event])
    join_tokens: dict[str, JoinToken] = field(default_factory=dict[str, JoinToken])
    created: dict[str, int] = field(default_factory=dict[str, int])
    modified: dict[str, int] = field(default_factory=dict[str, int])
    # Requests and events are looked up one by one, and stored and dropped by the commit: key -> what is under it.
    request_packs: dict[str, tuple[Request, ...]] = field(default_factory=dict[str, tuple[Request, ...]])
    event_packs: dict[str, tuple[Event, ...]] = field(default_factory=dict[str, tuple[Event, ...]])
    _event_keys: dict[int, str] = field(default_factory=dict[int, str], init=False, repr=False, compare=False)
    # By name: ten thousand agents that reconnect at once must not each be looked for among ten thousand.
    _uids: dict[str, NodeUid] = field(default_factory=dict[str, NodeUid], init=False, repr=False, compare=False)

    # Most generations kept are over: sums over leases, several a second, look at those that hold some.
    _leased: dict[tuple[JobId, int], None] = field(
        default_factory=dict[tuple[JobId, int], None], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self._uids = {node.name: uid for uid, node in self.nodes.items()}
        for table in self.generations.values():
            for generation in table.values():
                self._note_leases(generation)
        self._event_keys = {e.sequence: key for key, events in self.event_packs.items() for e in events}

    def epoch_of(self, generation: Generation) -> Epoch:
        """The generation's fencing token, or NO_EPOCH while its commit is still under way."""
        revision = self.created.get(keys.of(generation), 0)
        return Epoch(self.history, revision) if revision else NO_EPOCH

    def current(self, job: JobId) -> Generation | None:
        """The newest generation of a job, or None before the first."""
        record = self.jobs.get(job)
        return None if record is None else self.generations.get(job, {}).get(record.generation)

    def node_named(self, name: str) -> Node | None:
        uid = self._uids.get(name)
        return None if uid is None else self.nodes.get(uid)

    def event_revision(self, sequence: int) -> int:
        """The revision an event was committed at; 0 while it is not."""
        return self.modified.get(self._event_keys.get(sequence, ""), 0)

    def foresee(self, request: Request) -> None:
        """Know of a request that was answered, before the pack it is stored in is made up."""
        self.requests[request.request_id] = request

    def forget(self, request: Request) -> None:
        """The opposite of `foresee`."""
        if self.requests.get(request.request_id) is request:
            del self.requests[request.request_id]

    def leased(self) -> Iterator[Generation]:
        """Every generation of which a lease holds something."""
        return (self.generations[job][number] for job, number in self._leased)

    def is_leased(self, job: JobId, number: int) -> bool:
        return (job, number) in self._leased

    def _note_leases(self, generation: Generation) -> None:
        key = (generation.job, generation.number)
        if generation.leased:
            self._leased[key] = None
        else:
            self._leased.pop(key, None)

    def apply(self, changes: Iterable[Change], revision: int) -> None:
        """Apply one commit. `revision` 0: decided, not committed yet; `confirm` fills it in."""
        for change in changes:
            self._apply_one(change)
            self._stamp(change, revision)
        if revision:
            self.revision = revision

    def confirm(self, changes: Iterable[Change], revision: int, over: Mapping[str, Change] = NOTHING) -> None:
        """Give the revision to changes that were applied ahead of their commit.

        `over`: what was applied on top of them and is not committed. A key that is deleted in it, or that it put anew
        after a deletion, has its stamps from there.
        """
        for change in changes:
            later = over.get(change.key)
            if later is None or (change.record is not None and later.record is not None):
                self._stamp(change, revision)
        self.revision = revision

    def reset(self, key: str, origin: State, over: Sequence[Change] = ()) -> None:
        """Bring one key back to what it is in `origin`, with the changes `over` it, which are not committed.

        In one step: what it was in between may be at odds with other keys, such as have the name of another node.
        """
        self._apply_one(over[-1] if over else Change(key, origin.record(key)))
        for mine, its in ((self.created, origin.created), (self.modified, origin.modified)):
            if (stamp := its.get(key)) is None:
                mine.pop(key, None)
            else:
                mine[key] = stamp
        for change in over:
            self._stamp(change, 0)

    def record(self, key: str) -> Record | None:
        """What is stored under a key. Raises ValueError on a kind of key that is not known."""
        kind, _, rest = key.partition("/")
        match kind:
            case "cluster":
                return self.cluster
            case "nodes":
                return self.nodes.get(NodeUid(rest))
            case "jobs":
                return self.jobs.get(JobId(rest))
            case "generations":
                job, _, number = rest.partition("/")
                return self.generations.get(JobId(job), {}).get(int(number))
            case "checkpoints":
                job, _, id_ = rest.partition("/")
                return self.checkpoints.get(JobId(job), {}).get(CheckpointId(id_))
            case "joins":
                return self.join_tokens.get(rest)
            case "requests":
                return next(iter(self.request_packs.get(key, ())), None)
            case "events":
                return next(iter(self.event_packs.get(key, ())), None)
            case "answered":
                requests = self.request_packs.get(key)
                return None if requests is None else RequestPack(int(rest), requests)
            case "told":
                events = self.event_packs.get(key)
                return None if events is None else EventPack(int(rest), events)
            case _:
                raise ValueError(f"unknown key: {key}")

    def _stamp(self, change: Change, revision: int) -> None:
        key = change.key
        if change.record is None:
            self.created.pop(key, None)
            self.modified.pop(key, None)
            return
        if not self.created.get(key):
            self.created[key] = revision
        if revision:
            self.modified[key] = revision

    def _apply_one(self, change: Change) -> None:
        record = change.record
        match record:  # the most frequent first
            case None:
                self._delete(change.key)
            case Node():
                self._drop_name(record.uid)
                self.nodes[record.uid] = record
                self._uids[record.name] = record.uid
            case Generation():
                self.generations.setdefault(record.job, {})[record.number] = record
                self._note_leases(record)
            case Job():
                self.jobs[record.id] = record
            case Checkpoint():
                self.checkpoints.setdefault(record.job, {})[record.id] = record
            case Cluster():
                self.cluster = record
            case JoinToken():
                self.join_tokens[record.secret_sha256] = record
            case EventPack():
                self._put_events(change.key, record.events)
            case RequestPack():
                self._put_requests(change.key, record.requests)
            case Event():
                self._put_events(change.key, (record,))
            case Request():
                self._put_requests(change.key, (record,))

    def _put_events(self, key: str, events: tuple[Event, ...]) -> None:
        self._drop_events(key)
        self.event_packs[key] = events
        for event in events:
            self.events[event.sequence] = event
            self._event_keys[event.sequence] = key

    def _drop_events(self, key: str) -> None:
        for event in self.event_packs.pop(key, ()):
            self.events.pop(event.sequence, None)
            self._event_keys.pop(event.sequence, None)

    def _put_requests(self, key: str, requests: tuple[Request, ...]) -> None:
        self._drop_requests(key)
        self.request_packs[key] = requests
        for request in requests:
            self.requests[request.request_id] = request

    def _drop_requests(self, key: str) -> None:
        for request in self.request_packs.pop(key, ()):
            if self.requests.get(request.request_id) == request:  # else it was forgotten before, and used again
                del self.requests[request.request_id]

    def _delete(self, key: str) -> None:
        kind, _, rest = key.partition("/")
        match kind:
            case "cluster":
                self.cluster = None
            case "nodes":
                self._drop_name(NodeUid(rest))
                self.nodes.pop(NodeUid(rest), None)
            case "jobs":
                self.jobs.pop(JobId(rest), None)
            case "generations":
                job, _, number = rest.partition("/")
                self._delete_nested(self.generations, JobId(job), int(number))
                self._leased.pop((JobId(job), int(number)), None)
            case "checkpoints":
                job, _, id_ = rest.partition("/")
                self._delete_nested(self.checkpoints, JobId(job), CheckpointId(id_))
            case "joins":
                self.join_tokens.pop(rest, None)
            case "requests" | "answered":
                self._drop_requests(key)
            case "events" | "told":
                self._drop_events(key)
            case _:
                raise ValueError(f"unknown key: {key}")

    def _drop_name(self, uid: NodeUid) -> None:
        known = self.nodes.get(uid)
        if known is not None and self._uids.get(known.name) == uid:
            del self._uids[known.name]

    @staticmethod
    def _delete_nested(table: dict[JobId, dict[_K, _V]], job: JobId, key: _K) -> None:
        inner = table.get(job)
        if inner is not None:
            inner.pop(key, None)
            if not inner:
                del table[job]
