"""What watches of jobs and of nodes show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from controld.core import capacity
from controld.core.ids import JobId, NodeUid
from controld.core.model import Generation, Member
from controld.replica.hub import CommittedBatch, Cursor
from controld.service.backend import Backend
from controld.service.convert import messages as m
from controld.service.convert import replies
from controld.service.convert.job import job_to_proto
from controld.service.convert.node import node_to_proto


class JobFeed:
    def __init__(self, backend: Backend, only: JobId | None) -> None:
        self._backend = backend
        self._only = only

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
        job = state.jobs.get(key)
        if job is None:
            return None if cursor is None else replies.deleted_job(key, cursor)
        return replies.watched_job(job_to_proto(job, state, self._backend.leader.view), cursor)

    def marker(self, cursor: Cursor) -> m.WatchJobsResponse:
        return replies.jobs_marker(cursor)


class NodeFeed:
    """A deleted node's record is gone when it is told about, so the names that were sent are remembered."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._names: dict[NodeUid, str] = {}
        self._held: dict[str, list[tuple[Generation, Member]]] = {}
        self._held_revision = -1

    def everything(self) -> Sequence[NodeUid]:
        return sorted(self._backend.leader.state.nodes)

    def touched(self, batch: CommittedBatch) -> Sequence[NodeUid]:
        return list(dict.fromkeys(_nodes_of(batch)))

    def message(self, key: NodeUid, cursor: Cursor | None) -> m.WatchNodesResponse | None:
        state, view = self._backend.leader.state, self._backend.leader.view
        node = state.nodes.get(key)
        if node is None:
            name = self._names.pop(key, "")
            return None if cursor is None else replies.deleted_node(key, name, cursor)
        self._names[key] = node.name
        if self._held_revision != state.revision:  # one pass over all leases a commit, not a node
            self._held, self._held_revision = capacity.holding(state), state.revision
        held = self._held.get(key, [])
        return replies.watched_node(node_to_proto(node, held, state, view, self._backend.now()), cursor)

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
