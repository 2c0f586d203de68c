"""What lies in the repository: no huge files, no machine's paths, no registry's name, pins that fit the project."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.architecture import walls
from tools import lock, protos, stages

ROOT = Path(__file__).resolve().parents[2]
# Written so that this file does not contain what it looks for.
REGISTRY = re.compile(
    r"pypi\.(?:org|python)|python(?:hosted)\.org|test\.pypi|registry\.(?:npmjs|yarnpkg)|proxy\.golang|index\.crates"
)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work/(?:main|shared)|root/|opt/(?:pypi|wheels))")


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git work tree: nothing says which files belong to it")
    paths = [ROOT / name for name in done.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not any(path.match(pattern) for pattern in protos.GENERATED)]


def lines_with(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{path.name}:{number}: {line.strip()[:100]}"
        for path in paths
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]


def test_no_file_swallows_everything() -> None:
    assert walls.long_files(tracked(), ROOT) == []


@pytest.mark.parametrize("pattern", [REGISTRY, MACHINE_PATH])
def test_no_tracked_file_names_a_registry_or_a_machine(pattern: re.Pattern[str]) -> None:
    assert lines_with(pattern, tracked()) == []


def test_a_registry_or_machine_path_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_text("--index-url https://pypi" + ".org/simple\nlies in /work" + "/main/x\n/workspace/main is fine\n")
    assert [line.split(":")[1] for line in lines_with(REGISTRY, [path])] == ["1"]
    assert [line.split(":")[1] for line in lines_with(MACHINE_PATH, [path])] == ["2"]


@pytest.mark.parametrize("minor", lock.MINORS)
def test_locks_hold_pins_and_hashes_only(minor: str) -> None:
    path = lock.lock_path(minor, ROOT)
    assert lock.check_text(path.read_text(), path.name) == []
    runtime = lock.runtime_path(minor, ROOT).read_text()
    assert lock.check_text(runtime, "runtime") == []
    assert set(runtime.splitlines()) <= set(path.read_text().splitlines()), "./run lock has not been run since"
    assert "\ncryptography==" in runtime
    assert "\nruff==" not in runtime


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://mirror.example/simple",
        "--find-links /somewhere/wheels",
        "numpy @ https://mirror.example/numpy.whl \\",
        "numpy>=2",
        "numpy==2.4.6",  # no hash
        "# via virial",
        "-e .",
    ],
)
def test_a_lock_with_anything_else_is_caught(line: str) -> None:
    good = "psutil==7.2.2 \\\n    --hash=sha256:" + "0" * 64 + "\n"
    assert lock.check_text(good, "py311.txt") == []
    (problem,) = lock.check_text(good + line + "\n", "py311.txt")
    assert problem.startswith("py311.txt:3:")


@pytest.mark.parametrize("minor", lock.MINORS)
def test_locks_fit_the_project(minor: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    pins = dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", lock.lock_path(minor, ROOT).read_text(), re.MULTILINE))
    wanted = [r for r in map(Requirement, texts) if canonicalize_name(r.name) != "virial"]
    assert [str(r) for r in wanted if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"))] == []


def test_every_test_folder_belongs_to_a_stage() -> None:
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders - {folder for stage in stages.STAGES for folder in stage.tests} == set()


@pytest.mark.parametrize("name", ["run", ".ci/run"])
def test_what_is_run_can_be_run(name: str) -> None:
    assert (ROOT / name).stat().st_mode & 0o111 == 0o111


def test_run_is_understood_by_a_posix_shell() -> None:
    assert subprocess.run(["sh", "-n", "run"], cwd=ROOT, check=False).returncode == 0


def test_run_helps_and_refuses_without_an_environment() -> None:
    helped = subprocess.run(["./run", "help"], cwd=ROOT, capture_output=True, text=True, check=False)
    refused = subprocess.run(["./run", "tset"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert helped.returncode == 0
    assert "./run demo" in helped.stdout
    assert refused.returncode == 1
    assert refused.stderr.endswith("no task 'tset'\n")


def test_compiled_protos_match_their_sources() -> None:
    assert protos.drift(ROOT / "protos") == []


def test_a_stale_compiled_proto_is_caught(tmp_path: Path) -> None:
    folder = tmp_path / "virialpb" / "v1"
    folder.mkdir(parents=True)
    source = folder / "seeded.proto"
    source.write_text('syntax = "proto3";\npackage virialpb.v1;\nmessage Seeded { int64 wait_ms = 1; }\n')
    protos.compile_protos(tmp_path, tmp_path)
    assert protos.drift(tmp_path) == []
    source.write_text(source.read_text().replace("wait_ms", "limit_ms"))
    assert protos.drift(tmp_path) == ["virialpb/v1/seeded_pb2.py", "virialpb/v1/seeded_pb2.pyi"]
    source.unlink()
    assert protos.drift(tmp_path) == ["virialpb/v1/seeded_pb2.py", "virialpb/v1/seeded_pb2.pyi"]


def test_ruff_bans_what_it_is_to_ban(tmp_path: Path) -> None:
    path = tmp_path / "seeded.py"
    path.write_text("import pickle\n\nimport client\n\nprint(pickle, client)\n")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run([*command, "--select", "TID251", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.count("TID251") == 2


def test_the_project_asks_for_the_runtimes_its_compiled_files_need() -> None:
    texts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = {r.name: min(s.version for s in r.specifier if s.operator == ">=") for r in map(Requirement, texts)}
    compiled = protos.generated(ROOT / "protos")
    for name, text in compiled.items():
        if match := re.search(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+),", text):
            assert Version(floors["protobuf"]) >= Version(".".join(match.groups())), name
        if match := re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", text):
            assert Version(floors["grpcio"]) >= Version(match.group(1)), name
    assert any(name.endswith("_pb2_grpc.py") for name in compiled)
