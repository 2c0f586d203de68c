"""A wheel and an editable install offer the same modules under the same names."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.architecture import walls

ROOT = Path(__file__).resolve().parents[2]
# Source folder -> import package.
SOURCES = {folder: Path(folder).name for folder in walls.PACKAGES}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (path,) = folder.glob("virial-*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_has_every_module_under_its_import_name(wheel: zipfile.ZipFile) -> None:
    modules = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in SOURCES.items()
        for path in (ROOT / folder).rglob("*.py*")
        if path.suffix in {".py", ".pyi"}
    }
    packed = {name for name in wheel.namelist() if name.endswith((".py", ".pyi"))}
    assert packed == modules


def test_the_wheel_is_typed(wheel: zipfile.ZipFile) -> None:
    assert {f"{package}/py.typed" for package in SOURCES.values()} <= set(wheel.namelist())


@pytest.mark.parametrize(("folder", "package"), SOURCES.items())
def test_an_editable_install_finds_the_sources(folder: str, package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin == str(ROOT / folder / "__init__.py")


def test_the_scripts_name_what_is_there(wheel: zipfile.ZipFile) -> None:
    scripts: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    names = wheel.namelist()
    for target in scripts.values():
        module = target.partition(":")[0].replace(".", "/")
        assert f"{module}.py" in names or f"{module}/__init__.py" in names


def test_the_wheel_imports_alone(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = "import virial.task, virialpb.ids, controld.core, noded.core; print(virial.task.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "virial" / "task" / "__init__.py")), done.stderr
