"""What the server offers beside its services: health, reflection, metrics, TLS; and how it meets the unexpected."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from controld.app import App, StartError
from controld.config import Config
from controld.core.commands import Command
from controld.core.outcome import Reply
from controld.matching.engine import plan
from controld.replica.errors import OverloadedError
from controld.replica.leader import Leader
from controld.replica.planner import InlinePlanner
from controld.service.telemetry import make_log
from controld.store.port import OutcomeUnknownError, StorageFullError
from tests.support_secure import secure_config
from tests.support_service import HANG_SECONDS, FakeAgent, Served, failure, job_spec, quick_config, serve
from tests.support_tls import Operator
from virialpb.reasons import Reason
from virialpb.v1 import job_pb2

SERVICES = (
    "virialpb.v1.AdminService",
    "virialpb.v1.CertificateService",
    "virialpb.v1.ClusterService",
    "virialpb.v1.JobService",
    "virialpb.v1.NodeService",
)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as served:
        yield served


async def test_reflection_lists_the_services(served: Served) -> None:
    stub = cast("Any", reflection_pb2_grpc).ServerReflectionStub(served.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="*")]))
    listed = sorted([service.name async for answer in call for service in answer.list_services_response.service])
    assert listed == ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", *SERVICES]


@pytest.mark.parametrize("service", ["", *SERVICES])
async def test_health_answers_for_each_service(served: Served, service: str) -> None:
    stub = cast("Any", health_pb2_grpc).HealthStub(served.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_an_unknown_method_is_unimplemented(served: Served) -> None:
    call = served.channel.unary_unary("/virialpb.v1.JobService/Nonsense", bytes, bytes)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_bytes_that_are_no_message_harm_nothing(served: Served) -> None:
    call = served.channel.unary_unary("/virialpb.v1.JobService/SubmitJob", bytes, bytes)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\xff\xff\xff")
    assert caught.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    assert (await served.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=job_spec()))).name == "jobs/train-1"


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [
        (OverloadedError("the queue is full"), Reason.OVERLOADED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (StorageFullError("no space"), Reason.STORAGE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (OutcomeUnknownError("timed out"), Reason.OUTCOME_UNKNOWN, grpc.StatusCode.UNAVAILABLE),
        (KeyError("secret of the process"), Reason.INVARIANT_BROKEN, grpc.StatusCode.INTERNAL),
    ],
)
async def test_each_failure_has_its_status(
    served: Served, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: Reason, code: grpc.StatusCode
) -> None:
    async def fail(_self: Leader, _command: Command) -> Reply:
        raise error

    monkeypatch.setattr(Leader, "submit", fail)
    details = await failure(served.jobs.SubmitJob(job_pb2.SubmitJobRequest(request_id="r-7", spec=job_spec())))
    assert (details.reason, details.code) == (reason, code)
    assert details.metadata["cause_id"] == "r-7"
    assert "secret" not in details.message
    assert ('"call.broken"' in served.log.getvalue()) == (reason is Reason.INVARIANT_BROKEN)


async def test_a_change_that_takes_too_long_may_have_happened(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_self: Leader, _command: Command | None = None) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("controld.service.interceptor.UNARY_SECONDS_MAX", 0.01)
    monkeypatch.setattr(Leader, "submit", hang)
    monkeypatch.setattr(Leader, "barrier", hang)
    details = await failure(served.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=job_spec())))
    assert details.reason is Reason.OUTCOME_UNKNOWN
    details = await failure(served.jobs.GetJob(job_pb2.GetJobRequest(name="jobs/a")))
    assert details.reason is Reason.OVERLOADED


async def test_calls_beyond_the_bound_are_turned_away_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controld.service.interceptor.UNARY_CALLS_MAX", 0)
    details = await failure(served.jobs.GetJob(job_pb2.GetJobRequest(name="jobs/a")))
    assert (details.reason, details.retry_after_ms) == (Reason.OVERLOADED, 500)
    monkeypatch.setattr("controld.service.interceptor.STREAMS_MAX", 0)
    details = await failure(served.jobs.WatchJobs(job_pb2.WatchJobsRequest()))
    assert details.reason is Reason.OVERLOADED


async def http(address: str, request: bytes) -> tuple[str, str]:
    """(status line, body)."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return head.partition("\r\n")[0], body


async def test_metrics_count_calls_commits_jobs_and_nodes(served: Served) -> None:
    agent = await FakeAgent(served, "n1").join()
    await served.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=job_spec()))
    await failure(served.jobs.GetJob(job_pb2.GetJobRequest(name="jobs/a")))
    status, body = await http(served.ports.metrics_address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status == "HTTP/1.1 200 OK"
    lines = set(body.splitlines())
    assert 'virial_controld_grpc_calls_total{code="OK",method="SubmitJob"} 1.0' in lines
    assert 'virial_controld_grpc_calls_total{code="NOT_FOUND",method="GetJob"} 1.0' in lines
    assert 'virial_controld_sessions{liveness="LIVE"} 1.0' in lines
    assert "virial_controld_connected_nodes 1.0" in lines
    assert any(line.startswith("virial_controld_commits_total ") for line in lines)
    assert sum(float(line.split()[-1]) for line in lines if line.startswith("virial_controld_jobs{")) == 1.0
    assert "uid-n1" not in body
    await agent.leave()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /other HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK"),
        (b"nonsense\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"x" * 100_000, ""),
    ],
)
async def test_other_requests_to_the_metrics_port(served: Served, request_: bytes, status: str) -> None:
    try:
        answer, body = await http(served.ports.metrics_address, request_)
    except ConnectionResetError:  # hung up on while still sending
        answer, body = "", ""
    assert answer == status
    assert not body or not request_.startswith(b"HEAD")


async def why_it_does_not_start(config: Config) -> str:
    app = App(config, log=make_log(io.StringIO()), planner=InlinePlanner(plan))
    with pytest.raises(StartError, match="cannot use the TLS files") as caught:
        await app.start()
    assert caught.value.status == 2
    return str(caught.value)


async def test_tls_files_that_cannot_be_used_are_told_before_anyone_connects(tmp_path: Path) -> None:
    operator = Operator(tmp_path / "certs")
    own, user = operator.issue("controller", "c1"), operator.issue("user", "alice")
    config = secure_config(quick_config(tmp_path / "c1"), own)
    other_key = replace(config.tls, key=str(user.key))
    assert "do not fit together" in await why_it_does_not_start(replace(config, tls=other_key))
    no_role = await why_it_does_not_start(secure_config(config, user))
    assert "spiffe://rack-7/user/alice" in no_role
    assert "virial admin certs issue controller" in no_role
    own.ca.write_text("nothing")
    assert str(own.ca) in await why_it_does_not_start(config)


async def test_a_controller_that_lost_its_leadership_ends_with_an_error(tmp_path: Path) -> None:
    """Its supervisor starts it anew; until then agents and callers look for another leader."""
    app = App(quick_config(tmp_path), log=make_log(io.StringIO()), planner=InlinePlanner(plan))
    running = asyncio.create_task(app.run())
    async with asyncio.timeout(HANG_SECONDS):
        await app.started.wait()
        app.leader.lost.set()
        assert await running == 1


async def test_committed_events_are_in_the_log(served: Served) -> None:
    await served.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=job_spec()))
    await asyncio.sleep(0)
    entries = [json.loads(line) for line in served.log.getvalue().splitlines()]
    (entry,) = [entry for entry in entries if entry["event"] == "job.submitted"]
    assert (entry["job"], entry["ranks"], entry["level"]) == ("train-1", 1, "info")
    assert "revision" in entry
