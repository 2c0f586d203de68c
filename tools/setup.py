"""Make or refresh `.venv` from the pinned versions. `run` calls it with a bare Python 3.11-3.13: standard library only.

What can go wrong here goes wrong on a stranger's first minute, so each case is met:

- two calls at once from nothing: one makes, the other waits. The lock is a file lock, so it ends with its process;
- a call that was killed half-way: the lock file says that a making is under way, and the next call starts over;
- a `.venv` of another Python, of another folder (a moved clone) or with a dead interpreter is made again;
- one that works is brought up to date in place and never removed: without a network it is all the user has;
- a user's pip or uv settings: mirrors, proxies and certificates are honoured; those that are about other installs
  (`user`, `target`, `constraint`, ...) would break this one and are taken out;
- uv that does not get through (a site whose only mirror is in pip's configuration): pip is tried.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "stamp"
LOCK = ROOT / ".venv.lock"
# Settings that redirect an install or forbid its shape, taken out of the environment. What pip.conf may also say is
# overridden: `user` on the command line, `constraint` by an empty one.
FOREIGN_SETTINGS = (
    *("PIP_REQUIREMENT", "PIP_REQUIRE_HASHES", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER"),
    *("PIP_DRY_RUN", "PIP_NO_DEPS", "PIP_REQUIRE_VIRTUALENV", "PIP_IGNORE_INSTALLED", "PIP_EDITABLE", "PIP_PYTHON"),
    *("UV_CONSTRAINT", "UV_OVERRIDE", "UV_REQUIRE_HASHES", "UV_SYSTEM_PYTHON", "UV_TARGET", "UV_PREFIX", "UV_PYTHON"),
)


def say(text: str) -> None:
    print(f"virial: {text}", file=sys.stderr, flush=True)


def minor_of(python: Path) -> str | None:
    """`3.12` for an interpreter that starts, None for one that does not."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-IS", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def make(tool: str) -> bool:
    shutil.rmtree(VENV, ignore_errors=True)
    if tool == "uv":
        command = ["uv", "venv", "-q", "--no-project", "--no-config", "--python", sys.executable, str(VENV)]
    else:
        command = [sys.executable, "-m", "venv", str(VENV)]
    return subprocess.run(command, check=False).returncode == 0


def install(tool: str, minor: str) -> bool:
    """The pins, then the project itself. Two steps: pip refuses an editable install under hashed constraints."""
    lock = ROOT / "constraints" / f"py{minor.replace('.', '')}.txt"
    if tool == "uv":
        command = ["uv", "pip", "install", "-q", "--python", str(PYTHON)]
    else:
        command = [str(PYTHON), "-m", "pip", "install", "-qq", "--no-input", "--no-user", "--disable-pip-version-check"]
    steps = (["--require-hashes", "-r", str(lock)], ["--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    return all(subprocess.run([*command, *step], cwd=ROOT, check=False).returncode == 0 for step in steps)


def refresh(stamp: str, lock_file: int) -> None:
    """Bring `.venv` to `stamp` (`CHECKSUM BYTES FOLDER`). Exits with one line where it cannot."""
    tools = ["uv", "venv"] if shutil.which("uv") else ["venv"]
    wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = minor_of(PYTHON)
    old = STAMP.read_text().strip() if STAMP.exists() else ""
    interrupted = os.fstat(lock_file).st_size > 0
    moved = bool(old) and old.split(" ", 2)[-1] != str(ROOT)
    other = found not in (("3.11", "3.12", "3.13") if not os.environ.get("VIRIAL_PYTHON") else (wanted,))
    if found is not None and old == stamp and not interrupted and not other:
        return
    if found is not None and not (interrupted or moved or other):
        say(f"bringing .venv up to date (python{found})")
        if tools == ["venv"]:  # uv, which is not here any more, may have made it without pip
            subprocess.run([PYTHON, "-m", "ensurepip"], capture_output=True, check=False)
        if not install(tools[0], found):
            sys.exit("virial: packages could not be installed (see above): run again when that is repaired")
    else:
        say(f"making .venv with python{wanted}, once")
        os.write(lock_file, b"making\n")
        if not any(make(tool) and install(tool, wanted) for tool in tools):
            sys.exit("virial: packages could not be installed (see above): run again when that is repaired")
        os.ftruncate(lock_file, 0)
    STAMP.write_text(stamp + "\n")


def main() -> None:
    for name in FOREIGN_SETTINGS:
        os.environ.pop(name, None)
    os.environ["PIP_CONSTRAINT"] = os.devnull
    try:
        lock_file = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        sys.exit(f"virial: .venv is not ready and cannot be made here ({LOCK}: {error.strerror}): use your own clone")
    fcntl.flock(lock_file, fcntl.LOCK_EX)
    try:
        refresh(sys.argv[1], lock_file)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
