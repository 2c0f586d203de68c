"""`./run lock`: pin every dependency, with hashes, once for each Python minor.

A lock has to install on both machine kinds we support, so it is resolved for each and the two answers must be equal: a
difference would need markers, and we would rather hear of it. It names no package registry: the mirror a site uses is
the site's own business (pip and uv configuration), and a host in a committed file would override nothing and leak much.

Of each lock, the part that a running cluster needs stands in a file of its own (`runtime-py312.txt`): images and
packages are made of that one, without the tools of development.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINORS = ("3.11", "3.12", "3.13")
RUNTIME_EXTRAS = ("server", "node", "examples")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")

# A pin, its hashes, nothing else: whatever is not of this shape (an index, a link, a path, a comment) is refused.
_PIN = re.compile(r"[a-z0-9][a-z0-9._-]*==[A-Za-z0-9.+!_-]+( ; [^\\/:@]+)? \\")
_HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


def lock_path(minor: str, root: Path = ROOT) -> Path:
    return root / "constraints" / f"py{minor.replace('.', '')}.txt"


def runtime_path(minor: str, root: Path = ROOT) -> Path:
    return lock_path(minor, root).with_name(f"runtime-{lock_path(minor).name}")


def check_text(text: str, name: str) -> list[str]:
    """What is wrong with a lock: one sentence for each line that is neither a pin nor a hash. Empty when sound."""
    problems: list[str] = []
    after_pin = False
    for number, line in enumerate(text.splitlines(), start=1):
        if _PIN.fullmatch(line):
            after_pin = True
        elif _HASH.fullmatch(line) and after_pin:
            continue
        else:
            problems.append(f"{name}:{number}: neither a pinned version nor its hash: {line.strip()[:80]!r}")
    if not after_pin:
        problems.append(f"{name}: no pinned version in it")
    return problems


def resolve(minor: str, platform: str, *, uv: str, previous: Path, upgrade: bool, only: Sequence[str] = ()) -> str:
    """The pins for one Python minor and platform. Pins of the previous lock are kept while they still fit.

    `only`: these extras, pinned as `previous` has them, in place of all extras.
    """
    command = [uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"]
    command += ["--no-emit-index-url", "--no-emit-find-links", "--no-sources", "--no-python-downloads"]
    command += ["--python-version", minor, "--python-platform", platform, "pyproject.toml"]
    command += [word for extra in only for word in ("--extra", extra)] or ["--all-extras"]
    if only:
        command += ["--constraints", str(previous)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / previous.name
        if previous.exists() and not upgrade and not only:
            shutil.copyfile(previous, output)
        done = subprocess.run(
            [*command, "--output-file", str(output)], cwd=ROOT, stdout=subprocess.DEVNULL, check=False
        )
        if done.returncode != 0:
            sys.exit(f"lock: Python {minor} on {platform} does not resolve")
        return output.read_text()


def write(path: Path, minor: str, texts: Mapping[str, str]) -> None:
    """`texts`: one for each platform; they must be equal, and sound."""
    text = texts[PLATFORMS[0]]
    if any(other != text for other in texts.values()):
        sys.exit(f"lock: Python {minor} needs different packages on {' and '.join(PLATFORMS)}")
    if problems := check_text(text, path.name):
        sys.exit("\n".join(problems))
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    print(f"constraints/{path.name}: {text.count('==')} packages")


def main() -> None:
    parser = argparse.ArgumentParser(prog="./run lock", description="Pin every dependency for each Python minor.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions instead of keeping the pins")
    parser.add_argument("--check", action="store_true", help="only check the shape of the locks that are there")
    options = parser.parse_args()
    if options.check:
        paths = [path(minor) for minor in MINORS for path in (lock_path, runtime_path)]
        problems = [problem for path in paths for problem in check_text(path.read_text(), path.name)]
        sys.exit("\n".join(problems) or 0)
    uv = str(Path(sys.executable).with_name("uv"))
    for minor in MINORS:
        path, upgrade = lock_path(minor), options.upgrade
        write(path, minor, {p: resolve(minor, p, uv=uv, previous=path, upgrade=upgrade) for p in PLATFORMS})
        runtime = {p: resolve(minor, p, uv=uv, previous=path, upgrade=False, only=RUNTIME_EXTRAS) for p in PLATFORMS}
        write(runtime_path(minor), minor, runtime)


if __name__ == "__main__":
    main()
