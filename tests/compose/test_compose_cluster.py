"""The containers themselves: README's first job, and the leading controller killed under one. VIRIAL_DOCKER=1 runs it.

Images that are missing are built (`docker-compose build` builds them anew). DOCKER names the docker to use.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 300.0
BUILD_SECONDS = 1_800.0
DOCKER = os.environ.get("DOCKER", "docker")
DAEMONS = [*(f"controld-{i}" for i in range(3)), *(f"member-{i}" for i in range(3)), *(f"node-{i}" for i in range(4))]
# Long enough to be under way when the leader is killed.
LONG_JOB = 'task.command=[python3, examples/train.py, --steps, "8000", --checkpoint-every, "200"]'
# The task's last step, whatever it was set to.
STEPS = 8_000

pytestmark = [
    pytest.mark.skipif(os.environ.get("VIRIAL_DOCKER") != "1", reason="VIRIAL_DOCKER=1 starts containers"),
    pytest.mark.timeout(BUILD_SECONDS + 2 * HANG_SECONDS),
]


@dataclass
class Compose:
    command: list[str]
    project: str

    def run(self, *words: str, seconds: float = HANG_SECONDS) -> str:
        done = subprocess.run(
            [*self.command, "-p", self.project, *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def virial(self, *words: str) -> str:
        return self.run("exec", "-T", "cli", "virial", *words)

    def json(self, *words: str) -> Any:
        return json.loads(self.virial(*words, "-o", "json"))

    def container(self, service: str) -> str:
        (found,) = self.run("ps", "-q", service).split()
        return found

    def health(self) -> dict[str, str]:
        form = '{{index .Config.Labels "com.docker.compose.service"}} {{.State.Health.Status}}'
        containers = [self.container(service) for service in DAEMONS]
        lines = docker("inspect", "-f", form, *containers).splitlines()
        return {service: status for service, _, status in (line.partition(" ") for line in lines)}


def docker(*words: str) -> str:
    return subprocess.run([DOCKER, *words], capture_output=True, text=True, timeout=HANG_SECONDS, check=True).stdout


def until(look: Callable[[], T | None], what: str) -> T:
    give_up_s = time.monotonic() + HANG_SECONDS
    while not (found := look()):
        assert time.monotonic() < give_up_s, f"never: {what}"
        time.sleep(0.5)
    return found


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    v2 = subprocess.run([DOCKER, "compose", "version"], capture_output=True, check=False).returncode == 0
    if not v2 and shutil.which("docker-compose") is None:
        pytest.fail("VIRIAL_DOCKER=1 needs docker-compose or docker's plugin compose")
    made = Compose([DOCKER, "compose"] if v2 else ["docker-compose"], f"vt{uuid.uuid4().hex[:8]}")
    try:
        made.run("up", "-d", seconds=BUILD_SECONDS)
        until(lambda: sum(node["schedulable"] for node in made.json("nodes")) == 4, "four nodes take work")
        yield made
    finally:
        made.run("down", "-v")
        label = f"label=com.docker.compose.project={made.project}"
        assert not docker("ps", "-aq", "--filter", label).split()
        assert not docker("volume", "ls", "-q", "--filter", label).split()


def test_the_first_job_of_the_readme_runs(compose: Compose) -> None:
    compose.virial("submit", "examples/train.yaml", "--wait")
    assert compose.json("job", "train-1")["state"] == "SUCCEEDED"
    assert "starts after step 0" in compose.virial("logs", "train-1", "--rank", "0")


def test_every_daemon_gets_healthy_and_runs_as_nobody_special(compose: Compose) -> None:
    until(lambda: set(compose.health().values()) == {"healthy"}, "all healthy")
    for service in DAEMONS:
        assert compose.run("exec", "-T", service, "id", "-u").strip() == "10001"
    controller = compose.container("controld-0")
    assert docker("inspect", "-f", "{{.HostConfig.ReadonlyRootfs}}", controller).strip() == "true"
    # What holds the state of one controller is not there for another, nor for a node.
    assert "Permission denied" not in compose.run("exec", "-T", "controld-0", "ls", "/var/lib/virial/member")
    assert compose.run("exec", "-T", "node-0", "ls", "/var/lib/virial/member", "/var/lib/virial/controld").split() == [
        "/var/lib/virial/controld:",
        "/var/lib/virial/member:",
    ]


def test_the_leading_controller_is_killed_and_the_job_goes_on(compose: Compose) -> None:
    job = compose.virial("submit", "examples/train.yaml", "--set", LONG_JOB).strip()

    def step() -> int:
        return max((one["step"] for one in compose.json("job", job)["checkpoints"]), default=0)

    until(lambda: step() > 0, "a checkpoint")
    leader: str = compose.json("status")["leader"]
    acknowledged = compose.virial("submit", "examples/train.yaml", "--set", "gang.ranks=1").strip()
    docker("kill", compose.container(leader))
    assert compose.json("status")["leader"] != leader
    assert step() < STEPS, "the job was over before the kill"
    until(lambda: compose.json("job", job)["state"] == "SUCCEEDED", "the job ends")
    assert compose.json("job", job)["restarts"] == 0, "no rank was stopped for want of a controller"
    until(lambda: compose.json("job", acknowledged)["state"] == "SUCCEEDED", "what was acknowledged runs too")
    assert any(f"{leader}:7700" in problem for problem in compose.json("status")["problems"])
    compose.run("start", leader)
    until(lambda: not any(leader in problem for problem in compose.json("status")["problems"]), "it is back")
