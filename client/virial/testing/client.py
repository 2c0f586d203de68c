"""FakeClient: a SyncClient whose controller is a World in memory. Its waits move virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from controld.core import capacity
from controld.core.commands import CancelJob, DrainNode, PlaceHold, ReleaseHold, RemoveNode, SubmitJob
from controld.core.ids import JobId
from controld.core.model import Event as CoreEvent
from controld.core.model import Hold
from controld.core.model import Node as CoreNode
from controld.core.outcome import FieldViolation, Refused
from controld.core.spec import SECOND_NS
from controld.core.validate import SpecLimits, validate, validate_job_id
from controld.reconcile.explain import explain
from controld.service.convert.common import event_to_proto, job_name
from controld.service.convert.job import explain_to_proto, job_to_proto, planned_job
from controld.service.convert.node import node_to_proto, status_to_proto
from controld.service.convert.spec import spec_from_proto
from controld.service.failures import CallError, invalid, not_found, removal_refused
from controld.service.log_lookup import find, stream_from
from controld.service.problems import problems
from virial import convert
from virial._sync.client import SyncClient
from virial.errors import CompactedError, UnavailableError, VirialError, error_for
from virial.models import (
    Controller,
    Controllers,
    Cursor,
    Event,
    Explanation,
    Job,
    JobChange,
    JobSpec,
    JobState,
    JoinToken,
    LogChunk,
    MembersChange,
    Node,
    Status,
)
from virial.testing.world import LEADER_EPOCH, Commit, World
from virialpb.errors import details_for
from virialpb.reasons import Reason

FENCE_AFTER_DEFAULT_NS = 60 * SECOND_NS
# A fake's controller never restarts, so a lease may be as short as a test likes.
LIMITS = SpecLimits(fence_after_min_ns=SECOND_NS)
MS_NS = 1_000_000
VERSION = "fake"


class FakeClient(SyncClient):
    """Made by `FakeCluster.client`. Every method does what `SyncClient`'s does, and raises the same errors.

    A method that waits (`wait_job`, a watch, a followed log) lets virtual time pass meanwhile, and raises
    StalledError when fifteen minutes of it change nothing.
    """

    def __init__(self, world: World) -> None:
        super().__init__("fake.invalid:1")
        self._world = world

    # Jobs

    def submit_job(self, spec: JobSpec, *, job_id: str = "", request_id: str = "", validate_only: bool = False) -> Job:
        core, meaningless = spec_from_proto(
            convert.spec_to_proto(spec), job_id=job_id, fence_after_default_ns=FENCE_AFTER_DEFAULT_NS
        )
        wrong = (*meaningless, *validate(core, LIMITS))
        in_spec = [FieldViolation(f"spec.{one.field}".rstrip("."), one.description) for one in wrong]
        violations = (*validate_job_id(job_id), *in_spec)
        if violations:
            raise error_for(invalid(*violations).details)
        if validate_only:
            if job_id in self._world.state.jobs:
                raise error_for(details_for(Reason.ALREADY_EXISTS, subject=job_name(job_id)))
            return convert.job_from(planned_job(job_id, core))
        reply = self._world.ask(SubmitJob(self._request(request_id), core, job_id))
        return self._job(reply.subject)

    def get_job(self, job_id: str) -> Job:
        return self._job(job_id)

    def list_jobs(self, states: Sequence[JobState] = ()) -> list[Job]:
        jobs = [self._job(id_) for id_ in sorted(self._world.state.jobs)]
        return [job for job in jobs if not states or job.state in states]

    def cancel_job(self, job_id: str, *, request_id: str = "") -> Job:
        self._world.ask(CancelJob(self._request(request_id), JobId(job_id)))
        return self._job(job_id)

    def explain_job(self, job_id: str) -> Explanation:
        self._job(job_id)
        state, view = self._world.state, self._world.view
        id_ = JobId(job_id)
        return convert.explanation_from(explain_to_proto(state.jobs[id_], explain(state, view, id_)))

    def watch_jobs(self, job_id: str = "", *, cursor: Cursor | None = None) -> Iterator[JobChange]:
        world = self._world
        here = Cursor(world.state.history, world.state.revision)
        if cursor is not None and (cursor.history != here.history or cursor.revision > here.revision):
            raise CompactedError("the history after this cursor is not known; list, then watch from the list's cursor")
        position = here.revision if cursor is None else cursor.revision
        if cursor is None:
            for id_ in sorted(world.state.jobs):
                if not job_id or id_ == job_id:
                    yield JobChange(here, self._job(id_))
            yield JobChange(here, None, synced=True)
        for commit in self._commits(position):
            at = Cursor(here.history, commit.revision)
            for id_ in _jobs_of(commit):
                if job_id and id_ != job_id:
                    continue
                if JobId(id_) in world.state.jobs:
                    yield JobChange(at, self._job(id_))
                else:
                    yield JobChange(at, None, deleted_id=id_)

    def wait_job(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """As SyncClient's; `timeout_s` is virtual."""
        deadline_ns = None if timeout_s is None else self._world.now_ns + int(timeout_s * SECOND_NS)
        while True:
            job = self._job(job_id)
            if job.state.ended:
                return job
            if deadline_ns is not None and self._world.now_ns > deadline_ns:
                raise UnavailableError(f"job {job_id} is still {job.state} after {timeout_s} s")
            self._world.wait(f"job {job_id} is still {job.state}")

    def read_logs(
        self,
        job_id: str,
        rank: int = 0,
        *,
        generation: int = 0,
        stream: str = "stdout",
        follow: bool = False,
        tail_bytes: int = 0,
    ) -> Iterator[LogChunk]:
        self._job(job_id)
        try:
            name = stream_from(stream)
            record, member = find(self._world.state.jobs[JobId(job_id)], self._world.state, rank, generation)
        except CallError as error:
            raise error_for(error.details) from None
        agent = next(a for a in self._world.agents.values() if a.incarnation.node_uid == member.node)
        offset = 0
        while True:
            written = agent.logs.get((member.slot, name), b"")
            if offset == 0 and tail_bytes:
                offset = max(0, len(written) - tail_bytes)
            if len(written) > offset:
                yield LogChunk(written[offset:], record.number, rank, len(written))
                offset = len(written)
                continue
            status = agent.slots.get(member.slot)
            if not follow or status is None or status.exit is not None or agent.cut:
                return
            self._world.wait(f"the log of rank {rank} of job {job_id}")

    # Nodes and cluster

    def get_node(self, name: str) -> Node:
        return self._view(self._node(name), brief=False)

    def list_nodes(self, *, brief: bool = False) -> list[Node]:
        nodes = sorted(self._world.state.nodes.values(), key=lambda node: node.name)
        return [self._view(node, brief=brief) for node in nodes]

    def place_hold(
        self,
        node: str,
        owner: str,
        reason: str,
        *,
        expire_after_ms: int = 0,
        device_key: str = "",
        request_id: str = "",
    ) -> Node:
        uid = self._node(node).uid
        hold = Hold(owner, reason, device_key=device_key)
        self._world.ask(PlaceHold(self._request(request_id), uid, hold, expire_after_ms * MS_NS))
        return self.get_node(node)

    def release_hold(self, node: str, owner: str, *, device_key: str = "", request_id: str = "") -> Node:
        self._world.ask(ReleaseHold(self._request(request_id), self._node(node).uid, owner, device_key))
        return self.get_node(node)

    def drain_node(self, node: str, reason: str, *, request_id: str = "") -> Node:
        self._world.ask(DrainNode(self._request(request_id), self._node(node).uid, reason))
        return self.get_node(node)

    def remove_node(self, node: str, *, request_id: str = "") -> str:
        outcome = self._world.do(RemoveNode(self._request(request_id), node))
        if isinstance(outcome, Refused):
            raise error_for(removal_refused(outcome).details)
        return outcome.reply.subject

    def list_controllers(self) -> Controllers:
        fake = Controller("fake.invalid:1", "fake", "LEADS", VERSION, "")
        return Controllers((fake,), (), (), "memory")

    def add_member(self, name: str, peer_url: str, *, request_id: str = "") -> MembersChange:
        raise _no_members()

    def remove_member(self, member: str, *, request_id: str = "") -> MembersChange:
        raise _no_members()

    def replace_member(self, member_id: str, name: str, peer_url: str, *, request_id: str = "") -> MembersChange:
        raise _no_members()

    def move_leader(self, controller: str, *, request_id: str = "") -> str:
        raise _no_members()

    def backup(self) -> Iterator[bytes]:
        raise _no_members()

    def create_join_token(self, node: str, *, ttl_ms: int = 3_600_000, secret: str = "") -> JoinToken:
        raise error_for(details_for(Reason.NOT_NOW, detail="nodes of a fake cluster join without certificates"))

    def get_status(self) -> Status:
        state = self._world.state
        return convert.status_from(
            status_to_proto(
                state,
                problems(state, self._world.view),
                leader="fake",
                leader_epoch=LEADER_EPOCH,
                store_kind="memory",
                version=VERSION,
            )
        )

    def list_events(self, *, job_id: str = "", node: str = "") -> list[Event]:
        events = self._world.state.events
        chosen = self._chooser(job_id, node)
        return [self._event(events[sequence]) for sequence in sorted(events) if chosen(events[sequence])]

    def watch_events(self, after_sequence: int = 0, *, job_id: str = "", node: str = "") -> Iterator[Event]:
        chosen = self._chooser(job_id, node)
        for commit in self._commits(0):
            for event in commit.events:
                if event.sequence > after_sequence and chosen(event):
                    yield self._event(event)

    # The way a call is made

    def _request(self, request_id: str) -> str:
        return request_id or self._world.new_request_id()

    def _job(self, job_id: str) -> Job:
        record = self._world.state.jobs.get(JobId(job_id))
        if record is None:
            raise error_for(not_found(job_name(job_id)).details)
        return convert.job_from(job_to_proto(record, self._world.state, self._world.view))

    def _node(self, name: str) -> CoreNode:
        record = self._world.state.node_named(name)
        if record is None:
            raise error_for(not_found(f"nodes/{name}").details)
        return record

    def _view(self, node: CoreNode, *, brief: bool) -> Node:
        world = self._world
        held = capacity.holding(world.state).get(node.uid, [])
        return convert.node_from(node_to_proto(node, held, world.state, world.view, world.now, brief=brief))

    def _event(self, event: CoreEvent) -> Event:
        revision = next((c.revision for c in self._world.commits if event in c.events), 0)
        return convert.event_from(event_to_proto(event, revision, self._world.state))

    @staticmethod
    def _chooser(job_id: str, node: str) -> Callable[[CoreEvent], bool]:
        return lambda event: (not job_id or event.job == job_id) and (not node or event.node == node)

    def _commits(self, after_revision: int) -> Iterator[Commit]:
        """Commits after a revision, then each as virtual time brings it."""
        index = 0
        while True:
            commits = self._world.commits
            while index < len(commits):
                commit = commits[index]
                index += 1
                if commit.revision > after_revision:
                    yield commit
            self._world.wait("a watch")


def _jobs_of(commit: Commit) -> list[str]:
    """Jobs a commit touched, each once."""
    found: dict[str, None] = {}
    for change in commit.changes:
        kind, _, rest = change.key.partition("/")
        if kind in ("jobs", "generations", "checkpoints"):
            found[rest.partition("/")[0]] = None
    return list(found)


def _no_members() -> VirialError:
    """What a controller answers that is alone, with its state in memory."""
    return error_for(details_for(Reason.NOT_NOW, detail="this controller is alone, and its store is in memory"))
