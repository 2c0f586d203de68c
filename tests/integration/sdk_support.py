"""Servers for tests of how the SDK calls, retries and redials: small ones that answer as told, and a real controld."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from virialpb.errors import ErrorDetails, details_for, trailing_metadata
from virialpb.reasons import Reason
from virialpb.v1 import job_pb2, job_pb2_grpc

Context = grpc.ServicerContext


@dataclass
class Script(job_pb2_grpc.JobServiceServicer):
    """Answers the first calls with `failures` in turn, then rightly. Every request is kept."""

    failures: list[Callable[[Context], None]] = field(default_factory=list[Callable[[Context], None]])
    requests: list[job_pb2.SubmitJobRequest | job_pb2.GetJobRequest | job_pb2.ListJobsRequest] = field(
        default_factory=list[job_pb2.SubmitJobRequest | job_pb2.GetJobRequest | job_pb2.ListJobsRequest]
    )
    log: bytes = b""
    log_requests: list[job_pb2.ReadLogsRequest] = field(default_factory=list[job_pb2.ReadLogsRequest])
    pages: dict[str, tuple[list[str], str]] = field(default_factory=dict[str, tuple[list[str], str]])

    def _fail(self, context: Context) -> None:
        if self.failures:
            self.failures.pop(0)(context)

    def SubmitJob(self, request: job_pb2.SubmitJobRequest, context: Context) -> job_pb2.Job:  # noqa: N802
        self.requests.append(request)
        self._fail(context)
        return job(request.job_id or "made")

    def GetJob(self, request: job_pb2.GetJobRequest, context: Context) -> job_pb2.Job:  # noqa: N802
        self.requests.append(request)
        self._fail(context)
        return job(request.name.removeprefix("jobs/"))

    def ListJobs(  # noqa: N802
        self, request: job_pb2.ListJobsRequest, context: Context
    ) -> job_pb2.ListJobsResponse:
        self.requests.append(request)
        self._fail(context)
        names, following = self.pages[request.page_token]
        return job_pb2.ListJobsResponse(jobs=[job(name) for name in names], next_page_token=following)

    def CancelJob(self, request: job_pb2.CancelJobRequest, context: Context) -> job_pb2.Job:  # noqa: N802
        raise NotImplementedError

    def ExplainJob(  # noqa: N802
        self, request: job_pb2.ExplainJobRequest, context: Context
    ) -> job_pb2.ExplainJobResponse:
        raise NotImplementedError

    def WatchJobs(  # noqa: N802
        self, request: job_pb2.WatchJobsRequest, context: Context
    ) -> Iterator[job_pb2.WatchJobsResponse]:
        raise NotImplementedError

    def ReadLogs(  # noqa: N802
        self, request: job_pb2.ReadLogsRequest, context: Context
    ) -> Iterator[job_pb2.ReadLogsResponse]:
        """Four bytes of the log a message; a failure comes after the first."""
        self.log_requests.append(request)
        for start in range(request.offset, len(self.log), 4):
            data = self.log[start : start + 4]
            yield job_pb2.ReadLogsResponse(data=data, generation=3, rank=request.rank, next_offset=start + len(data))
            self._fail(context)


def job(id_: str) -> job_pb2.Job:
    return job_pb2.Job(name=f"jobs/{id_}", state=job_pb2.Job.PENDING, progress_step=-1)


def refuse(reason: Reason, **metadata: str) -> Callable[[Context], None]:
    """Answer with a Reason, as a controller does."""

    def fail(context: Context) -> None:
        abort(context, details_for(reason, subject="jobs/x", metadata=metadata))

    return fail


def transport(code: grpc.StatusCode) -> Callable[[Context], None]:
    """Answer with a bare code, as a proxy or a broken connection does."""

    def fail(context: Context) -> None:
        context.abort(code, "no details")

    return fail


def abort(context: Context, details: ErrorDetails) -> None:
    context.set_trailing_metadata(trailing_metadata(details))
    context.abort(details.code, details.message)


@contextmanager
def serving(script: Script) -> Generator[str]:
    """A real server on a free port; its address."""
    server = grpc.server(ThreadPoolExecutor(4))
    job_pb2_grpc.add_JobServiceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


class Controller:
    """A real controld on a port of its own, killed outright and started again at will."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = "127.0.0.1:0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it serves."""
        ports = self.directory / "ports.json"
        ports.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "controld", "--data-dir", str(self.directory), "--listen", self.address]
        argv += ["--metrics-listen", "127.0.0.1:0", "--log-format", "json"]
        self.directory.mkdir(exist_ok=True)
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while self._process.poll() is None:
            with contextlib.suppress(FileNotFoundError, ValueError):
                self.address = str(json.loads(ports.read_bytes())["grpc_address"])
                return
            time.sleep(0.02)
        raise AssertionError((self.directory / "log").read_text())

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
