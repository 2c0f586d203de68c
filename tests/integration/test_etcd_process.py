"""`controld` on an etcd member, both as processes: what was acknowledged outlives the death of either."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from tests.support_etcd import free_ports, require_etcd, short_directory
from tests.support_service import job_spec
from virialpb.v1 import job_pb2, job_pb2_grpc

HANG_SECONDS = 60.0


@pytest.fixture
def directory() -> Iterator[Path]:
    require_etcd()
    with ExitStack() as stack:
        yield short_directory(stack)


@contextmanager
def running(*command: str) -> Generator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-m", "controld", *command], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def member(directory: Path, port: int) -> tuple[str, ...]:
    return (
        *("member", "--name", "c1", "--directory", str(directory / "member"), "--log-format", "json"),
        *("--peer", f"c1=http://127.0.0.1:{port}"),
    )


def controller(directory: Path) -> tuple[str, ...]:
    return (
        *("--data-dir", str(directory / "controld"), "--listen", "127.0.0.1:0", "--metrics-listen", "off"),
        *("--store-kind", "etcd", "--store-member-dir", str(directory / "member")),
    )


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < end, "hangs"
        time.sleep(0.02)


@contextmanager
def jobs_of(directory: Path, process: subprocess.Popen[str]) -> Generator[job_pb2_grpc.JobServiceStub]:
    ports = directory / "controld" / "ports.json"
    until(lambda: process.poll() is not None or ports.exists())
    assert process.poll() is None, process.stderr and process.stderr.read()
    with grpc.insecure_channel(json.loads(ports.read_text())["grpc_address"]) as channel:
        yield job_pb2_grpc.JobServiceStub(channel)


def submit(jobs: job_pb2_grpc.JobServiceStub, number: int) -> None:
    """As the SDK does: again with the same request id while the outcome is unknown or nobody leads."""
    end = time.monotonic() + HANG_SECONDS
    while True:
        try:
            jobs.SubmitJob(job_pb2.SubmitJobRequest(request_id=f"r{number}", spec=job_spec()), timeout=10)
            return
        except grpc.RpcError as error:
            retryable = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            if error.code() not in retryable or time.monotonic() > end:  # type: ignore[attr-defined]
                raise
        time.sleep(0.05)


def count(jobs: job_pb2_grpc.JobServiceStub) -> int:
    return len(jobs.ListJobs(job_pb2.ListJobsRequest(), timeout=10).jobs)


def etcd_pid(process: subprocess.Popen[str]) -> int:
    """As the member's supervisor says when it has started it."""
    assert process.stderr is not None
    while True:
        entry = json.loads(process.stderr.readline())
        if entry["event"] == "member.started":
            return int(entry["pid"])


def test_what_was_acknowledged_outlives_controller_and_member(directory: Path) -> None:
    with ExitStack() as stack:
        etcd = stack.enter_context(running(*member(directory, *free_ports(1))))
        pid = etcd_pid(etcd)
        with running(*controller(directory)) as process, jobs_of(directory, process) as jobs:
            submit(jobs, 1)
            os.kill(pid, signal.SIGKILL)  # the member alone: its supervisor starts it again, and the controller waits
            submit(jobs, 2)
            assert count(jobs) == 2
            pid = etcd_pid(etcd)
            process.kill()
        (directory / "controld" / "ports.json").unlink()
        with running(*controller(directory)) as process, jobs_of(directory, process) as jobs:
            assert count(jobs) == 2
            submit(jobs, 2)
            assert count(jobs) == 2, "the same request is carried out once, ever"
            os.kill(pid, signal.SIGKILL)  # both at once
            process.kill()
        pid = etcd_pid(etcd)
        (directory / "controld" / "ports.json").unlink()
        with running(*controller(directory)) as process, jobs_of(directory, process) as jobs:
            submit(jobs, 3)
            assert count(jobs) == 3
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_SECONDS) == 0
        etcd.send_signal(signal.SIGTERM)
        assert etcd.wait(HANG_SECONDS) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_killed_supervisor_takes_its_member_along(directory: Path) -> None:
    with running(*member(directory, *free_ports(1))) as etcd:
        pid = etcd_pid(etcd)
        until((directory / "member" / "started").exists)
        etcd.kill()
        etcd.wait()
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


def test_a_controller_without_its_member_says_what_is_missing(directory: Path) -> None:
    """Not before it has waited for it: both are started together when a machine boots."""
    with running(*controller(directory), "--store-open-timeout", "1s") as process:
        try:
            status = process.wait(HANG_SECONDS)
        finally:
            assert process.stderr is not None
            said = process.stderr.read()
    assert status == 1
    (line,) = [line for line in said.splitlines() if not line.startswith("{")]
    assert "no answer from etcd" in line
    assert "is its member running?" in line


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("--peer", "c2=http://127.0.0.1:1"), 2, "the member 'c1' is not among c2"),
        (("--peer", "c1=http://127.0.0.1:1", "--peer", "c2=http://127.0.0.1:2"), 2, "1, 3 or 5 members, not 2"),
        (("--peer", "c1=http://10.0.0.1:2380"), 2, "can be reached from other machines, so its peers need TLS files"),
        (("--peer", "c1=https://127.0.0.1:2380"), 2, "set the peers' TLS files"),
        (("--peer", "c1"), 2, "write NAME=URL"),
        (("--peer", "c1=http://127.0.0.1:1", "--size-max", "8GB/s"), 2, "--size-max"),
    ],
)
def test_wrong_settings_of_a_member_are_told_in_a_line(
    tmp_path: Path, words: tuple[str, ...], status: int, told: str
) -> None:
    command = [sys.executable, "-m", "controld", "member", "--name", "c1", "--directory", str(tmp_path / "m"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == status
    (line,) = done.stderr.splitlines()
    assert line.startswith("controld member: ")
    assert told in line


def test_a_member_without_etcd_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "controld", "member", "--name", "c1", "--directory", str(tmp_path / "m")]
    done = subprocess.run(
        [*command, "--peer", "c1=http://127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={**os.environ, "PATH": str(tmp_path)},
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "controld member: etcd is not installed: apt-get install etcd-server\n",
    )
