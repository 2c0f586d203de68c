"""What import-linter cannot say, checked on the sources: one sentence a violation, naming file and line.

Every check takes the tree's root, so that a test can point it at a small tree with a violation in it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

PACKAGES = ("controld", "noded", "client/virial", "protos/virialpb")
PURE_ROOMS = (
    *("controld/core", "controld/topology", "controld/health", "controld/matching", "controld/reconcile"),
    "noded/core",
)
# What a pure room may not know: clocks, chance, identity, the machine, the network, logs, the wire. `datetime` reads a
# clock by another name, and the rest of the second line does I/O or runs things.
IMPURE_MODULES = frozenset(
    {
        *("asyncio", "time", "random", "uuid", "os", "socket", "logging", "structlog", "grpc", "google", "virialpb"),
        *("concurrent", "ctypes", "datetime", "fcntl", "http", "importlib", "io", "mmap", "multiprocessing", "pathlib"),
        *("pickle", "prometheus_client", "psutil", "secrets", "select", "selectors", "shutil", "signal", "sqlite3"),
        *("subprocess", "tempfile", "threading", "urllib"),
    }
)
# Standard-library-only parts of virialpb: the one piece of the contract that the two pure cores share.
PURE_CONTRACT = frozenset({"virialpb.ids", "virialpb.lease", "virialpb.reasons", "virialpb.units"})
IMPURE_BUILTINS = frozenset({"open", "print", "input", "exec", "eval", "__import__"})

# Compiled messages stop at these files; compiled service stubs at the rooms that speak gRPC.
# The client's one flat file of calls is its stub: it builds the request of each, and convert.py reads the replies.
MESSAGE_FILES = (
    *("*/convert.py", "*/convert_*.py", "*/convert/*.py", "controld/store/codec*.py"),
    *("controld/store/etcd*.py", "controld/store/member*.py"),  # etcd's messages are all that they are about
    *("client/virial/_async/client.py", "client/virial/_sync/client.py"),
)
STUB_FILES = ("controld/service/*.py", "noded/link/*.py", "client/virial/*.py")

MAX_LINES = 500


@dataclass(frozen=True)
class Import:
    module: str  # dotted, absolute; for `from a import b` it is `a.b`
    line: int


def python_files(root: Path, *folders: str) -> Iterator[tuple[str, Path]]:
    """(path relative to root, path) of the hand-written Python files under `folders`, sorted."""
    for folder in folders:
        base = root / folder
        for path in [base] if base.is_file() else sorted(base.rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                yield path.relative_to(root).as_posix(), path


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(path: Path) -> list[Import]:
    """Every import of a file, wherever it stands: lazy ones and those for the type checker count like any other."""
    found: list[Import] = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found += [Import(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def impure_imports(root: Path) -> list[str]:
    """Pure rooms import nothing that has a clock, chance, a machine, a network or a wire format behind it."""
    return [
        f"{name}:{found.line}: a pure room imports {found.module}; take what it gives as an argument"
        for name, path in python_files(root, *PURE_ROOMS)
        for found in imports_of(path)
        if found.module.split(".")[0] in IMPURE_MODULES and not any(is_within(found.module, p) for p in PURE_CONTRACT)
    ]


def impure_calls(root: Path) -> list[str]:
    """Pure rooms call no builtin that does I/O or runs text, and draw no number from numpy's global generator."""
    problems: list[str] = []
    for name, path in python_files(root, *PURE_ROOMS):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_BUILTINS:
                problems.append(f"{name}:{node.lineno}: a pure room calls {node.func.id}()")
            elif isinstance(node, ast.Attribute) and ast.unparse(node) in {"np.random", "numpy.random"}:
                problems.append(f"{name}:{node.lineno}: a pure room draws from numpy.random; take a seeded generator")
    return problems


def shared_contract_imports(root: Path) -> list[str]:
    """What pure rooms share of virialpb reaches the standard library only, through whatever it imports."""
    return [
        f"{path.relative_to(root).as_posix()}: reaches more than the standard library"
        for module in sorted(PURE_CONTRACT)
        if (path := root / "protos" / f"{module.replace('.', '/')}.py").exists() and not is_standard_only(root, module)
    ]


