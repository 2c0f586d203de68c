"""`./run protos` compiles `protos/virialpb/**/*.proto` beside their sources; `protos-check` fails where one is stale.

The compiled files are committed: whoever installs the client needs no compiler, and a change of the contract shows in
the review. Types come from mypy-protobuf, for messages and for the service stubs.
"""

from __future__ import annotations

import argparse
import importlib.resources
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def sources(protos: Path) -> list[str]:
    return sorted(str(path.relative_to(protos)) for path in protos.glob("virialpb/**/*.proto"))


def generated(folder: Path) -> dict[str, str]:
    """Relative path -> text of every compiled file under `folder`."""
    paths = (path for pattern in GENERATED for path in folder.glob(f"virialpb/**/{pattern}"))
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(paths)}


def compile_protos(protos: Path, out: Path) -> None:
    """Compile every proto under `protos` into `out`. Exits with the compiler's own words where one is wrong."""
    names = sources(protos)
    if not names:
        return
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{protos}", f"-I{well_known}"]
    for plugin in ("mypy", "mypy_grpc"):  # from this environment, not from whatever PATH has
        command.append(f"--plugin=protoc-gen-{plugin}={Path(sys.executable).with_name(f'protoc-gen-{plugin}')}")
        command.append(f"--{plugin}_out=quiet:{out}")
    command += [f"--python_out={out}", f"--grpc_python_out={out}", *names]
    if subprocess.run(command, cwd=protos, check=False).returncode != 0:
        sys.exit("protos: not compiled (see above)")
    for path in out.glob("virialpb/**/*_pb2_grpc.py*"):  # a proto without a service still gets an empty stub file
        source = (protos / path.relative_to(out)).with_name(path.name.split("_pb2_grpc")[0] + ".proto")
        if not any(line.startswith("service ") for line in source.read_text().splitlines()):
            path.unlink()


def drift(protos: Path) -> list[str]:
    """Compiled files under `protos` that are stale, missing, or left over from a proto that is gone."""
    with tempfile.TemporaryDirectory() as folder:
        compile_protos(protos, Path(folder))
        wanted = generated(Path(folder))
    have = generated(protos)
    return sorted(name for name in wanted.keys() | have.keys() if wanted.get(name) != have.get(name))


def main() -> None:
    parser = argparse.ArgumentParser(prog="./run protos", description="Compile the protos.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a compiled file is stale")
    options = parser.parse_args()
    stale = drift(PROTOS)
    if not options.check:
        compile_protos(PROTOS, PROTOS)
        leftover = drift(PROTOS)
        for name in leftover:
            (PROTOS / name).unlink()
        print(f"protos: {len(sources(PROTOS))} compiled; changed: {', '.join(stale) or 'none'}")
    elif stale:
        sys.exit("protos: compiled files are not what the protos say; run `./run protos`:\n  " + "\n  ".join(stale))
    else:
        print(f"protos: {len(sources(PROTOS))} protos, compiled files match")


if __name__ == "__main__":
    main()
