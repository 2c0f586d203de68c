"""Mistakes and accidents from outside, on a cluster with work on it: one clear message each, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import grpc
import pytest

from tests.chaos.rack import HANG_SECONDS, PATHS, Rack, alive, rack, until
from tests.support_service import job_spec
from virial.models import JobState
from virialpb.v1 import cluster_pb2, cluster_pb2_grpc, job_pb2, job_pb2_grpc

pytestmark = pytest.mark.timeout(300)
GOOD = {"name": "a", "resources": {"cpu": "100m", "memory": "64MiB"}, "task": {"command": ["true"]}}


@pytest.fixture(scope="module")
def made() -> Generator[Rack]:
    with rack(nodes=2) as made:
        client = made.client()
        client.submit_job(made.spec("work", ranks=2), job_id="work")
        made.until_running("work", 2)
        yield made
        step = client.get_job("work").progress_step or 0
        until(lambda: (client.get_job("work").progress_step or 0) > step, "the job goes on")


@pytest.fixture(autouse=True)
def nothing_is_lost(made: Rack) -> Iterator[None]:
    """Whatever a test does: the job goes on in the same processes, under the same lease."""
    client, pids = made.client(), made.pids("work")
    assert len(pids) == 2
    before = client.get_job("work")
    yield
    assert made.pids("work") == pids
    assert all(map(alive, pids.values()))
    after = client.get_job("work")
    assert (after.generation, after.restarts) == (1, 0)
    assert after.current is not None
    assert before.current is not None
    assert after.current.epoch == before.current.epoch


def run(*command: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": PATHS, **environ}
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=HANG_SECONDS,
    )


def virial(made: Rack, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("virial.cli", "--address", made.cluster.address, *arguments, cwd=made.base)


def message(done: subprocess.CompletedProcess[str], status: int, program: str = "virial") -> str:
    """The one thing that it says: no traceback, nothing on standard output, the right exit status."""
    text = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("{"))
    assert "Traceback" not in done.stderr + done.stdout
    assert (done.returncode, done.stdout) == (status, ""), text
    assert text.startswith(f"{program}: ")
    assert f"\n{program}: " not in text
    return text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: [unclosed", "job.yaml:"),
        ("", "a job specification (a mapping)"),
        (json.dumps(GOOD | {"gang": {"rnks": 3}}), "gang.rnks: unknown field: did you mean 'ranks'?"),
        (json.dumps(GOOD | {"resources": {"cpu": "1", "memory": "64MB2"}}), "resources.memory: "),
        (
            json.dumps(GOOD | {"lease": {"fence_after": "30"}}),
            "lease.fence_after: no unit in '30': did you mean '30s'?",
        ),
        (json.dumps(GOOD | {"gang": {"ranks": -1}}), "gang.ranks: -1 is outside"),
        (json.dumps(GOOD | {"task": {"command": "rm -rf /"}}), "task.command: "),
        (json.dumps({"name": "a", "task": {"command": ["true"]}}), "resources.cpu: required field is missing"),
        ("\0\1\2", "job.yaml"),
        ("name: '" + "x" * (2 << 20) + "'", "job.yaml"),
    ],
)
def test_a_malformed_job(made: Rack, text: str, words: str) -> None:
    (made.base / "job.yaml").write_text(text)
    told = message(virial(made, "submit", "job.yaml"), 2)
    assert words in told
    assert len(told) < 1500


def test_what_only_the_controller_can_see_is_told_by_field(made: Rack) -> None:
    (made.base / "job.yaml").write_text(json.dumps(GOOD | {"lease": {"fence_after": "2s"}}))
    told = message(virial(made, "submit", "job.yaml"), 2)
    assert "fence_after" in told


@pytest.mark.parametrize(
    "arguments",
    [
        ("job", "nope"),
        ("cancel", "nope"),
        ("explain", "nope"),
        ("node", "nope"),
        ("drain", "nope", "--reason", "x"),
    ],
)
def test_what_does_not_exist(made: Rack, arguments: tuple[str, ...]) -> None:
    told = message(virial(made, *arguments), 3)
    assert told.count("\n") == 0
    assert "nope" in told


def test_an_impossible_gang_waits_with_its_reasons_and_nobody_waits_for_it(made: Rack) -> None:
    client = made.client()
    client.submit_job(made.spec("vast", ranks=40), job_id="vast")

    def planned() -> bool:
        reasons = client.explain_job("vast").reasons
        return bool(reasons) and all(reason.nodes for reason in reasons)

    until(planned, "the planner's reasons")
    assert "ranks needed 40" in virial(made, "explain", "vast").stdout
    client.submit_job(made.spec("small", command=("true",)), job_id="small")
    assert made.until_ended("small").state is JobState.SUCCEEDED
    assert client.get_job("vast").state is JobState.PENDING
    client.cancel_job("vast")
    assert made.until_ended("vast").state is JobState.CANCELLED


def noded(made: Rack, data_dir: Path, *arguments: str, name: str = "other") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "noded", "--name", name, "--data-dir", str(data_dir)]
    command += ["--controllers", made.cluster.address, "--advertise-address", "127.0.0.1", "--allow-root-tasks"]
    command += ["--kill-tasks-on-exit", "--cpu", "100m", "--memory", "64MiB", "--log-format", "json", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def failed(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=HANG_SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_case_c9_an_agent_with_a_live_nodes_identity_is_refused_and_told(made: Rack) -> None:
    client = made.client()
    original = client.get_node("node-0")
    clone = made.base / "clone"
    clone.mkdir()
    shutil.copy(made.node("node-0").data_dir / "node.json", clone / "node.json")
    process = noded(made, clone)
    try:
        events = until(
            lambda: [e for e in client.list_events(node="node-0") if "DUPLICATE" in e.reason or "duplicate" in e.kind],
            "an event of the clone",
        )
        assert len(events) >= 1
        assert client.get_node("node-0").uid == original.uid
        assert client.get_node("node-0").connected
        assert [node.name for node in client.list_nodes(brief=True)] == ["node-0", "node-1"]
    finally:
        process.terminate()
        done = failed(process)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    refused = [line for line in done.stderr.splitlines() if "session.refused" in line]
    assert refused
    assert "DUPLICATE_NODE" in refused[0]
    assert len(refused) < 20  # told, and not in a hurry


def test_a_copy_of_a_data_directory_with_the_tasks_in_it(made: Rack) -> None:
    """On the same host what the copy tells of are live tasks, not ones that were left behind."""
    copy = made.base / "copy"
    shutil.copytree(made.node("node-0").data_dir, copy, ignore=shutil.ignore_patterns("run", "*.sock"))
    told = message(failed(noded(made, copy, name="node-0")), 1, "noded")
    assert "is a copy: the guardian that wrote it" in told


def test_a_second_agent_on_a_data_directory(made: Rack) -> None:
    told = message(failed(noded(made, made.node("node-0").data_dir, name="node-0")), 2, "noded")
    assert "is in use by a noded that runs" in told


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--cpu", "lots"), 2, "cpu"),
        (("--memory", "64"), 2, "memory"),
        (("--controllers", "nowhere"), 2, "controllers"),
        (("--data-dir", "/proc/virial"), 2, "/proc/virial"),
        (("--metrics-listen", "TAKEN"), 1, "metrics_listen: cannot listen on 127.0.0.1:"),
        (("--rdl", "/nowhere.yaml"), 2, "cannot read /nowhere.yaml"),
    ],
)
def test_an_agent_that_cannot_start(made: Rack, arguments: tuple[str, str], status: int, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flag, value = arguments
        value = value.replace("TAKEN", f"127.0.0.1:{taken.getsockname()[1]}")
        told = message(failed(noded(made, made.base / "new-node", flag, value)), status, "noded")
    assert words in told
    assert told.count("\n") == 0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--listen", "127.0.0.1:TAKEN"), 3, "Address already in use"),
        (("--data-dir", "/proc/virial"), 4, "/proc/virial"),
        (("--data-dir", "USED"), 4, "in use by another controld"),
        (("--listen", "0.0.0.0:0"), 2, "--insecure"),
        (("--listen", "nowhere.invalid:0"), 2, "--insecure"),
    ],
)
def test_a_controller_that_cannot_start(made: Rack, arguments: tuple[str, str], status: int, words: str) -> None:
    taken = made.cluster.address.rpartition(":")[2]
    used = str(made.controller.data_dir)
    command = ["controld", "--data-dir", str(made.base / "new-controller"), "--metrics-listen", "127.0.0.1:0"]
    if "--listen" not in arguments:
        command += ["--listen", "127.0.0.1:0"]
    command += [part.replace("TAKEN", taken).replace("USED", used) for part in arguments]
    told = message(run(*command, cwd=made.base), status, "controld")
    assert words in told
    assert told.count("\n") == 0


@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_a_damaged_database_stops_the_controller_and_costs_nothing_once_it_is_back(made: Rack, damage: str) -> None:
    client = made.client()
    client.submit_job(made.spec(f"before-{damage}", command=("true",)), job_id=f"before-{damage}")
    made.until_ended(f"before-{damage}")
    assert made.controller.process is not None
    made.controller.process.terminate()  # so that the log is in the database, and what is damaged is damaged
    assert made.controller.process.wait(HANG_SECONDS) == 0
    backup = made.base / f"backup-{damage}"
    shutil.copytree(made.controller.data_dir, backup)
    database = made.controller.data_dir / "state.sqlite3"
    whole = database.read_bytes()
    if damage == "truncated":
        database.write_bytes(whole[: len(whole) // 2])
    else:
        middle = len(whole) // 2
        database.write_bytes(whole[:middle] + b"\xff" * 4096 + whole[middle + 4096 :])
    damaged = database.read_bytes()
    arguments = made.controller.argv[1:]
    told = message(run(*arguments, cwd=made.base), 4, "controld")
    assert str(database) in told
    assert database.read_bytes() == damaged  # evidence, and perhaps all there is
    shutil.rmtree(made.controller.data_dir)
    shutil.copytree(backup, made.controller.data_dir)
    made.restart()
    made.until_ready()
    assert client.get_job(f"before-{damage}").state is JobState.SUCCEEDED


def test_clients_that_leave_in_the_middle_of_a_call(made: Rack) -> None:
    host, _, port = made.cluster.address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for said in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", preface, preface + b"\0\0\xff\x04", os.urandom(4096)):
        with socket.create_connection((host, int(port)), timeout=HANG_SECONDS) as hasty:
            hasty.sendall(said)
    with grpc.insecure_channel(made.cluster.address) as channel:
        jobs, cluster = job_pb2_grpc.JobServiceStub(channel), cluster_pb2_grpc.ClusterServiceStub(channel)
        for n in range(20):
            request = job_pb2.SubmitJobRequest(request_id=f"hasty-{n}", job_id=f"hasty-{n}", spec=job_spec())
            jobs.SubmitJob.future(request).cancel()
            watch = cluster.WatchEvents(cluster_pb2.WatchEventsRequest())
            next(watch)
            watch.cancel()
    follower = subprocess.Popen(
        [sys.executable, "-m", "virial.cli", "--address", made.cluster.address, "events", "-f"],
        env={**os.environ, "PYTHONPATH": PATHS},
        stdout=subprocess.PIPE,
    )
    assert follower.stdout is not None
    assert follower.stdout.readline()
    follower.send_signal(signal.SIGKILL)
    follower.wait()
    follower.stdout.close()
    client = made.client()
    # Each of those submissions happened or did not; the same request id finds out, and does it once.
    with grpc.insecure_channel(made.cluster.address) as channel:
        jobs = job_pb2_grpc.JobServiceStub(channel)
        for n in range(20):
            request = job_pb2.SubmitJobRequest(request_id=f"hasty-{n}", job_id=f"hasty-{n}", spec=job_spec())
            assert jobs.SubmitJob(request, timeout=HANG_SECONDS).name == f"jobs/hasty-{n}"
    assert sum(job.id.startswith("hasty-") for job in client.list_jobs()) == 20
    for n in range(20):
        client.cancel_job(f"hasty-{n}")
    for n in range(20):
        made.until_ended(f"hasty-{n}")


def test_no_controller_at_all_is_told_within_the_time_given(made: Rack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    done = run("virial.cli", "--address", nobody, "--timeout", "0.5", "jobs", cwd=made.base)
    told = message(done, 4)
    assert nobody in told
    assert "is controld running there?" in told
