"""ReadLogs: rank and generation to the node that has the log, through its bulk stream; and when that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from controld.core.model import Generation, Job, Member
from controld.core.state import State
from controld.service import log_lookup
from controld.service.log_reads import READ_BYTES_MAX
from tests.support_service import HANG_SECONDS, FakeAgent, Served, failure, job_spec, serve
from virialpb.reasons import Reason
from virialpb.v1 import job_pb2, node_pb2

CHUNK = b"x" * 65_536


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr("controld.service.job.LINK_WAIT_SECONDS", 0.05)
    async with serve(tmp_path) as served:
        yield served


@pytest.fixture
async def agent(served: Served) -> AsyncIterator[FakeAgent]:
    agent = await FakeAgent(served, "n1").join()
    yield agent
    await agent.leave()


async def run_job(served: Served, agent: FakeAgent, spec: job_pb2.JobSpec | None = None) -> str:
    """Job "a" running; the slot of its rank 0."""
    await served.jobs.SubmitJob(job_pb2.SubmitJobRequest(job_id="a", spec=spec or job_spec()))
    await agent.until(lambda: bool(agent.orders("go")))
    return agent.orders("go")[-1].go.slot


def read(
    served: Served, **fields: object
) -> grpc.aio.UnaryStreamCall[job_pb2.ReadLogsRequest, job_pb2.ReadLogsResponse]:
    return served.jobs.ReadLogs(job_pb2.ReadLogsRequest(name="jobs/a", **fields))  # type: ignore[arg-type]


def requests(agent: FakeAgent) -> list[node_pb2.LogRequest]:
    return [message.log_request for message in agent.bulk_told if message.WhichOneof("message") == "log_request"]


async def next_request(agent: FakeAgent, count: int = 1) -> node_pb2.LogRequest:
    await agent.until(lambda: len(requests(agent)) >= count)
    return requests(agent)[count - 1]


def answer(agent: FakeAgent, request: node_pb2.LogRequest, data: bytes, offset: int, **fields: object) -> None:
    chunk = node_pb2.LogChunk(request_id=request.request_id, data=data, next_offset=offset, **fields)  # type: ignore[arg-type]
    agent.send_bulk(node_pb2.BulkUp(log_chunk=chunk))


async def test_a_log_is_read_from_its_node(served: Served, agent: FakeAgent) -> None:
    slot = await run_job(served, agent)
    call = read(served, stream="stderr", tail_bytes=100)
    request = await next_request(agent)
    assert (request.slot, request.stream, request.tail_bytes, request.follow) == (slot, "stderr", 100, False)
    answer(agent, request, b"one\n", 104)
    answer(agent, request, b"two\n", 108, end=True)
    found = [message async for message in call]
    assert [(m.data, m.generation, m.rank, m.next_offset) for m in found] == [
        (b"one\n", 1, 0, 104),
        (b"two\n", 1, 0, 108),
    ]


async def test_two_readers_do_not_mix(served: Served, agent: FakeAgent) -> None:
    await run_job(served, agent)
    calls = [read(served, follow=True), read(served, follow=True)]
    await next_request(agent, 2)
    for index, request in enumerate(requests(agent)):
        answer(agent, request, f"for {request.request_id}".encode(), 5 + index, end=True)
    found = sorted([[message.data async for message in call] for call in calls])
    assert found == [[b"for 1"], [b"for 2"]]


async def test_a_reader_that_leaves_is_cancelled_at_the_agent(served: Served, agent: FakeAgent) -> None:
    await run_job(served, agent)
    call = read(served, follow=True)
    request = await next_request(agent)
    call.cancel()
    await agent.until(lambda: any(m.log_cancel.request_id == request.request_id for m in agent.bulk_told))


async def test_a_slow_reader_loses_its_request_not_its_place(served: Served, agent: FakeAgent) -> None:
    """The agent sends far more than is held for a reader; nothing is lost, and memory stays bounded."""
    await run_job(served, agent)
    total = 40 * READ_BYTES_MAX
    call = read(served)
    sent = asyncio.create_task(_send_all(agent, total))
    received = 0
    async with asyncio.timeout(HANG_SECONDS):
        await agent.until(lambda: any(m.WhichOneof("message") == "log_cancel" for m in agent.bulk_told))
        async for message in call:
            received += len(message.data)
            assert message.next_offset == received
    sent.cancel()
    assert received == total
    assert len(requests(agent)) > 1


async def _send_all(agent: FakeAgent, total: int) -> None:
    """Answer each request from its offset on, at once, until the next one comes."""
    seen = 0
    while True:
        await next_request(agent, seen + 1)
        seen = len(requests(agent))
        request = requests(agent)[-1]
        for offset in range(request.offset, total, len(CHUNK)):
            end = min(offset + len(CHUNK), total)
            answer(agent, request, CHUNK[: end - offset], end, end=end == total)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"rank": 1}, "rank"), ({"rank": -1}, "rank"), ({"stream": "stdin"}, "stream")],
)
async def test_what_cannot_be_meant(served: Served, agent: FakeAgent, fields: dict[str, object], field: str) -> None:
    await run_job(served, agent)
    details = await failure(read(served, **fields))
    assert (details.reason, [v.field for v in details.violations]) == (Reason.INVALID_SPEC, [field])


async def test_a_job_that_has_not_run_says_so(served: Served) -> None:
    await served.jobs.SubmitJob(job_pb2.SubmitJobRequest(job_id="a", spec=job_spec()))
    details = await failure(read(served))
    assert details.reason is Reason.NOT_FOUND
    assert "no task of it has run yet; it is PENDING" in details.message
    await served.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/a"))
    assert "no task of it ever ran; it is CANCELLED" in (await failure(read(served))).message


async def test_a_generation_that_never_was(served: Served, agent: FakeAgent) -> None:
    await run_job(served, agent)
    details = await failure(read(served, generation=7))
    assert details.message.startswith("generation 7 of jobs/a does not exist: generations kept: 1")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("NOT_FOUND: no log of it", Reason.NOT_FOUND),
        ("OVERLOADED: too many", Reason.OVERLOADED),
        ("NODE_UNREACHABLE: disk is gone", Reason.NODE_UNREACHABLE),
        ("whatever a newer agent says", Reason.NOT_FOUND),
    ],
)
async def test_what_the_agent_refuses(served: Served, agent: FakeAgent, error: str, reason: Reason) -> None:
    await run_job(served, agent)
    call = read(served)
    answer(agent, await next_request(agent), b"", 0, error=error, end=True)
    details = await failure(call)
    assert details.reason is reason
    assert f"nodes/n1 says: {error.rpartition(': ')[2]}" in details.message


async def test_a_node_that_is_gone_is_named(served: Served, agent: FakeAgent) -> None:
    await run_job(served, agent)
    call = read(served, follow=True)
    await next_request(agent)
    await agent.leave()
    details = await failure(call)
    assert (details.code, details.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.NODE_UNREACHABLE)
    details = await failure(read(served))
    assert details.message.startswith("nodes/n1 cannot be reached: its agent is not connected; ")


async def _fail_once(served: Served, agent: FakeAgent) -> str:
    """Generation 1 fails with a last word on stderr; generation 2 runs. The slot of generation 1."""
    slot = await run_job(served, agent)
    agent.exit(slot, code=3, stderr_tail="ValueError: loss is nan\n")
    await agent.until(lambda: any(message.go.token.generation == 2 for message in agent.orders("go")))
    return slot


@pytest.mark.row("G18")
async def test_case_g18_the_log_of_the_failed_try_stays_readable(served: Served, agent: FakeAgent) -> None:
    slot = await _fail_once(served, agent)
    job = await served.jobs.GetJob(job_pb2.GetJobRequest(name="jobs/a"))
    assert (job.first_error.generation, job.first_error.rank) == (1, 0)
    assert job.first_error.exit.stderr_tail == "ValueError: loss is nan\n"
    read(served, generation=1)
    assert (await next_request(agent)).slot == slot
    read(served)
    assert (await next_request(agent, 2)).slot == agent.orders("go")[-1].go.slot


@pytest.mark.row("G18")
async def test_case_g18_last_words_outlive_the_node(served: Served, agent: FakeAgent) -> None:
    await _fail_once(served, agent)
    await agent.leave()
    found = [message async for message in read(served, generation=1, stream="stderr")]
    assert [(message.data, message.generation) for message in found] == [(b"ValueError: loss is nan\n", 1)]
    details = await failure(read(served, generation=1))
    assert details.reason is Reason.NODE_UNREACHABLE
    assert "read stream stderr" in details.message


@pytest.mark.row("G18", defect="newest_generation_only")
async def test_case_g18_catches_a_controller_that_reads_the_newest_try_only(
    served: Served, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = log_lookup.find

    def newest(job: Job, state: State, rank: int, number: int) -> tuple[Generation, Member]:
        return right(job, state, rank, 0 if number else number)

    monkeypatch.setattr(log_lookup, "find", newest)
    slot = await _fail_once(served, agent)
    read(served, generation=1)
    assert (await next_request(agent)).slot != slot
