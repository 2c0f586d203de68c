"""A whole cluster on this machine, for `virial up`, examples and tests: one controld and some noded, each a process.

Every part has a directory and an identity of its own and a share of the machine; all listen on loopback, on ports
the system picks, so that any number of such clusters can run at once. Nothing outlives `stop`, and the parts stop
by themselves when the process that started them dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from virial.errors import VirialError

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
LOCK_FILE = "cluster.lock"


@dataclass(slots=True)
class Part:
    """One process of the cluster. `argv` starts it again as it was."""

    name: str
    data_dir: Path
    argv: list[str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass(slots=True)
class NodeOptions:
    """What one noded is started with beyond the defaults."""

    cpu_millis: int
    memory_bytes: int
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    controller: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """What each of `nodes` equal parts of this machine is: together no more than there is."""

    cpu_millis: int
    memory_bytes: int


def machine_share(nodes: int, *, memory_fraction: float = 0.8) -> Share:
    """An equal share of this machine's cores and of `memory_fraction` of its memory for each of `nodes`."""
    cores = len(os.sched_getaffinity(0))
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory_bytes = int(total_bytes * memory_fraction) // max(nodes, 1)
    return Share(cores * 1000 // max(nodes, 1), memory_bytes - memory_bytes % (1 << 20))


class LocalCluster:
    """Start with `start`, end with `stop`; or use it as a context manager.

    Start it, and restart its parts, from a thread that lives as long as it shall: the kernel tells the parts that their
    starter is dead when the thread that started them ends.
    """

    def __init__(self, directory: Path, *, nodes: int) -> None:
        self.directory = directory.resolve()
        self.nodes = nodes
        self.controller = Part("controld", self.directory / "controld", [])
        self.parts: dict[str, Part] = {}
        self.address = ""
        self._lock_fd: int | None = None

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, controller_for: Callable[[str], str] | None = None) -> None:
        """Start everything and wait until every part answers. Raises VirialError with what the part said.

        `controller_for` gives the address a node shall use for the controller (a relay's, say) in place of its own.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        try:
            self._start_controller()
            share = machine_share(self.nodes)
            for i in range(self.nodes):
                name = f"node-{i}"
                address = controller_for(name) if controller_for is not None else self.address
                self._start_node(name, NodeOptions(share.cpu_millis, share.memory_bytes, controller=address))
            for part in self.parts.values():
                self._wait_for_ports(part)
        except BaseException:
            self.stop()
            raise

    def _take_lock(self) -> None:
        """One cluster a directory: a second would stop the first one's guardians and so its tasks."""
        fd = os.open(self.directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode("ascii", errors="replace").strip() or "unknown"
            os.close(fd)
            what = f"{self.directory} is in use by another local cluster (pid {holder})"
            raise VirialError(f"{what}; stop it, or name another directory") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
        self._lock_fd = fd

    def _start_controller(self) -> None:
        listen = self.address or "127.0.0.1:0"
        argv = ["-m", "controld", "--data-dir", str(self.controller.data_dir), "--listen", listen]
        argv += ["--metrics-listen", "127.0.0.1:0", "--log-format", "json"]
        self.controller.argv = argv
        self._spawn(self.controller)
        self.address = str(self._wait_for_ports(self.controller)["grpc_address"])
        # Agents and clients know it by this address: started again, it must listen there and not on another free port.
        argv[argv.index("--listen") + 1] = self.address

    def _start_node(self, name: str, options: NodeOptions) -> None:
        data_dir = self.directory / name
        argv = ["-m", "noded", "--name", name, "--data-dir", str(data_dir), "--controllers", options.controller]
        argv += ["--advertise-address", "127.0.0.1", "--allow-root-tasks", "--kill-tasks-on-exit"]
        argv += ["--cpu", f"{options.cpu_millis}m", "--memory", f"{options.memory_bytes >> 20}MiB"]
        argv += ["--bind-address", "127.0.0.1", "--log-format", "json"]
        part = Part(name, data_dir, argv)
        self.parts[name] = part
        self._spawn(part)

    def _spawn(self, part: Part) -> None:
        """Start a part in a session of its own, with its output in its directory."""
        part.data_dir.mkdir(parents=True, exist_ok=True)
        (part.data_dir / "ports.json").unlink(missing_ok=True)
        command = [sys.executable, *part.argv]
        setpriv = shutil.which("setpriv")
        if setpriv is not None:
            # Should this process be killed outright, the part is asked to stop rather than left behind.
            command = [setpriv, "--pdeathsig", "TERM", *command]
        with (self.directory / f"{part.name}.log").open("ab") as log:
            part.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # A task's `python3` is then the one that runs this cluster, with what is installed beside it.
                env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"},
            )

    def _wait_for_ports(self, part: Part) -> dict[str, object]:
        path = part.data_dir / "ports.json"
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if not part.alive:
                raise VirialError(f"{part.name} did not start: {self.tail(part.name)}")
            with contextlib.suppress(FileNotFoundError, ValueError):
                return dict(json.loads(path.read_bytes()))
            time.sleep(0.02)
        raise VirialError(f"{part.name} did not get ready in {START_TIMEOUT_S:g} s: {self.tail(part.name)}")

    def tail(self, name: str) -> str:
        """The last lines a part wrote."""
        with contextlib.suppress(OSError):
            text = (self.directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            return "\n".join(text.strip().splitlines()[-5:])
        return ""

    def restart_dead(self) -> list[str]:
        """Start again what has ended by itself; the names. For whoever supervises: call it often."""
        restarted: list[str] = []
        for part in (self.controller, *self.parts.values()):
            if part.process is not None and not part.alive:
                self._spawn(part)
                restarted.append(part.name)
        return restarted

    def forget(self, name: str) -> None:
        """A part is dead for good: do not restart or stop it."""
        self.parts.pop(name)

    def stop(self) -> None:
        """Stop the nodes with their tasks, then the controller. Kills what does not stop in time. Safe to repeat."""
        self._end(list(self.parts.values()))
        self._end([self.controller])
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _end(self, parts: list[Part]) -> None:
        for part in parts:
            if part.alive and part.process is not None:
                part.process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for part in parts:
            if part.process is None:
                continue
            try:
                part.process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                part.process.kill()
                part.process.wait()
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
