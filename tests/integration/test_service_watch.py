"""Watches: the state first, then changes, resumed by cursor; a caller that leaves harms nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tests.support_service import HANG_SECONDS, FakeAgent, Served, failure, job_spec, serve
from virialpb.reasons import Reason
from virialpb.v1 import cluster_pb2, common_pb2, job_pb2


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as served:
        yield served


async def submit(served: Served, job_id: str) -> job_pb2.Job:
    return await served.jobs.SubmitJob(job_pb2.SubmitJobRequest(job_id=job_id, spec=job_spec()))


class Watcher:
    """A watch of jobs, read one message at a time."""

    def __init__(self, served: Served, **request: object) -> None:
        self.call = served.jobs.WatchJobs(job_pb2.WatchJobsRequest(**request))  # type: ignore[arg-type]
        self._messages = aiter(self.call)

    async def next(self) -> job_pb2.WatchJobsResponse:
        async with asyncio.timeout(HANG_SECONDS):
            return await anext(self._messages)

    async def synced(self) -> list[job_pb2.WatchJobsResponse]:
        """Everything up to the marker, which is the last."""
        found = [await self.next()]
        while not found[-1].synced:
            found.append(await self.next())
        return found


async def test_the_state_comes_first_and_then_changes(served: Served) -> None:
    await submit(served, "a")
    await submit(served, "b")
    watcher = Watcher(served)
    first = await watcher.synced()
    assert [message.job.name for message in first] == ["jobs/a", "jobs/b", ""]
    assert not any(message.HasField("cursor") for message in first[:-1])
    await submit(served, "c")
    change = await watcher.next()
    assert (change.job.name, change.cursor.revision) == ("jobs/c", change.job.revision)
    assert change.cursor.revision > first[-1].cursor.revision


async def test_one_job_is_watched_to_its_end(served: Served) -> None:
    await submit(served, "a")
    await submit(served, "b")
    watcher = Watcher(served, name="jobs/b")
    assert [message.job.name for message in await watcher.synced()] == ["jobs/b", ""]
    await served.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a"))
    await served.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/b"))
    message = await watcher.next()
    assert (message.job.name, message.job.state) == ("jobs/b", job_pb2.Job.CANCELLED)


async def test_a_watch_goes_on_where_it_was(served: Served) -> None:
    await submit(served, "a")
    watcher = Watcher(served)
    cursor = (await watcher.synced())[-1].cursor
    watcher.call.cancel()
    await submit(served, "b")
    await submit(served, "c")
    resumed = await Watcher(served, cursor=cursor).synced()
    assert [message.job.name for message in resumed] == ["jobs/b", "jobs/c", ""]


async def test_a_watch_of_something_that_does_not_exist_yet(served: Served) -> None:
    watcher = Watcher(served, name="jobs/a")
    assert [message.synced for message in await watcher.synced()] == [True]
    await submit(served, "a")
    assert (await watcher.next()).job.name == "jobs/a"


@pytest.mark.parametrize(("history", "revision"), [(1, 10**9), (7, 1), (0, 0)])
async def test_a_cursor_that_is_not_kept_says_list_again(served: Served, history: int, revision: int) -> None:
    cursor = common_pb2.Cursor(history=history, revision=revision)
    for call in (
        served.jobs.WatchJobs(job_pb2.WatchJobsRequest(cursor=cursor)),
        served.cluster.WatchNodes(cluster_pb2.WatchNodesRequest(cursor=cursor)),
    ):
        details = await failure(call)
        assert (details.code, details.reason) == (grpc.StatusCode.OUT_OF_RANGE, Reason.COMPACTED)
        assert "revision" in details.metadata


async def test_a_caller_that_leaves_in_the_middle_harms_nothing(served: Served) -> None:
    await submit(served, "a")
    for _ in range(20):
        watcher = Watcher(served)
        await watcher.next()
        watcher.call.cancel()
    channel = grpc.aio.insecure_channel(served.ports.grpc_address)
    stub = type(served.jobs)(channel)
    calls = [stub.SubmitJob(job_pb2.SubmitJobRequest(job_id=f"j{n}", spec=job_spec())) for n in range(20)]
    asyncio.get_running_loop().call_soon(lambda: [call.cancel() for call in calls])
    await asyncio.gather(*calls, return_exceptions=True)
    await channel.close()
    assert (await submit(served, "b")).name == "jobs/b"
    assert "traceback" not in served.log.getvalue().lower()


async def test_nodes_are_watched(served: Served) -> None:
    call = served.cluster.WatchNodes(cluster_pb2.WatchNodesRequest())
    messages = aiter(call)
    assert (await anext(messages)).synced
    agent = await FakeAgent(served, "n1").join()
    found = await anext(messages)
    assert (found.node.name, found.node.uid, found.node.liveness) == ("nodes/n1", "uid-n1", "LIVE")
    await agent.leave()


async def test_events_are_watched_from_any_sequence(served: Served) -> None:
    await submit(served, "a")
    await submit(served, "b")
    listed = (await served.cluster.ListEvents(cluster_pb2.ListEventsRequest())).events
    assert [(event.kind, event.job) for event in listed] == [("job.submitted", "jobs/a"), ("job.submitted", "jobs/b")]
    assert all(event.revision and event.create_time_unix_ns for event in listed)
    messages = aiter(
        served.cluster.WatchEvents(cluster_pb2.WatchEventsRequest(after_sequence=listed[0].sequence, job="jobs/b"))
    )
    assert (await anext(messages)).event == listed[1]
    await served.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a"))
    await served.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/b"))
    event = (await anext(messages)).event
    assert (event.kind, event.job) == ("job.cancelled", "jobs/b")


async def test_events_have_pages(served: Served) -> None:
    for job_id in ("a", "b", "c"):
        await submit(served, job_id)
    first = await served.cluster.ListEvents(cluster_pb2.ListEventsRequest(page_size=2))
    rest = await served.cluster.ListEvents(cluster_pb2.ListEventsRequest(page_size=2, page_token=first.next_page_token))
    assert [event.job for event in (*first.events, *rest.events)] == ["jobs/a", "jobs/b", "jobs/c"]
    assert rest.next_page_token == ""


async def test_streams_end_with_the_controller(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        watcher = Watcher(served)
        await watcher.synced()
        await served.app.leader.stop()
        details = await failure(watcher.call)
        assert (details.code, details.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.NOT_LEADER)
        assert details.retry_after_ms is not None
