"""What TAB offers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from virial.cli.complete import candidates
from virial.cli.completion import SCRIPTS, Shell

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("su", ["submit"]),
        ("jo", ["job", "jobs"]),
        ("jobs -o ", ["table", "json", "yaml"]),
        ("jobs --output j", ["json"]),
        ("jobs --output=j", ["--output=json"]),
        ("jobs --output = j", ["json"]),
        ("-o json jo", ["job", "jobs"]),
        ("--address host:1 sub", ["submit"]),
        ("submit --wa", ["--wait"]),
        ("submit --id x --wa", ["--wait"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("completion z", ["zsh"]),
        ("completion zsh ", []),
        ("admin certs issue ", ["controller", "node", "user", "admin", "issuer"]),
        ("admin certs issue --days 9 no", ["node"]),
        ("admin certs issue node ", []),
        ("submit ", []),
        ("submit --ca ", []),
        ("nonsense --wa", []),
    ],
)
def test_words_fit_the_place(line: str, offered: list[str]) -> None:
    assert candidates(line.split(" ")) == offered


def test_every_command_is_offered() -> None:
    assert {"up", "submit", "jobs", "job", "logs", "nodes", "node", "explain"} <= set(candidates([""]))
    assert {"cancel", "hold", "release", "drain", "events", "top"} <= set(candidates([""]))


def test_a_press_of_tab_imports_nothing_heavy() -> None:
    code = "import sys; from virial.cli.complete import complete; complete(['jobs', '']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"typer", "rich", "grpc", "google", "yaml", "asyncio", "dataclasses", "inspect"}
    assert not heavy & set(done.stdout.split())


@pytest.mark.parametrize("shell", Shell)
def test_scripts_are_valid_for_their_shell(shell: Shell, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(SCRIPTS[shell])
    subprocess.run([program, "-n", str(script)], check=True)


def test_bash_completes(tmp_path: Path) -> None:
    program = tmp_path / "virial"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m virial.cli "$@"\n')
    program.chmod(0o755)
    line = "COMP_WORDS=(virial submit --dr); COMP_CWORD=2; _virial; echo ${COMPREPLY[@]}"
    path = os.pathsep.join(str(ROOT / part) for part in ("client", "protos"))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": path}
    script = SCRIPTS[Shell.BASH] + line
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--dry-run"]


def test_fish_completes(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    program = tmp_path / "virial"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m virial.cli "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join(str(ROOT / part) for part in ("client", "protos"))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": path, "HOME": str(tmp_path)}
    script = SCRIPTS[Shell.FISH] + 'complete -C "virial jobs -o "'
    done = subprocess.run(["fish", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"table", "json", "yaml"}
