"""JobService over real gRPC: submit, get, list, cancel, explain; bad input for each; retries answered once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tests.support_service import FakeAgent, Served, failure, job_spec, serve
from virialpb.errors import STATUS_METADATA_KEY
from virialpb.reasons import Reason
from virialpb.v1 import common_pb2, job_pb2


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as served:
        yield served


async def submit(served: Served, **fields: object) -> job_pb2.Job:
    request = job_pb2.SubmitJobRequest(spec=job_spec())
    for name, value in fields.items():
        setattr(request, name, value)
    return await served.jobs.SubmitJob(request)


async def test_a_job_is_submitted_and_read_back(served: Served) -> None:
    job = await served.jobs.SubmitJob(job_pb2.SubmitJobRequest(request_id="r1", job_id="train-7", spec=job_spec(2)))
    assert (job.name, job.uid, job.state) == ("jobs/train-7", "train-7", job_pb2.Job.PENDING)
    assert job.spec.fence_after_ms == 60_000
    assert job.spec.writes == job_pb2.SHARED
    assert job.spec.checkpoint.durability == job_pb2.LOCAL_DISK
    assert job.spec.restart.max == 3
    assert job.revision > 0
    assert job.progress_step == -1
    assert await served.jobs.GetJob(job_pb2.GetJobRequest(name="jobs/train-7")) == job


async def test_an_id_is_made_from_the_name(served: Served) -> None:
    assert [(await submit(served)).name for _ in range(2)] == ["jobs/train-1", "jobs/train-2"]


async def test_a_retry_is_answered_once(served: Served) -> None:
    first = await submit(served, request_id="r1")
    assert (await submit(served, request_id="r1")).name == first.name
    jobs = await served.jobs.ListJobs(job_pb2.ListJobsRequest())
    assert [job.name for job in jobs.jobs] == [first.name]


async def test_a_request_id_serves_one_request(served: Served) -> None:
    await submit(served, request_id="r1")
    details = await failure(
        served.jobs.SubmitJob(job_pb2.SubmitJobRequest(request_id="r1", spec=job_spec(name="other")))
    )
    assert details.reason is Reason.INVALID_SPEC
    assert [violation.field for violation in details.violations] == ["request_id"]


async def test_validate_only_commits_nothing(served: Served) -> None:
    job = await submit(served, validate_only=True, job_id="train-7")
    assert (job.name, job.revision, job.spec.task.grace_ms) == ("jobs/train-7", 0, 5_000)
    assert (await served.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs == []
    await submit(served, job_id="train-7")
    request = job_pb2.SubmitJobRequest(job_id="train-7", spec=job_spec(), validate_only=True)
    assert (await failure(served.jobs.SubmitJob(request))).reason is Reason.ALREADY_EXISTS


async def test_every_wrong_field_is_named(served: Served) -> None:
    spec = job_pb2.JobSpec(
        name="Train",
        gang=job_pb2.GangSpec(ranks=0, spread="rack"),
        resources=common_pb2.Resources(cpu_millis=1, memory_bytes=0),
        writes=7,  # type: ignore[arg-type]
        fence_after_ms=1,
        checkpoint=job_pb2.CheckpointSpec(durability=job_pb2.SHARED_DIRECTORY, directory="relative"),
        restart=job_pb2.RestartSpec(allow=["in_plac"]),
        node_constraints=[common_pb2.Constraint(attribute="rack", values=["r1"])],
    )
    details = await failure(
        served.jobs.SubmitJob(job_pb2.SubmitJobRequest(request_id="a b", spec=spec, job_id="Bad_Id"))
    )
    assert [violation.field for violation in details.violations] == ["request_id"]
    details = await failure(served.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=spec, job_id="Bad_Id")))
    assert details.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in details.violations] == [
        "job_id",
        "spec.writes",
        "spec.restart.allow[0]",
        "spec.node_constraints[0].operator",
        "spec.name",
        "spec.gang.ranks",
        "spec.gang.spread",
        "spec.resources.memory_bytes",
        "spec.task.command",
        "spec.fence_after_ms",
        "spec.checkpoint.directory",
    ]
    assert "did you mean 'in_place'?" in details.violations[2].description


async def test_an_impossible_gang_waits_and_is_explained(served: Served) -> None:
    agent = await FakeAgent(served, "n1").join()
    job = await served.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=job_spec(4096, cpu_millis=10**9)))
    explained = await served.jobs.ExplainJob(job_pb2.ExplainJobRequest(name=job.name))
    while [count.reason for count in explained.reasons] == ["WAITS_FOR_PLANNER"]:
        explained = await served.jobs.ExplainJob(job_pb2.ExplainJobRequest(name=job.name))
    assert (explained.name, explained.state) == (job.name, job_pb2.Job.PENDING)
    assert explained.reasons
    assert explained.nodes_considered == 1
    await agent.leave()


@pytest.mark.parametrize("name", ["", "train-1", "jobs/", "jobs/A", "jobs/a/b", "nodes/a", "jobs/" + "a" * 100])
async def test_what_is_no_jobs_name(served: Served, name: str) -> None:
    calls = (
        served.jobs.GetJob(job_pb2.GetJobRequest(name=name)),
        served.jobs.CancelJob(job_pb2.CancelJobRequest(name=name)),
        served.jobs.ExplainJob(job_pb2.ExplainJobRequest(name=name)),
        served.jobs.ReadLogs(job_pb2.ReadLogsRequest(name=name)),
    )
    for call in calls:
        details = await failure(call)
        assert (details.reason, [v.field for v in details.violations]) == (Reason.INVALID_SPEC, ["name"])


async def test_a_job_that_is_not_there(served: Served) -> None:
    calls = (
        served.jobs.GetJob(job_pb2.GetJobRequest(name="jobs/a")),
        served.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a")),
        served.jobs.ExplainJob(job_pb2.ExplainJobRequest(name="jobs/a")),
        served.jobs.ReadLogs(job_pb2.ReadLogsRequest(name="jobs/a")),
    )
    for call in calls:
        details = await failure(call)
        assert details.code is grpc.StatusCode.NOT_FOUND
        assert details.message.startswith("jobs/a does not exist; ")
        assert details.metadata["cause_id"]


async def test_pages_have_a_stable_order_and_no_gap(served: Served) -> None:
    names = [(await submit(served, job_id=f"j{index:02}")).name for index in (3, 1, 4, 0, 2)]
    seen: list[str] = []
    request = job_pb2.ListJobsRequest(page_size=2)
    while True:
        page = await served.jobs.ListJobs(request)
        assert len(page.jobs) <= 2
        seen += [job.name for job in page.jobs]
        request.page_token = page.next_page_token
        if not page.next_page_token:
            break
    assert seen == sorted(names)


async def test_a_filter_by_state(served: Served) -> None:
    await submit(served, job_id="a")
    await submit(served, job_id="b")
    await served.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a"))
    page = await served.jobs.ListJobs(job_pb2.ListJobsRequest(states=[job_pb2.Job.CANCELLED]))
    assert [job.name for job in page.jobs] == ["jobs/a"]


@pytest.mark.parametrize("token", ["x", "AAAA", "jobs/a", "=" * 8])
async def test_a_foreign_page_token_is_refused(served: Served, token: str) -> None:
    details = await failure(served.jobs.ListJobs(job_pb2.ListJobsRequest(page_token=token)))
    assert [violation.field for violation in details.violations] == ["page_token"]


async def test_a_page_token_belongs_to_its_filter(served: Served) -> None:
    for job_id in ("a", "b"):
        await submit(served, job_id=job_id)
    page = await served.jobs.ListJobs(job_pb2.ListJobsRequest(page_size=1))
    other = job_pb2.ListJobsRequest(page_token=page.next_page_token, states=[job_pb2.Job.PENDING])
    assert (await failure(served.jobs.ListJobs(other))).reason is Reason.INVALID_SPEC


async def test_a_cancel_is_answered_the_same_twice(served: Served) -> None:
    await submit(served, job_id="a")
    for request_id in ("c1", "c1", "c2"):
        job = await served.jobs.CancelJob(job_pb2.CancelJobRequest(request_id=request_id, name="jobs/a"))
        assert job.state == job_pb2.Job.CANCELLED


async def test_a_message_over_the_bound_is_refused_and_the_next_is_served(served: Served) -> None:
    spec = job_spec()
    spec.task.env["X"] = "x" * (5 << 20)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=spec))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    spec.task.env["X"] = "x" * (1 << 20)
    details = await failure(served.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=spec)))
    assert [violation.field for violation in details.violations] == ["spec", "spec.task.env.X"]
    assert (await submit(served)).name == "jobs/train-1"


async def test_a_hundred_wrong_fields_still_arrive_as_one_error(served: Served) -> None:
    spec = job_spec()
    spec.task.command.extend(["x\0y"] * 500)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=spec))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert STATUS_METADATA_KEY in dict(caught.value.trailing_metadata())


async def test_the_cause_of_a_call_is_in_its_log_entry(served: Served) -> None:
    await failure(served.jobs.GetJob(job_pb2.GetJobRequest(name="jobs/a"), metadata=(("virial-cause-id", "cause-7"),)))
    (entry,) = [line for line in served.log.getvalue().splitlines() if '"call.refused"' in line]
    assert '"cause_id": "cause-7"' in entry
    assert '"method": "GetJob"' in entry
