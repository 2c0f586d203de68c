"""Three controllers with real gRPC between them: redirects, stale reads, failover and hand-over as callers see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from controld.core.commands import SubmitJob
from tests.support_apps import Controller, Controllers, controllers
from tests.support_core import spec
from tests.support_service import HANG_SECONDS, failure, job_spec
from virial import Client
from virial.models import JobSpec, Resources, TaskSpec
from virialpb.reasons import Reason
from virialpb.v1 import cluster_pb2, cluster_pb2_grpc, job_pb2, job_pb2_grpc

STALE = (("virial-read", "stale"),)


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[Controllers]:
    async with controllers(tmp_path) as found:
        yield found


@asynccontextmanager
async def stubs(
    controller: Controller,
) -> AsyncGenerator[tuple[job_pb2_grpc.JobServiceAsyncStub, cluster_pb2_grpc.ClusterServiceAsyncStub]]:
    async with grpc.aio.insecure_channel(controller.address) as channel:
        jobs: job_pb2_grpc.JobServiceAsyncStub = job_pb2_grpc.JobServiceStub(channel)
        cluster: cluster_pb2_grpc.ClusterServiceAsyncStub = cluster_pb2_grpc.ClusterServiceStub(channel)
        yield jobs, cluster


async def test_a_follower_names_the_leader_and_reads_stale_only_when_asked_to(three: Controllers) -> None:
    leader, follower = await three.leader(), three.followers()[0]
    await leader.replica.submit(SubmitJob("r1", spec()))
    revision = leader.replica.state.revision
    await three.until(lambda: follower.replica.state.revision >= revision or None)
    async with stubs(follower) as (jobs, cluster):
        for call in (
            jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=job_spec()), metadata=STALE),
            jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/train-1"), metadata=STALE),
            jobs.ReadLogs(job_pb2.ReadLogsRequest(name="jobs/train-1"), metadata=STALE),
            jobs.GetJob(job_pb2.GetJobRequest(name="jobs/train-1")),
            jobs.WatchJobs(job_pb2.WatchJobsRequest()),
            cluster.GetStatus(cluster_pb2.GetStatusRequest()),
        ):
            details = await failure(call)
            assert (details.reason, details.metadata["leader"]) == (Reason.NOT_LEADER, leader.address)
        get: Any = jobs.GetJob(job_pb2.GetJobRequest(name="jobs/train-1"), metadata=STALE)
        assert (await get).name == "jobs/train-1"
        told = dict(await get.trailing_metadata())["virial-read-revision"]
        assert tuple(int(part) for part in told.split(".")) >= (1, revision)
        status = await cluster.GetStatus(cluster_pb2.GetStatusRequest(), metadata=STALE)
        assert status.leader == leader.config.identity
        assert f"{leader.config.identity} leads" in status.problems[0]


async def test_a_stale_watch_follows_at_a_follower(three: Controllers) -> None:
    leader, follower = await three.leader(), three.followers()[0]
    async with stubs(follower) as (jobs, _), asyncio.timeout(HANG_SECONDS):
        watch = aiter(jobs.WatchJobs(job_pb2.WatchJobsRequest(), metadata=STALE))
        assert (await anext(watch)).synced
        await leader.replica.submit(SubmitJob("r1", spec()))
        seen = await anext(watch)
        assert seen.job.name == "jobs/train-1"


async def test_the_sdk_finds_the_leader_from_any_address_and_over_a_failover(three: Controllers) -> None:
    for first in range(3):
        addresses = three.addresses[first:] + three.addresses[:first]
        async with Client(addresses) as client:
            job = await client.submit_job(sdk_spec(), request_id=f"first-{first}")
            assert (await client.get_job(job.id)).id == job.id
    async with Client(three.addresses) as client:
        before = await client.submit_job(sdk_spec(), request_id="same")
        leader = await three.leader()
        await leader.kill()
        assert (await client.submit_job(sdk_spec(), request_id="same")).id == before.id
        after = await client.submit_job(sdk_spec())
        assert {job.id for job in await client.list_jobs()} >= {before.id, after.id}
    assert (await three.leader()) is not leader


async def test_a_watch_goes_on_at_the_next_leader_without_listing_again(three: Controllers) -> None:
    leader = await three.leader()
    await leader.replica.submit(SubmitJob("r1", spec()))
    async with stubs(leader) as (jobs, _), asyncio.timeout(HANG_SECONDS):
        watch = aiter(jobs.WatchJobs(job_pb2.WatchJobsRequest()))
        cursor = None
        while cursor is None:
            message = await anext(watch)
            cursor = message.cursor if message.synced else None
    await leader.replica.submit(SubmitJob("r2", spec()))
    await leader.kill()
    successor = await three.leader(but=leader)
    async with stubs(successor) as (jobs, _), asyncio.timeout(HANG_SECONDS):
        seen = await anext(aiter(jobs.WatchJobs(job_pb2.WatchJobsRequest(cursor=cursor))))
        assert seen.job.name == "jobs/train-2"


async def test_a_planned_hand_over_leads_callers_to_the_successor(three: Controllers) -> None:
    leader = await three.leader()
    async with Client(three.addresses) as client:
        await client.submit_job(sdk_spec())
        stopping = asyncio.create_task(leader.stop())
        for _ in range(20):
            await client.submit_job(sdk_spec())
        await stopping
    successor = await three.leader()
    assert successor is not leader
    assert len(successor.replica.state.jobs) == 21
    assert '"handover.done"' in leader.log.getvalue()
    assert '"leader.silent"' not in successor.log.getvalue(), "nobody had to find out"


async def test_the_status_says_which_controller_does_not_listen(three: Controllers) -> None:
    leader, gone = await three.leader(), three.followers()[0]
    async with stubs(leader) as (_, cluster):
        assert not (await cluster.GetStatus(cluster_pb2.GetStatusRequest())).problems
        await gone.kill()
        await three.until(lambda: leader.replica.unheard or None)
        (problem,) = (await cluster.GetStatus(cluster_pb2.GetStatusRequest())).problems
        assert gone.address in problem


async def test_metrics_tell_which_one_leads(three: Controllers) -> None:
    leading: list[str] = []
    for controller in three.all:
        ports = json.loads((Path(controller.config.data_dir) / "ports.json").read_text())
        host, _, port = ports["metrics_address"].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        if "virial_controld_leading 1.0" in (await reader.read()).decode():
            leading.append(controller.address)
        writer.close()
    assert leading == [(await three.leader()).address]


async def test_a_leader_cut_off_from_its_member_is_replaced_and_says_so(three: Controllers) -> None:
    leader = await three.leader()
    leader.store.cut = True
    successor = await three.leader(but=leader)
    await three.until(lambda: not leader.leads or None)
    async with stubs(leader) as (jobs, _):
        details = await failure(jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=job_spec())))
        assert details.reason in (Reason.NOT_LEADER, Reason.NO_LEADER)
        leader.store.cut = False
        await three.until(lambda: leader.replica.leader_address == successor.address or None)
        details = await failure(jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=job_spec())))
        assert (details.reason, details.metadata["leader"]) == (Reason.NOT_LEADER, successor.address)


def sdk_spec() -> JobSpec:
    return JobSpec(
        name="train", resources=Resources(cpu_millis=100, memory_bytes=1 << 20), task=TaskSpec(("sleep", "1"))
    )