def is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names | {"_typeshed"}  # the latter: for type checkers only


def is_standard_only(root: Path, module: str) -> bool:
    """Whether `module` (or the module it is a name of) is a file of virialpb that reaches the standard library only."""
    names = (module, module.rpartition(".")[0])
    path = next((p for name in names if (p := root / "protos" / f"{name.replace('.', '/')}.py").exists()), None)
    return path is not None and all(
        is_standard(found.module) or (is_within(found.module, "virialpb") and is_standard_only(root, found.module))
        for found in imports_of(path)
    )


def task_imports(root: Path) -> list[str]:
    """`virial.task` runs in the user's forking process: standard library, itself, standard-only files of virialpb."""
    return [
        f"{name}:{found.line}: virial.task imports {found.module}, which is more than the standard library"
        for name, path in python_files(root, "client/virial/task", "client/virial/task.py")
        for found in imports_of(path)
        if not (
            is_standard(found.module)
            or is_within(found.module, "virial.task")
            or (is_within(found.module, "virialpb") and is_standard_only(root, found.module))
        )
    ]


def compiled_imports(root: Path) -> list[str]:
    """`*_pb2` in convert and codec files only, `*_pb2_grpc` in the rooms that speak gRPC only."""
    problems: list[str] = []
    for name, path in python_files(root, *PACKAGES):
        for found in imports_of(path):
            parts = found.module.split(".")
            if parts[0] != "virialpb":
                continue
            if any(part.endswith("_pb2") for part in parts) and not any(fnmatch(name, g) for g in MESSAGE_FILES):
                problems.append(f"{name}:{found.line}: {found.module} belongs in a convert.py (or the store's codec)")
            if any(part.endswith("_pb2_grpc") for part in parts) and not any(fnmatch(name, g) for g in STUB_FILES):
                problems.append(
                    f"{name}:{found.line}: {found.module} belongs in controld/service, noded/link or virial"
                )
    return problems


def folder_imports(root: Path) -> list[str]:
    """`client` and `protos` are folders: their packages are `virial` and `virialpb`."""
    return [
        f"{name}:{found.line}: imports {found.module}; the packages are `virial` and `virialpb`"
        for name, path in python_files(root, *PACKAGES, "tests", "examples", "benchmarks", "tools")
        for found in imports_of(path)
        if found.module.split(".")[0] in {"client", "protos"}
    ]


def slow_unit_tests(root: Path) -> list[str]:
    """Unit tests and properties read no clock and wait for nothing: time is an argument of what they call."""
    return [
        f"{name}:{found.line}: a unit test imports {found.module}; pass the time in, or make it an integration test"
        for name, path in python_files(root, "tests/unit", "tests/property")
        for found in imports_of(path)
        if found.module in {"time", "time.sleep", "time.monotonic", "time.time", "asyncio.sleep"}
    ]


def third_party_imports(root: Path, allowed: frozenset[str], *folders: str, apart: tuple[str, ...] = ()) -> list[str]:
    """Files under `folders`, but for the globs `apart`, import no distribution but those of `allowed` (lower case)."""
    owners = packages_distributions()
    problems: list[str] = []
    for name, path in python_files(root, *folders):
        if any(fnmatch(name, pattern) for pattern in apart):
            continue
        for found in imports_of(path):
            distributions = {owner.lower().replace("_", "-") for owner in owners.get(found.module.split(".")[0], [])}
            if distributions - {"virial"} and not distributions & allowed:
                problems.append(f"{name}:{found.line}: imports {found.module}, of {', '.join(sorted(distributions))}")
    return problems


def long_files(paths: list[Path], root: Path) -> list[str]:
    """A file past the limit has more than one reason to change."""
    return [
        f"{path.relative_to(root).as_posix()}: {count} lines; split it where its reasons to change differ"
        for path in paths
        if path.suffix in {".py", ".proto", ".sh", ""} and (count := path.read_text().count("\n")) > MAX_LINES
    ]
