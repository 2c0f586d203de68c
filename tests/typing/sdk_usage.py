"""How a program uses the SDK, as its types see it. Nothing here runs: pyright reads it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import assert_type

import virial
from virial import Client, Job, JobSpec, JobState, Node, SyncClient
from virial.models import Cursor, Event, Explanation, JobChange, LogChunk, Member, Reading, Status, TaskExit
from virial.testing import FakeClient, FakeCluster
from virialpb.errors import Violation
from virialpb.reasons import Reason


def synchronous(spec: JobSpec) -> None:
    with SyncClient("host:7600", timeout_s=5.0, tls=virial.Tls("ca.pem")) as client:
        assert_type(client, SyncClient)
        job = client.submit_job(spec, job_id="a", validate_only=True)
        assert_type(job, Job)
        assert_type(job.state, JobState)
        assert_type(job.state.ended, bool)
        assert_type(job.progress_step, int | None)
        if job.current is not None:
            assert_type(job.current.members, tuple[Member, ...])
            assert_type(job.current.members[0].rank, int | None)
            assert_type(job.current.members[0].exit, TaskExit | None)
        assert_type(client.list_jobs([JobState.RUNNING]), list[Job])
        assert_type(client.explain_job("a"), Explanation)
        assert_type(client.watch_jobs(cursor=Cursor(1, 2)), Iterator[JobChange])
        assert_type(client.read_logs("a", 0, follow=True), Iterator[LogChunk])
        assert_type(client.get_node("n").readings, tuple[Reading, ...])
        assert_type(client.get_node("n").readings[0].value, int | None)
        assert_type(client.list_nodes(brief=True), list[Node])
        assert_type(client.get_status(), Status)
        assert_type(client.watch_events(5, job_id="a"), Iterator[Event])


async def asynchronous(spec: JobSpec) -> None:
    async with Client(["a:1", "b:2"]) as client:
        assert_type(client, Client)
        assert_type(await client.submit_job(spec), Job)
        assert_type(await client.wait_job("a", timeout_s=1.5), Job)
        assert_type(client.watch_jobs(), AsyncIterator[JobChange])
        async for event in client.watch_events():
            assert_type(event, Event)
        assert_type(await client.place_hold("n", "me", "why", expire_after_ms=1), Node)


def errors(client: SyncClient) -> None:
    try:
        client.get_job("a")
    except virial.NotFoundError as error:
        assert_type(error.reason, Reason | None)
        assert_type(error.violations, tuple[Violation, ...])
    except virial.VirialError:
        pass


def specifications() -> None:
    assert_type(virial.load_spec("f.yaml", {"gang.ranks": 2}), JobSpec)
    assert_type(virial.parse_spec({"name": "a"}), JobSpec)


def my_program(client: SyncClient) -> int:
    return len(client.list_jobs())


def under_test() -> None:
    cluster = FakeCluster(nodes=2)
    assert_type(cluster.client(), FakeClient)
    # A program that is written for SyncClient takes the fake.
    assert_type(my_program(cluster.client()), int)
    assert_type(cluster.add_nodes(devices={"accelerator": 8}), list[str])
    assert_type(cluster.checkpoint("a", 5), str)
