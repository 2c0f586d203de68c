"""The contracts of import-linter hold, each of them can fail, and importing stays light."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import walls

ROOT = Path(__file__).resolve().parents[2]


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on the packages of `tree`, which come before the installed ones."""
    path = os.pathsep.join(str(tree / folder) for folder in (".", "client", "protos"))
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    return subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("contract", "name", "text"),
    [
        ("controld: imports point inward", "controld/core/seeded.py", "import controld.store\n"),
        ("noded: imports point inward", "noded/core/seeded.py", "import noded.run\n"),
        ("pure rooms reach no clock", "controld/matching/seeded.py", "import time\n"),
        ("noded never imports controld", "noded/run/seeded.py", "import controld.core\n"),
        ("the client never imports noded", "client/virial/seeded.py", "import controld.core\n"),
        ("controld never imports noded", "controld/service/seeded.py", "import virial\n"),
        ("virialpb imports none of its users", "protos/virialpb/seeded.py", "import controld.core\n"),
        ("virial.task reaches no grpc", "client/virial/task/seeded.py", "import grpc\n"),
    ],
)
def test_a_contract_catches_a_violation(contract: str, name: str, text: str, tmp_path: Path) -> None:
    for package in walls.PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / name).write_text(text)
    done = lint_imports(tmp_path)
    broken = [line for line in done.stdout.splitlines() if " BROKEN" in line]
    assert done.returncode == 1
    assert any(line.startswith(contract) for line in broken), done.stdout + done.stderr


@pytest.mark.parametrize("folder", ["client", "protos"])
def test_a_folder_is_not_a_package(folder: str) -> None:
    done = python(f"import {folder}")
    assert done.returncode == 1
    assert "ImportError" in done.stderr


HEAVY = "controld noded grpc google numpy typer rich yaml structlog msgspec psutil prometheus_client"


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("virial.task", f"{HEAVY} asyncio"),  # a training process forks, and pays for every import once a rank
        ("virial", HEAVY),  # `from virial import Client` loads gRPC when the first client is made
        ("virial.cli", "grpc google numpy yaml asyncio"),  # `--help` and TAB
    ],
)
def test_importing_stays_light(module: str, banned: str) -> None:
    done = python(f"import {module}, sys; print(*sorted(set({banned.split()!r}) & set(sys.modules)))")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")
