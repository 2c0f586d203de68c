"""Client of a Virial cluster."""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from virial import convert
from virial._async.io import Connection, Lock, RpcError, answers_tls, sleep
from virial._connect import Tls, addresses_from, next_after
from virial._retry import Attempts, leader_address
from virial._watch import JobWatch
from virial.errors import ForkedClientError, UnavailableError, VirialError, error_for
from virial.models import (
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
from virialpb.errors import details_from
from virialpb.reasons import Reason
from virialpb.v1 import admin_pb2, cluster_pb2, job_pb2, join_pb2

M = TypeVar("M")

PAGE_SIZE = 500
BACKUP_TIMEOUT_S = 3_600.0
# Before a stream that ended without an error is opened again.
STREAM_PAUSE_S = 0.1


class Client:
    """A connection to a cluster: any of its controllers will do.

    Calls are repeated until `timeout_s` when the controller is away, is not the leader, or its answer was lost;
    mutations carry a request id, so they are carried out once. Every method raises a `virial.VirialError`.
    Not usable in a forked child: make a new one there.
    """

    def __init__(
        self, addresses: str | Sequence[str] | None = None, *, timeout_s: float = 30.0, tls: Tls | None = None
    ) -> None:
        self._addresses = addresses_from(addresses)
        self._timeout_s = timeout_s
        self._tls = tls
        self._pid = os.getpid()
        self._rng = random.Random()  # noqa: S311 - spreads retries
        self._next = 0
        self._lock = Lock()
        self._connection: Connection | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, whoever uses it. Safe to call twice; a later call connects anew."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None and self._pid == os.getpid():
            await connection.close()

    # Jobs

    async def submit_job(
        self, spec: JobSpec, *, job_id: str = "", request_id: str = "", validate_only: bool = False
    ) -> Job:
        """Submit a job. The same `request_id` again gives the same job; a new one is made when it is empty."""
        request = job_pb2.SubmitJobRequest(
            request_id=request_id or _new_request_id(),
            job_id=job_id,
            spec=convert.spec_to_proto(spec),
            validate_only=validate_only,
        )
        return convert.job_from(await self._call(lambda c, t: c.jobs.SubmitJob(request, timeout=t)))

    async def get_job(self, job_id: str) -> Job:
        request = job_pb2.GetJobRequest(name=f"jobs/{job_id}")
        return convert.job_from(await self._call(lambda c, t: c.jobs.GetJob(request, timeout=t)))

    async def list_jobs(self, states: Sequence[JobState] = ()) -> list[Job]:
        """Every job, or those in one of `states`, in the order they were submitted."""
        jobs: list[Job] = []
        token = ""
        while True:
            request = job_pb2.ListJobsRequest(
                page_size=PAGE_SIZE,
                page_token=token,
                states=[job_pb2.Job.State.Value(s.value) for s in states],
            )
            page = await self._call(lambda c, t, r=request: c.jobs.ListJobs(r, timeout=t))
            jobs += [convert.job_from(j) for j in page.jobs]
            token = page.next_page_token
            if not token:
                return jobs

    async def cancel_job(self, job_id: str, *, request_id: str = "") -> Job:
        """Stop a job. It is CANCELLED once every rank is proven gone."""
        request = job_pb2.CancelJobRequest(request_id=request_id or _new_request_id(), name=f"jobs/{job_id}")
        return convert.job_from(await self._call(lambda c, t: c.jobs.CancelJob(request, timeout=t)))

    async def explain_job(self, job_id: str) -> Explanation:
        """Why a job waits: every reason with its count."""
        request = job_pb2.ExplainJobRequest(name=f"jobs/{job_id}")
        return convert.explanation_from(await self._call(lambda c, t: c.jobs.ExplainJob(request, timeout=t)))

    async def watch_jobs(self, job_id: str = "", *, cursor: Cursor | None = None) -> AsyncIterator[JobChange]:
        """The current state, a change with `synced`, then each change as it is committed, for ever.

        A broken connection is made again and the watch goes on where it was; after a restart of the controller what
        has changed meanwhile is given as it is by then. To resume later, keep the cursor of the `synced` change or of
        any after it. Raises CompactedError when such a `cursor` is too old: list, then watch.
        """
        watch = JobWatch(cursor)
        attempts = self._attempts()
        while True:
            request = job_pb2.WatchJobsRequest(
                name=_named("jobs", job_id),
                cursor=convert.cursor_to(watch.position) if watch.position is not None else None,
            )
            connection = self._use()
            stream = connection.jobs.WatchJobs(request)
            failure: RpcError | None = None
            try:
                async for message in stream:
                    attempts = self._attempts()
                    for change in watch.take(convert.change_from(message)):
                        yield change
            except RpcError as error:
                failure = error
            finally:
                stream.cancel()
                await connection.leave()
            if failure is None:
                # A server that ends the stream is going away.
                await sleep(STREAM_PAUSE_S)
            elif details_from(failure).reason is Reason.COMPACTED and watch.list_again():
                await sleep(STREAM_PAUSE_S)
            else:
                await self._again(failure, attempts, connection)

    async def wait_job(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """Wait for the end of a job. Raises UnavailableError after `timeout_s`."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            job = await self.get_job(job_id)
            if job.state.ended:
                return job
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise UnavailableError(f"job {job_id} is still {job.state} after {timeout_s} s")
            await sleep(0.2)

    async def read_logs(
        self,
        job_id: str,
        rank: int = 0,
        *,
        generation: int = 0,
        stream: str = "stdout",
        follow: bool = False,
        tail_bytes: int = 0,
    ) -> AsyncIterator[LogChunk]:
        """A rank's output, of its newest generation when `generation` is 0. `follow`: until the task ends.

        A broken connection is made again and the output goes on where it was, of the same generation. Raises
        UnavailableError when the rank's node or the controllers cannot be reached for `timeout_s` of the client.
        """
        offset = 0
        attempts = self._attempts()
        while True:
            request = job_pb2.ReadLogsRequest(
                name=f"jobs/{job_id}",
                rank=rank,
                generation=generation,
                stream=stream,
                follow=follow,
                tail_bytes=0 if offset else tail_bytes,
                offset=offset,
            )
            connection = self._use()
            reply = connection.jobs.ReadLogs(request)
            try:
                async for message in reply:
                    generation, offset = message.generation, message.next_offset
                    attempts = self._attempts()
                    yield convert.logs_from(message)
                return
            except RpcError as error:
                failure = error
            finally:
                reply.cancel()
                await connection.leave()
            await self._again(failure, attempts, connection)

    # Nodes and cluster

    async def get_node(self, name: str) -> Node:
        request = cluster_pb2.GetNodeRequest(name=f"nodes/{name}")
        return convert.node_from(await self._call(lambda c, t: c.cluster.GetNode(request, timeout=t)))

    async def list_nodes(self, *, brief: bool = False) -> list[Node]:
        """Every node by name. `brief` leaves out inventory and readings."""
        nodes: list[Node] = []
        token = ""
        while True:
            request = cluster_pb2.ListNodesRequest(page_size=PAGE_SIZE, page_token=token, brief=brief)
            page = await self._call(lambda c, t, r=request: c.cluster.ListNodes(r, timeout=t))
            nodes += [convert.node_from(n) for n in page.nodes]
            token = page.next_page_token
            if not token:
                return nodes

    async def place_hold(
        self,
        node: str,
        owner: str,
        reason: str,
        *,
        expire_after_ms: int = 0,
        device_key: str = "",
        request_id: str = "",
    ) -> Node:
        """Keep a node, or one device of it, from new work; what runs there stays."""
        request = cluster_pb2.PlaceHoldRequest(
            request_id=request_id or _new_request_id(),
            name=f"nodes/{node}",
            owner=owner,
            reason=reason,
            expire_after_ms=expire_after_ms,
            device_key=device_key,
        )
        return convert.node_from(await self._call(lambda c, t: c.cluster.PlaceHold(request, timeout=t)))

    async def release_hold(self, node: str, owner: str, *, device_key: str = "", request_id: str = "") -> Node:
        """Lift one owner's hold; the others stay."""
        request = cluster_pb2.ReleaseHoldRequest(
            request_id=request_id or _new_request_id(), name=f"nodes/{node}", owner=owner, device_key=device_key
        )
        return convert.node_from(await self._call(lambda c, t: c.cluster.ReleaseHold(request, timeout=t)))

    async def drain_node(self, node: str, reason: str, *, request_id: str = "") -> Node:
        """Hold a node and move its gangs away. Release the hold of owner "drain" to end it."""
        request = cluster_pb2.DrainNodeRequest(
            request_id=request_id or _new_request_id(), name=f"nodes/{node}", reason=reason
        )
        return convert.node_from(await self._call(lambda c, t: c.cluster.DrainNode(request, timeout=t)))

    async def remove_node(self, node: str, *, request_id: str = "") -> str:
        """Forget a lost node for good; its uid. Raises ConflictError while it is not lost, while leases on it have not
        ended, and while it alone has shards that a job needs. One that comes back joins as a new node."""
        request = cluster_pb2.RemoveNodeRequest(request_id=request_id or _new_request_id(), name=f"nodes/{node}")
        return (await self._call(lambda c, t: c.cluster.RemoveNode(request, timeout=t))).uid

    async def get_status(self) -> Status:
        request = cluster_pb2.GetStatusRequest()
        return convert.status_from(await self._call(lambda c, t: c.cluster.GetStatus(request, timeout=t)))

    async def list_events(self, *, job_id: str = "", node: str = "") -> list[Event]:
        """Every event that is kept, oldest first."""
        events: list[Event] = []
        token = ""
        while True:
            request = cluster_pb2.ListEventsRequest(
                page_size=PAGE_SIZE, page_token=token, job=_named("jobs", job_id), node=_named("nodes", node)
            )
            page = await self._call(lambda c, t, r=request: c.cluster.ListEvents(r, timeout=t))
            events += [convert.event_from(e) for e in page.events]
            token = page.next_page_token
            if not token:
                return events

    async def watch_events(self, after_sequence: int = 0, *, job_id: str = "", node: str = "") -> AsyncIterator[Event]:
        """Events after a sequence number, then each as it is committed, for ever; over broken connections."""
        position = after_sequence
        attempts = self._attempts()
        while True:
            request = cluster_pb2.WatchEventsRequest(
                after_sequence=position, job=_named("jobs", job_id), node=_named("nodes", node)
            )
            connection = self._use()
            stream = connection.cluster.WatchEvents(request)
            failure: RpcError | None = None
            try:
                async for message in stream:
                    event = convert.event_from(message.event)
                    position = event.sequence
                    attempts = self._attempts()
                    yield event
            except RpcError as error:
                failure = error
            finally:
                stream.cancel()
                await connection.leave()
            if failure is None:
                await sleep(STREAM_PAUSE_S)
            else:
                await self._again(failure, attempts, connection)

    # Controllers and the store beneath them

    async def list_controllers(self) -> Controllers:
        """Every controller and store member. Answered by any controller, also while nobody leads."""
        request = admin_pb2.ListControllersRequest()
        return convert.controllers_from(await self._call(lambda c, t: c.admin.ListControllers(request, timeout=t)))

    async def add_member(self, name: str, peer_url: str, *, request_id: str = "") -> MembersChange:
        """Add a member to the store. It has no vote until it has started and is in step; the leader then gives it one.
        The same again changes nothing. Raises ConflictError where it cannot be done as things are."""
        request = admin_pb2.AddMemberRequest(request_id=request_id or _new_request_id(), name=name, peer_url=peer_url)
        return convert.members_change_from(await self._call(lambda c, t: c.admin.AddMember(request, timeout=t)))

    async def remove_member(self, member: str, *, request_id: str = "") -> MembersChange:
        """Remove a member, by its name or id. Refused (ConflictError) where those left would have no majority."""
        request = admin_pb2.RemoveMemberRequest(request_id=request_id or _new_request_id(), member=member)
        return convert.members_change_from(await self._call(lambda c, t: c.admin.RemoveMember(request, timeout=t)))

    async def replace_member(self, member_id: str, name: str, peer_url: str, *, request_id: str = "") -> MembersChange:
        """Remove a dead member by its id and add one in its place. The same again changes nothing. Raises ConflictError
        where it answers and is in step, or where those left would have no majority."""
        request = admin_pb2.ReplaceMemberRequest(
            request_id=request_id or _new_request_id(), member_id=member_id, name=name, peer_url=peer_url
        )
        return convert.members_change_from(await self._call(lambda c, t: c.admin.ReplaceMember(request, timeout=t)))

    async def move_leader(self, controller: str, *, request_id: str = "") -> str:
        """Hand the leadership over to a controller, by its identity or HOST:PORT; the address of who leads now. Raises
        ConflictError where that one cannot take it: the former leads on."""
        request = admin_pb2.MoveLeaderRequest(request_id=request_id or _new_request_id(), controller=controller)
        return (await self._call(lambda c, t: c.admin.MoveLeader(request, timeout=t))).leader

    async def create_join_token(self, node: str, *, ttl_ms: int = 3_600_000, secret: str = "") -> JoinToken:
        """Let one new node of this name join, once. The controllers get the hash of the secret only, so what is
        returned is the one place where it is; `secret` is made here when it is not given."""
        secret = secret or secrets.token_urlsafe(32)
        request = join_pb2.CreateJoinTokenRequest(
            request_id=_new_request_id(),
            node=node,
            secret_sha256=hashlib.sha256(secret.encode()).hexdigest(),
            ttl_ms=ttl_ms,
        )
        reply = await self._call(lambda c, t: c.certificates.CreateJoinToken(request, timeout=t))
        return convert.join_token_from(reply, secret)

    async def backup(self) -> AsyncIterator[bytes]:
        """The bytes of a backup, in order: one file, as of one revision, for `controld restore`. Whole only when the
        iteration ends without an error; once it has begun it is not repeated by itself."""
        attempts = self._attempts()
        received_bytes, complete = 0, False
        while True:
            connection = self._use()
            stream = connection.admin.Backup(admin_pb2.BackupRequest(), timeout=BACKUP_TIMEOUT_S)
            failure: RpcError | None = None
            try:
                async for message in stream:
                    received_bytes += len(message.data)
                    complete = message.complete and message.size_bytes == received_bytes
                    if message.data:
                        yield message.data
            except RpcError as error:
                failure = error
            finally:
                stream.cancel()
                await connection.leave()
            if complete:
                return
            if received_bytes or failure is None:
                why = "" if failure is None else f" ({details_from(failure).message})"
                raise UnavailableError(f"the backup ended after {received_bytes} bytes{why}: try again")
            await self._again(failure, attempts, connection)

    # The way a call is made

    def _attempts(self) -> Attempts:
        return Attempts(time.monotonic() + self._timeout_s, self._rng)

    def _use(self) -> Connection:
        """The connection, open until `leave`: calls run side by side, and one that redials must not end the others."""
        if self._pid != os.getpid():
            raise ForkedClientError("this client was made before a fork; make a new one in the child process")
        while True:
            with self._lock:
                if self._connection is None:
                    self._connection = Connection(self._addresses[self._next % len(self._addresses)], self._tls)
                connection = self._connection
            if connection.use():
                return connection

    async def _call(self, send: Callable[[Connection, float], Awaitable[M]]) -> M:
        attempts = self._attempts()
        while True:
            patience_s = attempts.patience_s(time.monotonic(), len(self._addresses))
            connection = self._use()
            try:
                return await send(connection, patience_s)
            except RpcError as error:
                failure = error
            finally:
                await connection.leave()
            await self._again(failure, attempts, connection)

    async def _again(self, error: RpcError, attempts: Attempts, connection: Connection) -> None:
        """Wait and connect anew, or raise when the call is not to be repeated."""
        details = details_from(error)
        delay_s = attempts.delay_s(details, time.monotonic())
        stamp = () if self._tls is None else self._tls.stamp()
        if details.reason is Reason.UNAUTHENTICATED and stamp != connection.stamp:
            await self._redial(connection, "")  # with the certificate that has been renewed meanwhile
            return
        if delay_s is None:
            raise await self._in_words(error_for(details)) from None
        await sleep(delay_s)
        await self._redial(connection, leader_address(details))

    async def _redial(self, connection: Connection, leader: str) -> None:
        with self._lock:
            if self._connection is not connection:
                return  # another call has done it already
            self._connection = Connection(leader, self._tls) if leader else None
            if not leader:
                self._next = next_after(connection.address, self._addresses, self._next)
        await connection.retire()

    async def _in_words(self, error: VirialError) -> VirialError:
        if error.reason is None and isinstance(error, UnavailableError):
            where = ", ".join(self._addresses)
            if self._tls is None and await answers_tls(self._addresses):
                return UnavailableError(
                    f"{where} asks for TLS, and was called without it: name its authority (`tls=`; on the command line "
                    "--ca, VIRIAL_CA) and, where it asks for one, our certificate and key",
                    error.details,
                )
            why = "" if self._tls is None else " Do the certificates fit?"
            return UnavailableError(
                f"no answer from {where} in {self._timeout_s:g} s ({error}); is controld running there?{why}",
                error.details,
            )
        return error


def _named(collection: str, id_: str) -> str:
    """A resource name, or empty for all."""
    return f"{collection}/{id_}" if id_ else ""


def _new_request_id() -> str:
    return uuid.uuid4().hex
