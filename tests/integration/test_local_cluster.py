"""A local cluster of three controllers: what it survives, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import virial
from tests.support_etcd import require_etcd
from virial.cli.together import rows
from virial.errors import VirialError
from virial.local import LocalCluster, Supervision
from virial.models import JobSpec, Resources, TaskSpec

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 120.0
PYTHON_PATH = os.pathsep.join(str(ROOT / part) for part in (".", "client", "protos"))


def until(look: Callable[[], T | None], what: str) -> T:
    give_up_s = time.monotonic() + HANG_SECONDS
    while not (found := look()):
        assert time.monotonic() < give_up_s, f"never: {what}"
        time.sleep(0.05)
    return found


def processes_of(directory: Path) -> list[str]:
    """Command lines of what lives in or below a directory, or names it."""
    found: list[str] = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and process.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(directory) in line or str(directory) in os.readlink(process / "cwd"):
                    found.append(line)
    return found


def address_of(cluster: LocalCluster, name: str) -> str:
    argv = cluster.part(name).argv
    return argv[argv.index("--listen") + 1]


def job(name: str, code: str) -> JobSpec:
    return JobSpec(
        name=name,
        resources=Resources(cpu_millis=100, memory_bytes=64 << 20),
        task=TaskSpec((sys.executable, "-c", code), grace_ns=0),
    )


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short: sockets lie below it, and their paths are bounded."""
    require_etcd()
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    made = Path(tempfile.mkdtemp(prefix="vl-"))
    try:
        yield made
        assert processes_of(made) == []
    finally:
        shutil.rmtree(made, ignore_errors=True)


def test_the_leader_and_its_member_are_killed_and_the_job_goes_on_and_ends(directory: Path) -> None:
    with LocalCluster(directory, nodes=2, controllers=3) as cluster:
        supervision = Supervision(cluster, time.monotonic())
        with virial.SyncClient(cluster.address, timeout_s=HANG_SECONDS) as client:
            until(lambda: sum(n.schedulable for n in client.list_nodes(brief=True)) == 2, "both nodes ready")
            go = directory / "go"
            code = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.1)"
            running = client.submit_job(job("long", code)).id
            until(lambda: client.get_job(running).state == "RUNNING", "the job runs")
            before = client.get_status().problems  # an old etcd is said always
            leader = cluster.leader()
            member = f"member-{leader.removeprefix('controld-')}"
            etcd = cluster.etcd_pid(member)
            assert etcd is not None
            assert cluster.leading_member() in {part.name for part in cluster.members}
            acknowledged = client.submit_job(job("acknowledged", "pass"), request_id="once").id
            cluster.part(leader).kill()
            os.kill(etcd, signal.SIGKILL)
            cluster.part(member).kill()
            assert cluster.leader() != leader
            assert client.get_job(acknowledged).id == acknowledged
            told = dict(rows(client.list_controllers()))
            assert f"{address_of(cluster, leader)} does not answer" in told["controllers"]
            assert f"{member} does not answer" in told["members"]
            assert client.submit_job(job("acknowledged", "pass"), request_id="once").id == acknowledged
            current = client.get_job(running).current
            assert current is not None
            assert current.number == 1, "no task was stopped for want of a controller"
            said = supervision.step(time.monotonic())
            assert {sentence.split()[0] for sentence in said} == {leader, member}
            go.touch()
            assert client.wait_job(running).state == "SUCCEEDED"
            assert client.wait_job(acknowledged).state == "SUCCEEDED"
            until(lambda: client.get_status().problems == before, "all of it is well again")
    for part in cluster.all_parts():
        assert "Traceback" not in part.log.read_text(errors="replace"), part.name


def test_state_outlives_a_stop_and_a_part_whose_state_is_gone_is_not_started_again(directory: Path) -> None:
    with LocalCluster(directory, nodes=0, controllers=3) as cluster:
        address = cluster.address
        with virial.SyncClient(address, timeout_s=HANG_SECONDS) as client:
            made = client.submit_job(job("kept", "pass")).id
    with pytest.raises(VirialError, match="of a cluster of other parts"):
        LocalCluster(directory, nodes=0).start()
    with LocalCluster(directory, nodes=0, controllers=3) as cluster:
        assert cluster.address == address
        with virial.SyncClient(address, timeout_s=HANG_SECONDS) as client:
            assert client.get_job(made).id == made
        supervision = Supervision(cluster, time.monotonic())
        supervision.step(time.monotonic())
        member = cluster.part("member-1")
        member.kill()
        until(lambda: not [line for line in processes_of(member.data_dir) if "controld" not in line], "its etcd ended")
        shutil.rmtree(member.data_dir)
        assert ["which it had before, is gone" in said for said in supervision.step(time.monotonic())] == [True]
        assert supervision.step(time.monotonic()) == [], "said once"
        assert not member.alive


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_virial_up_however_it_ends(directory: Path, end: signal.Signals) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VIRIAL_")}
    runtime = directory / "runtime"
    runtime.mkdir(mode=0o700)
    command = ["env", "--default-signal=INT,HUP", sys.executable, "-m", "virial.cli", "up", "-o", "json"]
    command += ["--controllers", "3", "--nodes", "1", "--directory", str(directory / "c")]
    with subprocess.Popen(
        command, env=environment | {"XDG_RUNTIME_DIR": str(runtime)}, stdout=subprocess.PIPE, text=True
    ) as up:
        assert up.stdout is not None
        found = json.loads(up.stdout.readline())
        assert (found["controllers"], len(found["address"].split(","))) == (3, 3)
        up.send_signal(end)
        try:
            code = up.wait(HANG_SECONDS)
        finally:
            up.kill()
    assert code == (-signal.SIGKILL if end == signal.SIGKILL else 130), "it ends what it started before it ends"
    until(lambda: not processes_of(directory), "everything ended")


def test_without_etcd_one_line_says_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        VirialError, match=r"^several controllers need etcd on this machine: apt-get install etcd-server\Z"
    ):
        LocalCluster(tmp_path / "c", nodes=1, controllers=3).start()


def test_an_even_number_of_controllers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VirialError, match="take 1, 3 or 5"):
        LocalCluster(tmp_path, nodes=1, controllers=2)
