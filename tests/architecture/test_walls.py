"""The tree keeps its walls, and each check catches a violation put before it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.architecture import walls

ROOT = Path(__file__).resolve().parents[2]

Check = Callable[[Path], list[str]]


def third_party_of_client(root: Path) -> list[str]:
    """The client and the contract live on the base dependencies: who installs `virial` gets those alone."""
    allowed = frozenset(
        {"grpcio", "grpcio-status", "googleapis-common-protos", "protobuf", "pyyaml", "rich", "typer", "click"}
    )
    # Certificates are made where an extra asks for it; who imports that module does so late.
    apart = ("client/virial/testing*", "protos/virialpb/certificates.py")
    return walls.third_party_imports(root, allowed, "client/virial", "protos/virialpb", apart=apart)


def third_party_of_agent(root: Path) -> list[str]:
    allowed = frozenset(
        {"grpcio", "grpcio-status", "googleapis-common-protos", "protobuf", "pyyaml"}
        | {"msgspec", "prometheus-client", "psutil", "structlog"}
    )
    return walls.third_party_imports(root, allowed, "noded")


# (check, file with the violation, its text)
SEEDED: list[tuple[Check, str, str]] = [
    (walls.impure_imports, "controld/core/clock.py", "import time\n"),
    (walls.impure_imports, "controld/matching/plan.py", "def plan() -> None:\n    from random import Random\n"),
    (walls.impure_imports, "controld/topology/build.py", "from virialpb.v1 import node_pb2\n"),
    (walls.impure_imports, "controld/health/verdict.py", "from virialpb import errors\n"),
    (walls.impure_imports, "controld/reconcile/gang.py", "import os.path\n"),
    (
        walls.impure_imports,
        "noded/core/agent.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncio\n",
    ),
    (walls.impure_calls, "controld/core/debug.py", "print('granted')\n"),
    (walls.impure_calls, "controld/matching/score.py", "import numpy as np\nTIE = np.random.default_rng()\n"),
    (walls.shared_contract_imports, "protos/virialpb/ids.py", "import grpc\n"),
    (walls.task_imports, "client/virial/task/progress.py", "import grpc\n"),
    (walls.task_imports, "client/virial/task/progress.py", "from virial import Client\n"),
    (walls.task_imports, "client/virial/task/progress.py", "from virialpb.v1 import job_pb2\n"),
    (walls.compiled_imports, "controld/service/job.py", "from virialpb.v1 import job_pb2\n"),
    (walls.compiled_imports, "controld/replica/leader.py", "from virialpb.v1 import job_pb2_grpc\n"),
    (walls.folder_imports, "controld/service/job.py", "import client\n"),
    (walls.folder_imports, "tests/unit/test_x.py", "from client.virial import Client\n"),
    (walls.slow_unit_tests, "tests/unit/test_x.py", "import time\n"),
    (third_party_of_client, "client/virial/models.py", "import numpy\n"),
    (third_party_of_agent, "noded/collect/cpu.py", "import numpy\n"),
]

CHECKS: list[Check] = list(dict.fromkeys(case[0] for case in SEEDED))


@pytest.mark.parametrize("check", CHECKS)
def test_the_tree_keeps_the_wall(check: Check) -> None:
    assert check(ROOT) == []


@pytest.mark.parametrize(("check", "name", "text"), SEEDED)
def test_a_violation_is_caught(check: Check, name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (problem,) = check(tmp_path)
    assert problem.startswith(name)


def test_a_room_that_keeps_the_walls_passes(tmp_path: Path) -> None:
    good = {
        "controld/core/grant.py": "from dataclasses import dataclass\nfrom virialpb.ids import JobId\n",
        "controld/service/convert.py": "from virialpb.v1 import job_pb2\n",
        "controld/service/job.py": "from virialpb.v1 import job_pb2_grpc\n",
        "client/virial/task/save.py": "import json\nfrom virialpb.shards import Writer\n",
        "protos/virialpb/ids.py": "import re\n",
        "protos/virialpb/shards.py": "import os\nfrom virialpb import ids\n",
    }
    for name, text in good.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [problem for check in CHECKS for problem in check(tmp_path)] == []


def test_the_pure_rooms_are_those_of_the_import_linter() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (pure,) = [contract for contract in contracts if contract["id"] == "pure"]
    assert sorted(pure["source_modules"]) == sorted(room.replace("/", ".") for room in walls.PURE_ROOMS)
    assert set(pure["forbidden_modules"]) <= walls.IMPURE_MODULES


def test_every_pure_room_is_there() -> None:
    assert [room for room in walls.PURE_ROOMS if not (ROOT / room / "__init__.py").exists()] == []


def test_a_long_file_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("x = 1\n" * (walls.MAX_LINES + 1))
    assert walls.long_files([path], tmp_path) == [
        f"long.py: {walls.MAX_LINES + 1} lines; " + "split it where its reasons to change differ"
    ]
