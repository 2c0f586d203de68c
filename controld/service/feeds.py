"""What watches of jobs and of nodes show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controld.core import capacity
from controld.core.ids import JobId, NodeUid
from controld.core.model import Generation, Member
from controld.core.state import State
from controld.replica.hub import CommittedBatch, Cursor
from controld.service.backend import Backend
from controld.service.convert import messages as m
from controld.service.convert import replies
from controld.service.convert.job import job_to_proto
from controld.service.convert.node import node_to_proto
from controld.service.shown import Shown


def shown_jobs(backend: Backend) -> Shown[JobId, m.Job]:
    """Of jobs that exist."""
    return Shown(lambda key, state: job_to_proto(state.jobs[key], state, backend.leader.view))


def shown_nodes(backend: Backend) -> Shown[NodeUid, m.Node]:
    """Of nodes that exist."""
    # One pass over all leases a commit, not a node.
    held: Shown[None, dict[str, list[tuple[Generation, Member]]]] = Shown(lambda _, state: capacity.holding(state))

    def make(key: NodeUid, state: State) -> m.Node:
        leases = held.of(None, state).get(key, [])
        return node_to_proto(state.nodes[key], leases, state, backend.leader.view, backend.now())

    return Shown(make)


class JobFeed:
    """`shown`: shared by all watches of jobs."""

    def __init__(self, backend: Backend, only: JobId | None, shown: Shown[JobId, m.Job]) -> None:
        self._backend = backend
        self._only = only
        self._shown = shown

    def everything(self) -> Sequence[JobId]:
        jobs = self._backend.leader.state.jobs
        if self._only is not None:
            return [self._only] if self._only in jobs else []
        return sorted(jobs)

    def touched(self, batch: CommittedBatch) -> Sequence[JobId]:
        found = dict.fromkeys(_jobs_of(batch))
        return [id_ for id_ in found if self._only is None or id_ == self._only]

    def message(self, key: JobId, cursor: Cursor | None) -> m.WatchJobsResponse | None:
        state = self._backend.leader.state
        if key not in state.jobs:
            return None if cursor is None else replies.deleted_job(key, cursor)
        # What there is at first is for one reader, and much: only changes are for all.
        shown = self._shown.anew if cursor is None else self._shown.of
        return replies.watched_job(shown(key, state), cursor)

    def marker(self, cursor: Cursor) -> m.WatchJobsResponse:
        return replies.jobs_marker(cursor)


class NodeFeed:
    """A deleted node's record is gone when it is told about, so the names that were sent are remembered.

    `shown`: shared by all watches of nodes.
    """

    def __init__(self, backend: Backend, shown: Shown[NodeUid, m.Node]) -> None:
        self._backend = backend
        self._shown = shown
        self._names: dict[NodeUid, str] = {}

    def everything(self) -> Sequence[NodeUid]:
        return sorted(self._backend.leader.state.nodes)

    def touched(self, batch: CommittedBatch) -> Sequence[NodeUid]:
        return list(dict.fromkeys(_nodes_of(batch)))

    def message(self, key: NodeUid, cursor: Cursor | None) -> m.WatchNodesResponse | None:
        state = self._backend.leader.state
        node = state.nodes.get(key)
        if node is None:
            name = self._names.pop(key, "")
            return None if cursor is None else replies.deleted_node(key, name, cursor)
        self._names[key] = node.name
        shown = self._shown.anew if cursor is None else self._shown.of
        return replies.watched_node(shown(key, state), cursor)

    def marker(self, cursor: Cursor) -> m.WatchNodesResponse:
        return replies.nodes_marker(cursor)


def _jobs_of(batch: CommittedBatch) -> Iterable[JobId]:
    for change in batch.changes:
        kind, _, rest = change.key.partition("/")
        if kind in ("jobs", "generations", "checkpoints"):
            yield JobId(rest.partition("/")[0])


def _nodes_of(batch: CommittedBatch) -> Iterable[NodeUid]:
    """Also the nodes whose leases a generation holds: what is free on them has changed."""
    for change in batch.changes:
        kind, _, rest = change.key.partition("/")
        if kind == "nodes":
            yield NodeUid(rest)
        elif isinstance(change.record, Generation):
            yield from (member.node for member in change.record.members)
