"""JobService: submit, get, list, cancel, watch, explain, logs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from controld.core.commands import CancelJob, SubmitJob
from controld.core.ids import JobId
from controld.core.model import Job
from controld.core.outcome import FieldViolation
from controld.core.validate import validate, validate_job_id
from controld.reconcile.explain import explain
from controld.service import log_lookup
from controld.service.backend import CAUSE_ID, Backend, Context
from controld.service.convert import messages as m
from controld.service.convert.bulk import log_data_to_proto
from controld.service.convert.common import job_id_from_name, job_name, request_id_from
from controld.service.convert.job import explain_to_proto, job_to_proto, planned_job, states_from_proto
from controld.service.convert.pages import key_from, page, page_size_from, token_for
from controld.service.convert.replies import cursor_from_proto, jobs_page
from controld.service.convert.spec import spec_from_proto
from controld.service.failures import CallError, invalid, not_found
from controld.service.feeds import JobFeed, shown_jobs
from controld.service.gate import CALLER, check_owner, check_user
from controld.service.log_reads import LogRead, LogRoutes
from controld.service.watching import watch
from virialpb.errors import details_for
from virialpb.reasons import Reason
from virialpb.v1 import job_pb2_grpc

# An agent reconnects within about a second; a reader waits that long before it hears that the node is gone.
LINK_WAIT_SECONDS = 2.0


class JobServicer(job_pb2_grpc.JobServiceServicer):
    def __init__(self, backend: Backend, routes: LogRoutes) -> None:
        self._backend = backend
        self._leader = backend.leader
        self._routes = routes
        self._shown = shown_jobs(backend)

    async def SubmitJob(self, request: m.SubmitJobRequest, context: Context) -> m.Job:  # noqa: N802
        request_id = request_id_from(request.request_id, CAUSE_ID.get())
        spec, meaningless = spec_from_proto(
            request.spec, job_id=request.job_id, fence_after_default_ns=self._backend.fence_after_default_ns
        )
        wrong = (*meaningless, *validate(spec, self._backend.limits))
        in_spec = [FieldViolation(f"spec.{one.field}".rstrip("."), one.description) for one in wrong]
        violations = (*validate_job_id(request.job_id), *in_spec)
        if violations:
            raise invalid(*violations)
        check_user(spec.task.user)
        if request.validate_only:
            await self._leader.barrier()
            if request.job_id in self._leader.state.jobs:
                raise CallError(details_for(Reason.ALREADY_EXISTS, subject=job_name(request.job_id)))
            return planned_job(request.job_id, spec)
        reply = await self._leader.submit(SubmitJob(request_id, spec, request.job_id, CALLER.get().name))
        if JobId(reply.subject) not in self._leader.state.jobs:
            raise not_found(
                job_name(reply.subject),
                "this request made it; it has ended and been removed since",
                "use a new request_id",
            )
        return self._view(JobId(reply.subject))

    async def GetJob(self, request: m.GetJobRequest, context: Context) -> m.Job:  # noqa: N802
        id_ = job_id_from_name(request.name)
        await self._leader.barrier()
        return self._view(id_)

    async def ListJobs(self, request: m.ListJobsRequest, context: Context) -> m.ListJobsResponse:  # noqa: N802
        states = states_from_proto(list(request.states))
        scope = f"ListJobs {sorted(states)}"
        after = key_from(request.page_token, scope)
        await self._leader.barrier()
        state, view, cursor = self._leader.state, self._leader.view, self._leader.hub.cursor
        found, last = page(
            (job for job in state.jobs.values() if job.state in states),
            key=lambda job: job.id,
            after=after,
            size=page_size_from(request.page_size),
            convert=lambda job: job_to_proto(job, state, view),
        )
        return jobs_page(found, token_for(scope, last) if last else "", cursor)

    async def CancelJob(self, request: m.CancelJobRequest, context: Context) -> m.Job:  # noqa: N802
        request_id = request_id_from(request.request_id, CAUSE_ID.get())
        id_ = job_id_from_name(request.name)
        caller = CALLER.get()
        only_of = caller.name if caller.only_own else None
        await self._leader.submit(CancelJob(request_id, id_, only_of))
        return self._view(id_)

    async def WatchJobs(  # noqa: N802
        self, request: m.WatchJobsRequest, context: Context
    ) -> AsyncIterator[m.WatchJobsResponse]:
        only = job_id_from_name(request.name) if request.name else None
        after = cursor_from_proto(request.cursor) if request.HasField("cursor") else None
        async with aclosing(watch(self._leader, after, JobFeed(self._backend, only, self._shown))) as messages:
            async for message in messages:
                yield message

    async def ExplainJob(self, request: m.ExplainJobRequest, context: Context) -> m.ExplainJobResponse:  # noqa: N802
        id_ = job_id_from_name(request.name)
        await self._leader.barrier()
        return explain_to_proto(self._job(id_), explain(self._leader.state, self._leader.view, id_))

    async def ReadLogs(  # noqa: N802
        self, request: m.ReadLogsRequest, context: Context
    ) -> AsyncIterator[m.ReadLogsResponse]:
        id_ = job_id_from_name(request.name)
        stream = log_lookup.stream_from(request.stream)
        await self._leader.barrier()
        job = self._job(id_)
        check_owner(job.owner, f"the output of {job_name(job.id)}")
        state = self._leader.state
        generation, member = log_lookup.find(job, state, request.rank, request.generation)
        node = log_lookup.node_subject(member, state)
        sent = False
        try:
            link = await self._routes.link(member.node, node, LINK_WAIT_SECONDS)
            read = LogRead(link, member.slot, stream, request.offset, request.tail_bytes, request.follow)
            try:
                async for chunk in read:
                    sent = True
                    yield log_data_to_proto(chunk.data, generation.number, request.rank, chunk.next_offset)
            finally:
                read.close()
        except CallError as error:
            tail = "" if sent else log_lookup.stored_tail(job, generation, request.rank, stream)
            if not tail:
                raise log_lookup.with_hint(error, job, generation, request.rank, stream) from error
            data = tail.encode()
            yield log_data_to_proto(data, generation.number, request.rank, len(data))

    def _job(self, id_: JobId) -> Job:
        job = self._leader.state.jobs.get(id_)
        if job is None:
            raise not_found(job_name(id_))
        return job

    def _view(self, id_: JobId) -> m.Job:
        return job_to_proto(self._job(id_), self._leader.state, self._leader.view)
