"""One process of a local cluster: started, awaited, ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from virial.errors import VirialError

# A member finds its majority and a controller its member within it, on a machine that is busy with something else.
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 15.0
_POLL_S: Final = 0.02
_TAIL_BYTES: Final = 16 << 10


@dataclass(slots=True)
class Part:
    """`argv` starts it again as it was.

    `state_file`: relative to `data_dir`, there once the part has state that must not be lost. A part whose state is
    gone is not started again: what it had acknowledged would be forgotten in silence.
    """

    name: str
    data_dir: Path
    argv: list[str]
    process: subprocess.Popen[bytes] | None = None
    state_file: str = ""
    had_state: bool = False

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Raises VirialError where it was never started."""
        if self.process is None:
            raise VirialError(f"{self.name} was never started")
        return self.process.pid

    @property
    def log(self) -> Path:
        return self.data_dir.parent / f"{self.name}.log"

    def spawn(self) -> None:
        """Start it in a session of its own, with its output in its log. Raises VirialError where its state is gone."""
        state = self.data_dir / self.state_file if self.state_file else None
        if self.had_state and state is not None and not state.exists():
            raise VirialError(f"{self.name} is not started again: {state}, which it had before, is gone")
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.data_dir / "ports.json").unlink(missing_ok=True)
        command = [sys.executable, *self.argv]
        setpriv = shutil.which("setpriv")
        if setpriv is not None:
            # Should this process be killed outright, the part is asked to stop rather than left behind.
            command = [setpriv, "--pdeathsig", "TERM", *command]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # A task's `python3` is then the one that runs this cluster, with what is installed beside it.
                env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"},
            )

    def wait_for_ports(self) -> dict[str, Any]:
        """What it says of where it listens, once it serves. Raises VirialError with what it said instead."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if not self.alive:
                raise VirialError(f"{self.name} did not start: {self.tail()}")
            with contextlib.suppress(FileNotFoundError, ValueError):
                ports = dict(json.loads((self.data_dir / "ports.json").read_bytes()))
                self.note_state()
                return ports
            time.sleep(_POLL_S)
        raise VirialError(f"{self.name} did not get ready in {START_TIMEOUT_S:g} s: {self.tail()}")

    def note_state(self) -> None:
        if self.state_file and (self.data_dir / self.state_file).exists():
            self.had_state = True

    def tail(self) -> str:
        """The last lines it wrote."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").strip().splitlines()[-5:])
        return ""

    def kill(self) -> None:
        """SIGKILL to this one process, and see it gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def end_all(parts: Iterable[Part]) -> None:
    """Ask them to stop, all at once, and kill what does not stop in time. Safe to repeat."""
    parts = list(parts)
    for part in parts:
        if part.alive and part.process is not None:
            part.process.send_signal(signal.SIGTERM)
            part.process.send_signal(signal.SIGCONT)  # one that is stopped hears nothing before
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    for part in parts:
        if part.process is None:
            continue
        try:
            part.process.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            part.kill()
        kill_guardian(part.data_dir)


def guardian_pid(data_dir: Path) -> int | None:
    """The guardian that serves a node's data directory, read from its lock file; None when none is alive."""
    try:
        pid = int((data_dir / "guardian.lock").read_text(encoding="ascii").strip())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if b"noded.run.guardian" in command and os.fsencode(data_dir) in command else None


def kill_guardian(data_dir: Path) -> None:
    """Kill a node's guardian, and so its tasks, if one is left."""
    pid = guardian_pid(data_dir)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
