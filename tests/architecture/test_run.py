"""`./run` on a stranger's machine: one line says what is missing; with all in place, nothing is installed again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What a POSIX system has besides Python.
TOOLS = ("sh", "cat", "cksum", "dirname", "find", "rm", "tr")

# Stands for a Python: $VERSION is what it says it is, ENSUREPIP whether it can make environments.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
*ensurepip*) {ensurepip} ;;
*version_info*) echo {version} ;;
*tools/setup.py*) echo "setup of $0" ;;
*) exec {real} "$@" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What `run` needs of the tree, in a folder with a space in its name and without an environment."""
    folder = tmp_path / "a clone"
    folder.mkdir()
    for name in ("run", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("tools", "constraints"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


def bin_with(folder: Path, **pythons: str) -> Path:
    """A PATH folder with the tools of a bare system and `pythons` (name -> script)."""
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    for name, script in pythons.items():
        path = folder / name.replace("_", ".")
        path.write_text(script)
        path.chmod(0o755)
    return folder


def fake(version: str, *, ensurepip: bool) -> str:
    return FAKE_PYTHON.format(version=version, ensurepip="exit 0" if ensurepip else "exit 1", real=sys.executable)


def call(clone: Path, path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / "run", *arguments],
        env={"PATH": str(path), "HOME": str(clone), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_no_python_is_one_line_that_says_what_to_install(clone: Path, tmp_path: Path) -> None:
    done = call(clone, bin_with(tmp_path / "bin", python3=fake("", ensurepip=True)), "setup")
    assert done.returncode == 1
    assert done.stderr == (
        "virial: needs Python 3.11, 3.12 or 3.13: apt-get install python3 python3-venv,"
        " or set VIRIAL_PYTHON=/path/to/python\n"
    )


def test_python_without_venv_is_one_line_that_says_what_to_install(clone: Path, tmp_path: Path) -> None:
    done = call(clone, bin_with(tmp_path / "bin", python3=fake("3.12", ensurepip=False)), "demo")
    assert done.returncode == 1
    assert done.stderr == (
        "virial: python3.12 cannot make an environment: apt-get install python3-venv (or python3.12-venv)\n"
    )


def test_a_wrong_virial_python_is_named(clone: Path, tmp_path: Path) -> None:
    done = call(clone, bin_with(tmp_path / "bin"), "setup", VIRIAL_PYTHON="/nowhere/python3.12")
    assert done.returncode == 1
    assert done.stderr == "virial: VIRIAL_PYTHON=/nowhere/python3.12 is not a working Python 3.11, 3.12 or 3.13\n"


def test_the_newest_python_that_can_make_an_environment_is_taken(clone: Path, tmp_path: Path) -> None:
    path = bin_with(
        tmp_path / "bin",
        python3_13=fake("3.13", ensurepip=False),
        python3_12=fake("3.12", ensurepip=True),
        python3_11=fake("3.11", ensurepip=True),
    )
    done = call(clone, path, "setup")
    assert (done.returncode, done.stdout) == (0, f"setup of {path / 'python3.12'}\n")


def test_an_activated_environment_of_this_tree_is_not_what_it_is_made_from(clone: Path, tmp_path: Path) -> None:
    inside = clone / ".venv" / "bin"
    inside.parent.mkdir()
    bin_with(inside, python3_13=fake("3.13", ensurepip=True))
    outside = bin_with(tmp_path / "bin", python3=fake("3.11", ensurepip=True))
    done = call(clone, Path(f"{inside}{os.pathsep}{outside}"), "setup")
    assert done.stdout == f"setup of {outside / 'python3'}\n"


def test_a_ready_environment_is_used_as_it_is(clone: Path, tmp_path: Path) -> None:
    sums = subprocess.run(
        "cat pyproject.toml constraints/py*.txt | cksum",
        shell=True,
        cwd=clone,
        capture_output=True,
        text=True,
        check=True,
    )
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").write_text("#!/bin/sh\necho python $*\n")
    (clone / ".venv" / "bin" / "python").chmod(0o755)
    (clone / ".venv" / "stamp").write_text(f"{sums.stdout.strip()} {clone}\n")
    path = bin_with(tmp_path / "bin", python3=fake("3.11", ensurepip=True))
    done = call(clone, path, "sim", "SEEDS=3", "--verbose", SEEDS="9", MUTATION="stale")
    assert done.stdout == "python -m tests.sim --seeds 9 --mutation stale --seeds 3 --verbose\n"
    (clone / "pyproject.toml").open("a").write("\n")
    assert call(clone, path, "setup").stdout == f"setup of {path / 'python3'}\n"


def test_an_environment_elsewhere_is_not_touched_by_clean(clone: Path, tmp_path: Path) -> None:
    (clone / ".venv" / "__pycache__").mkdir(parents=True)
    (clone / "controld" / "__pycache__").mkdir(parents=True)
    assert call(clone, bin_with(tmp_path / "bin"), "clean").returncode == 0
    assert (clone / ".venv" / "__pycache__").exists()
    assert not (clone / "controld" / "__pycache__").exists()
