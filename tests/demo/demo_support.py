"""The demo as somebody runs it: who they are, what network they have, and what is left of it afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.rack import MARK, ROOT, marked, until

NOBODY = 65534
HANG_SECONDS = 200.0
SHORT = ("--steps=60", "--checkpoint-every=10", "--step-ms-min=20", "--timeout-s=90")
KEYS = {"ok", "fault", "lost_node", "generations", "restored_step", "steps_redone", "digest_equal"}
KEYS_KILL = KEYS | {"detect_s", "recovery_s"}
KEYS_PARTITION = KEYS_KILL | {"overlap_s", "gap_s", "cut_rank_exit_reason"}


@dataclass
class Demo:
    """A demo that runs, with directories of its own."""

    base: Path
    mark: str
    process: subprocess.Popen[str]

    @property
    def scratch(self) -> Path:
        return self.base / "tmp"

    def report(self) -> dict[str, Any]:
        """Its last line, once it has ended well."""
        out, err = self.process.communicate(timeout=HANG_SECONDS)
        assert self.process.returncode == 0, out[-6000:] + err[-2000:]
        assert err == ""
        *timeline, last = out.splitlines()
        assert all(line.startswith("[") for line in timeline)
        self.text = out
        return json.loads(last)

    def left(self) -> dict[int, str]:
        return marked(self.mark, str(self.base))

    def check_nothing_is_left(self) -> None:
        with contextlib.suppress(AssertionError):
            until(lambda: not self.left(), "its processes are gone", 10)
        assert self.left() == {}
        assert list(self.scratch.iterdir()) == []


@contextlib.contextmanager
def demo(*arguments: str, by: tuple[str, ...] = (), user: int | None = None) -> Generator[Demo]:
    """Start it through the command `by`, with HOME and TMPDIR that belong to `user`."""
    base = Path(tempfile.mkdtemp(prefix="vd-"))
    mark = f"demo-{uuid.uuid4().hex}"
    # Not this test's environment: a user's shell has no PYTHONPATH and no sources of ours to be found by chance.
    env = {"PATH": os.environ["PATH"], "HOME": str(base / "home"), "TMPDIR": str(base / "tmp"), MARK: mark}
    for name in ("home", "tmp", "mounts"):
        (base / name).mkdir()
        if user is not None:
            os.chown(base / name, user, user)
    base.chmod(0o711)
    command = [*(part.replace("{mounts}", str(base / "mounts")) for part in by)]
    command += [sys.executable, str(ROOT / "examples" / "demo"), *arguments]
    process = subprocess.Popen(
        command, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    made = Demo(base, mark, process)
    try:
        yield made
    finally:
        process.kill()
        process.communicate()
        for pid in made.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(base, ignore_errors=True)


def without_network() -> tuple[str, ...]:
    """Loopback and nothing else."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("an empty network namespace needs unshare and ip")
    alone = ("unshare", "-n") if os.geteuid() == 0 else ("unshare", "-rn")
    if subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("this kernel gives no network namespace here")
    return (*alone, "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def ordinary_user() -> tuple[str, ...]:
    """`nobody`, where the tests run as root; whoever runs them otherwise."""
    if os.geteuid() != 0:
        return ()
    return (
        *_seeing_python(),
        *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all"),
    )


def ordinary_user_without_namespaces() -> tuple[str, ...]:
    if os.geteuid() != 0:
        pytest.skip("forbidding user namespaces to one process needs root")
    return (*_seeing_python(), sys.executable, str(Path(__file__).with_name("without_namespaces.py")))


def _seeing_python() -> tuple[str, ...]:
    """A mount namespace in which anybody may reach this Python and these sources, at their own paths.

    Where they lie in somebody's private home, that home is covered by an empty one that holds only them.
    """
    needed = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT}
    hidden: dict[Path, list[Path]] = {}
    for path in sorted(needed):
        for directory in (*reversed(path.parents), path):
            if not directory.stat().st_mode & 0o001:
                hidden.setdefault(directory, []).append(path)
                break
    if not hidden:
        return ()
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("becoming an ordinary user needs unshare and setpriv")
    lines: list[str] = ["set -e"]
    for home, paths in hidden.items():
        kept = [(path, f"{{mounts}}/{len(lines)}-{n}") for n, path in enumerate(paths)]
        for path, place in kept:
            lines += [f"mkdir '{place}'", f"mount --bind '{path}' '{place}'"]
        lines.append(f"mount -t tmpfs -o mode=755 none '{home}'")
        for path, place in kept:
            lines += [f"mkdir -p '{path}'", f"mount --bind '{place}' '{path}'"]
    return ("unshare", "--mount", "sh", "-c", "\n".join([*lines, 'exec "$@"']), "sh")


__all__ = [
    "KEYS_KILL",
    "KEYS_PARTITION",
    "NOBODY",
    "SHORT",
    "demo",
    "ordinary_user",
    "ordinary_user_without_namespaces",
    "without_network",
]
