"""The compose file, its Dockerfile and its script, read and not run. The rules are shown to catch what breaks them."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support_compose import asked, given, problems

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
DOCUMENT: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = DOCUMENT["services"]


def test_it_keeps_to_the_rules() -> None:
    assert problems(DOCUMENT) == []


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("name", "virial", "top level: name"),
        ("networks cluster", {}, "not internal"),
        ("services node-0 network_mode", "host", "network_mode is not allowed"),
        ("services node-0 privileged", True, "privileged is not allowed"),
        ("services node-0 ports", ["7700:7700"], "ports is not allowed"),
        ("services node-0 env_file", [{"path": "x"}], "env_file is not allowed"),
        ("services node-0 ulimits", {"nofile": 65_536}, "65536 open files"),
        ("services node-0 ulimits", {"nofile": {"soft": 1, "hard": 30_000}}, "30000 open files"),
        ("services node-0 cap_drop", [], "drop all capabilities"),
        ("services node-0 cap_add", ["SYS_ADMIN"], "adds"),
        ("services node-0 security_opt", [], "gain privileges"),
        ("services node-0 read_only", False, "write its own image"),
        ("services node-0 user", "root", "runs as root"),
        ("services node-0 healthcheck", None, "no whole healthcheck"),
        ("services node-0 healthcheck start_interval", "1s", "healthcheck.start_interval"),
        ("services node-0 mem_limit", None, "no mem_limit"),
        ("services node-0 restart", None, "not started again"),
        ("services member-0 cpu_shares", None, "starved"),
        ("services controld-0 cpu_shares", 1_024, "starved"),
        ("services node-0 depends_on", None, "wait for its certificates"),
        ("services node-0 volumes +", "/var/run/docker.sock:/s", "of the host"),
        ("services node-0 volumes +", "tls-node-1:/etc/virial:ro", "certificates tls-node-1"),
        ("services node-0 volumes +", "tls-node-1:/x", "certificates tls-node-1 at /x"),
        ("services node-0 volumes +", "tls-node-0:/etc/virial", "may write tls-node-0"),
        ("services cli volumes +", "authority:/a", "authority's keys"),
        ("services controld-0 volumes +", "member-1:/m:ro", "store of another"),
        ("services controld-0 volumes +", "member-0:/m", "member-0: written by"),
    ],
)
def test_what_breaks_a_rule_is_found(place: str, value: object, words: str) -> None:
    """None takes away what is at the place, `+` appends there."""
    broken = copy.deepcopy(DOCUMENT)
    *path, last = place.split()
    found: Any = broken
    for key in path:
        found = found[key]
    if last == "+":
        found.append(value)
    elif value is None:
        found.pop(last)
    else:
        found[last] = value
    assert any(words in problem for problem in problems(broken)), problems(broken)


def test_there_are_three_controllers_with_a_member_each_and_four_nodes() -> None:
    for kind, number in (("controld", 3), ("member", 3), ("node", 4)):
        assert sorted(name for name in SERVICES if name.startswith(f"{kind}-")) == [
            f"{kind}-{i}" for i in range(number)
        ]
    controllers = "controld-0:7700,controld-1:7700,controld-2:7700"
    peers = [f"member-{i}=https://member-{i}:2380" for i in range(3)]
    for i in range(3):
        command = SERVICES[f"controld-{i}"]["command"]
        assert command[command.index("--peers") + 1] == controllers
        assert command[command.index("--advertise") + 1] == f"controld-{i}:7700"
        assert command[command.index("--identity") + 1] == f"controld-{i}"
        command = SERVICES[f"member-{i}"]["command"]
        assert [word for word in command if word in peers] == peers
        assert command[command.index("--name") + 1] == f"member-{i}"
    for i in range(4):
        command = SERVICES[f"node-{i}"]["command"]
        assert command[command.index("--controllers") + 1] == controllers
        assert command[command.index("--name") + 1] == f"node-{i}"
    assert SERVICES["cli"]["environment"]["VIRIAL_ADDRESS"] == controllers


def test_every_file_of_certificates_that_is_asked_for_is_given_and_no_more() -> None:
    gives = given((ROOT / "deploy/docker/certs.sh").read_text())
    assert set(gives) == {"controld", "member", "node", "cli"}
    for name, service in SERVICES.items():
        if name != "certs":
            assert asked(service) == gives[name.partition("-")[0]], name
    volumes = {volume.partition(":")[0] for volume in SERVICES["certs"]["volumes"]}
    assert volumes == {"authority", *(f"tls-{name}" for name in SERVICES if name != "certs")}
    assert set(DOCUMENT["volumes"]) == {v.partition(":")[0] for s in SERVICES.values() for v in s.get("volumes", ())}


def test_what_the_dockerfile_copies_is_in_the_tree_and_is_sent_to_the_builder() -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == entry or source.startswith(f"{entry}/") for entry in sent), source
    assert not any(fnmatch(entry, "*.git*") or entry in ("tests", ".venv") for entry in sent)


def test_images_are_built_from_a_base_of_ones_choice_and_run_as_nobody_special() -> None:
    assert re.search(r"^ARG BASE=python:3\.1[123]-slim$", DOCKERFILE, re.MULTILINE)
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert {name: base for base, name in stages} == {"build": "${BASE}", "virial": "${BASE}", "member": "virial"}
    for name in ("virial", "member"):
        stage = re.split(rf"^FROM \S+ AS {name}$", DOCKERFILE, flags=re.MULTILINE)[1].partition("\nFROM ")[0]
        assert re.findall(r"^USER (\S+)$", stage, re.MULTILINE)[-1] == "virial"
    assert {service["build"]["target"] for service in SERVICES.values()} <= {name for _, name in stages}
    # Neither a frontend from a registry nor what only BuildKit has: both builders take it.
    assert "syntax=" not in DOCKERFILE
    assert "<<" not in DOCKERFILE
    assert "--mount" not in DOCKERFILE


def test_the_wheel_is_built_with_pins() -> None:
    (names,) = re.findall(r'pins\.py "constraints/\$pins" (.+) > build\.txt', DOCKERFILE)
    for lock in sorted((ROOT / "constraints").glob("py*.txt")):
        done = subprocess.run(
            ["python3", ROOT / "deploy/docker/pins.py", lock, *names.split()],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert set(done.stdout.splitlines()) <= set(lock.read_text().splitlines())
        assert done.stdout.count("==") == len(names.split())


def test_the_script_is_understood_by_a_posix_shell() -> None:
    assert subprocess.run(["sh", "-n", ROOT / "deploy/docker/certs.sh"], check=False).returncode == 0


def test_docker_compose_reads_it() -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")
    done = subprocess.run(["docker-compose", "config", "-q"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
