"""`controld` as a process: what it says and how it exits when it cannot start, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.support_service import job_spec
from virialpb.v1 import job_pb2, job_pb2_grpc

HANG_SECONDS = 60.0
FREE = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`controld` to its end."""
    command = [sys.executable, "-m", "controld", *arguments]
    return subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )


@contextmanager
def running(directory: Path, *arguments: str) -> Generator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """`controld` once it listens, and what its ports.json says."""
    command = [sys.executable, "-m", "controld", "--data-dir", str(directory), *(arguments or FREE)]
    ports = directory / "ports.json"
    ports.unlink(missing_ok=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while not ports.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        yield process, json.loads(ports.read_text())
    finally:
        process.kill()
        process.wait()


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str]:
    """(exit status, what it wrote)."""
    process.send_signal(number)
    output, errors = process.communicate(timeout=HANG_SECONDS)
    return process.returncode, output + errors


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last words: one line for the operator, and no traceback before it."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("controld: ")
    return lines[0]


def test_what_was_acknowledged_is_there_after_a_kill_and_after_an_end(tmp_path: Path) -> None:
    for expected, number in ((0, signal.SIGKILL), (1, signal.SIGTERM), (2, signal.SIGINT)):
        with running(tmp_path) as (process, ports):
            with grpc.insecure_channel(ports["grpc_address"]) as channel:
                jobs = job_pb2_grpc.JobServiceStub(channel)
                assert len(jobs.ListJobs(job_pb2.ListJobsRequest()).jobs) == expected
                jobs.SubmitJob(job_pb2.SubmitJobRequest(request_id=f"r{expected}", spec=job_spec()))
            status, _ = end(process, number)
            assert status == (-signal.SIGKILL if number is signal.SIGKILL else 0)
            assert (tmp_path / "ports.json").exists() == (number is signal.SIGKILL)


def test_ports_are_private_and_name_what_is_bound(tmp_path: Path) -> None:
    with running(tmp_path / "made" / "for-it") as (process, ports):
        assert (tmp_path / "made" / "for-it" / "ports.json").stat().st_mode & 0o777 == 0o600
        assert ports["pid"] == process.pid
        for name in ("grpc_address", "metrics_address"):
            host, _, port = ports[name].rpartition(":")
            with socket.create_connection((host, int(port)), timeout=HANG_SECONDS):
                pass


def test_a_second_controller_on_the_same_data_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as (process, ports):
        done = run("--data-dir", str(tmp_path), *FREE)
        assert done.returncode == 4
        assert f"in use by another controld (pid {process.pid})" in one_line(done)
        with grpc.insecure_channel(ports["grpc_address"]) as channel:
            assert job_pb2_grpc.JobServiceStub(channel).ListJobs(job_pb2.ListJobsRequest()).jobs == []


@pytest.mark.parametrize("flag", ["--listen", "--metrics-listen"])
def test_a_port_in_use(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("--data-dir", str(tmp_path), *FREE, flag, address)
    assert done.returncode == 3
    line = one_line(done)
    assert "Address already in use" in line
    assert address.rpartition(":")[2] in line
    assert flag in line


def test_a_data_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    done = run("--data-dir", str(tmp_path / "data"), *FREE)
    assert done.returncode == 4
    assert f"cannot use the data directory {tmp_path / 'data'}" in one_line(done)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_data_directory_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = run("--data-dir", str(tmp_path), *FREE)
    tmp_path.chmod(0o700)
    assert done.returncode == 4
    assert "Permission denied" in one_line(done)


def test_a_place_where_no_directory_can_be_made(tmp_path: Path) -> None:
    done = run("--data-dir", "/proc/virial", *FREE)
    assert done.returncode == 4
    assert "cannot use the data directory /proc/virial" in one_line(done)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_a_damaged_database_is_named_and_left_alone(tmp_path: Path, damage: str) -> None:
    with running(tmp_path) as (process, _):
        assert end(process)[0] == 0
    database = tmp_path / "state.sqlite3"
    whole = database.read_bytes()
    content = {"truncated": whole[: len(whole) // 2], "garbage": b"x" * len(whole), "empty": b""}[damage]
    database.write_bytes(content)
    done = run("--data-dir", str(tmp_path), *FREE)
    assert done.returncode == 4
    line = one_line(done)
    assert str(database) in line
    assert "controld restore" in line
    assert database.read_bytes() == content


def test_settings_are_checked_and_printed(tmp_path: Path) -> None:
    file = tmp_path / "controld.toml"
    file.write_text('[lease]\nfence_after = "30s"\n')
    done = run("--config", str(file), "--print-config", "--log-level", "debug", VIRIAL_CONTROLD__LISTEN="127.0.0.1:9")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["lease.fence_after", "30s", f"({file})"] in rows
    assert ["listen", "127.0.0.1:9", "(VIRIAL_CONTROLD__LISTEN)"] in rows
    assert ["log.level", "debug", "(--log-level)"] in rows
    assert run("--config", str(file), "--check-config").stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--config", "/nowhere.toml"), "cannot read the configuration file /nowhere.toml: No such file"),
        (("--listen", "0.0.0.0:0"), "without TLS anyone there could run commands on every node"),
        (("--lease-fence-after", "1s"), "lease.fence_after: 1s is too short"),
        (("--lease-grace", "1"), "--lease-grace: "),
        (("--store-kind", "sqlit"), "did you mean 'sqlite'?"),
    ],
)
def test_wrong_settings_are_told_in_a_line(arguments: tuple[str, ...], words: str) -> None:
    done = run("--check-config", *arguments)
    assert done.returncode == 2
    assert words in one_line(done)


def test_an_unknown_flag_is_a_usage_error() -> None:
    done = run("--lisen", "x")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
