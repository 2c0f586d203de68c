"""One slot's share of the operating system: launcher, pipes, held port, task socket, cgroup, and how it all dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from noded.run import procs
from noded.run.cgroup import PIDS_MAX, Cgroup, Places
from noded.run.logs import Output
from noded.run.protocol import REPLY_BYTES_MAX, Fencing, Started
from noded.run.wire import Closed, Connection

if TYPE_CHECKING:
    from noded.run.fields import JsonObject
    from noded.run.protocol import PrepareRequest
    from noded.run.scribe import Scribe

LAUNCHER: Final = Path(__file__).with_name("launcher.py")
PATH_DEFAULT: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LAUNCHER_PATIENCE_NS: Final = 1_000_000_000
"""A launcher that has not ended this long after its slot was killed is stopped or stuck: it is killed itself."""
KILL_AGAIN_NS: Final = 50_000_000
"""In weak mode each try reads all of /proc."""
TASK_CONNECTIONS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Site:
    """What all slots of this guardian have in common."""

    fencing: Fencing
    places: Places
    socket_dir: Path
    mark: str
    """Begins the mark in every task's environment; names the data directory, so the next guardian finds strays."""
    allow_root: bool
    open_files: int
    """The soft limit tasks get: the one the guardian was started with, before it raised its own."""
    pids_max: int = PIDS_MAX
    """Processes and threads of one slot, where the kernel counts them for us."""
    finder: procs.Finder = field(default_factory=procs.Finder)

    @property
    def weak(self) -> bool:
        return self.fencing is Fencing.WEAK


def spawn_python(argv: list[str], env: dict[str, str], fds: dict[int, int]) -> int:
    """Starts this interpreter without site packages; `fds` maps child fd -> ours, nothing else is inherited.

    But for LD_LIBRARY_PATH: an interpreter that needed it to start this process needs it again. Tasks get none of it.
    """
    libraries = os.environ.get("LD_LIBRARY_PATH")
    if libraries is not None:
        env = {**env, "LD_LIBRARY_PATH": libraries}
    # Sources first moved out of the way: a dup2 must not overwrite one that is still needed.
    moved = {target: os.dup(source) for target, source in fds.items()}
    high = {target: _above(fd, max(fds) + 1) for target, fd in moved.items()}
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, *argv],
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in high.items()],
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD],
        )
    finally:
        for fd in high.values():
            os.close(fd)


def _above(fd: int, low: int) -> int:
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, low)
    os.close(fd)
    return high


def hold_port(address: str) -> socket.socket:
    """Bound but not listening, SO_REUSEADDR: the task binds the same port with SO_REUSEADDR and listens, while nobody
    who binds port 0 is given it. Any other mix of the flag was EADDRINUSE when tried. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, 0))
    except OSError:
        sock.close()
        raise
    return sock


def search_path() -> str:
    """Where this node's agent finds programs, so that an operator sets it for agent and tasks in one place."""
    return os.environ.get("PATH") or PATH_DEFAULT


def task_environment(
    who: JsonObject, socket_path: str, injected: dict[str, str], user: dict[str, str]
) -> dict[str, str]:
    """What a task sees. Of the guardian's own environment only the search path: a device variable there would show
    devices that were not granted (H10). What the user set wins over what is injected (H14)."""
    base = {
        "PATH": search_path(),
        "HOME": who["home"],
        "USER": who["name"],
        "LOGNAME": who["name"],
        "SHELL": who["shell"],
        "LANG": "C.UTF-8",
        "VIRIAL_SOCK": socket_path,
    }
    return {**base, **injected, **user}


class Runner:
    """Made by Reserve, gone with Forget. Raises OSError from the constructor when the node lacks something."""

    def __init__(self, site: Site, request: PrepareRequest, socket_name: str, now_ns: int) -> None:
        self.site = site
        self.request = request
        self.mark = f"{site.mark}/{request.slot}"
        self.socket_path = site.socket_dir / socket_name
        self.connections: set[Connection] = set()
        self.listener: socket.socket | None = None
        self.launcher_pid: int | None = None
        self.init_pid: int | None = None
        self.born_ns = now_ns
        self.killed_at_ns: int | None = None
        self.kill_again_ns = 0
        self._reaped_ns = now_ns
        self._held: socket.socket | None = None
        self._init_pidfd: int | None = None
        self._task_pidfd: int | None = None
        self._who: JsonObject = {}
        self._complained = False
        self._cgroup = Cgroup(site.places, request.slot)
        self.control: Connection | None = None
        self.outputs: tuple[Output, ...] = ()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if request.hold_port:
                self._held = hold_port(request.bind_address)
            self._cgroup.create(request.cpu_millis, request.memory_bytes, site.pids_max)
            self._spawn()
            undo.pop_all()

    @property
    def port(self) -> int:
        return 0 if self._held is None else int(self._held.getsockname()[1])

    # -- up

    def _spawn(self) -> None:
        spec = self.request.spec
        ours, theirs = socket.socketpair()
        pipes = [os.pipe(), os.pipe()]
        directory = f"tasks/{self.request.slot}"
        self.outputs = tuple(
            Output(reader, f"{directory}/{name}.log", spec.log_bytes_max, spec.log_files_max)
            for name, (reader, _) in zip(("stdout", "stderr"), pipes, strict=True)
        )
        self.control = Connection(ours, REPLY_BYTES_MAX)
        try:
            self.launcher_pid = spawn_python(
                ["-I", "-S", "-E", str(LAUNCHER)],
                {},
                {0: theirs.fileno(), 1: pipes[0][1], 2: pipes[1][1]},
            )
        finally:
            theirs.close()
            for _, writer in pipes:
                os.close(writer)
        self._tell(
            {
                "op": "check",
                "argv": list(spec.argv),
                "cwd": spec.cwd,
                "user": spec.user,
                "group": spec.group,
                "allow_root": self.site.allow_root,
                "path": spec.env.get("PATH", search_path()),
                "mode": "weak" if self.site.weak else "pidns",
                "guardian_pid": os.getpid(),
                "cgroup_procs": self._cgroup.procs,
                "socket_dir": str(self.site.socket_dir),
                "open_files": self.site.open_files,
            }
        )

    def open_socket(self, who: JsonObject) -> socket.socket:
        """After the launcher has said who the task will be. Raises OSError."""
        self._who = who
        self.socket_path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.setblocking(False)
        self.listener.bind(str(self.socket_path))
        self.socket_path.chmod(0o600)
        if os.geteuid() == 0:
            os.chown(self.socket_path, who["uid"], who["gid"])
        self.listener.listen(TASK_CONNECTIONS_MAX)
        return self.listener

    def launch(self, env_add: dict[str, str]) -> None:
        user = self.request.spec.env
        env = task_environment(self._who, str(self.socket_path), env_add, user)
        # Last, and not the user's to set: strays are found by it.
        self._tell({"op": "go", "env": {**env, procs.MARK: self.mark}})

    def set_deadline(self, deadline_ns: int) -> None:
        self._tell({"deadline_ns": deadline_ns})

    def note_init(self, pid: int) -> None:
        self.init_pid = pid
        self._init_pidfd = procs.open_pidfd(pid, parents=(self.launcher_pid, os.getpid()))

    def note_started(self, started: Started) -> None:
        if self.site.weak:
            self.note_init(started.init_pid)
        self._task_pidfd = procs.open_pidfd(started.pid, started.start_ticks)

    # -- down

    def terminate(self) -> None:
        procs.send(self._task_pidfd, signal.SIGTERM)

    def kill(self, now_ns: int) -> None:
        """SIGKILL to all of it. Called again and again until `empty`, as a fork bomb or a weak fence needs."""
        if self.killed_at_ns is None:
            self.killed_at_ns = now_ns
        self.kill_again_ns = now_ns + KILL_AGAIN_NS
        procs.send(self._init_pidfd, signal.SIGKILL)
        self._cgroup.kill()
        late = now_ns - self.killed_at_ns >= LAUNCHER_PATIENCE_NS
        if self.site.weak:
            self._tell({"op": "kill"})
            for pid in self.site.finder.look(0, now_ns).strays(self.mark, self.launcher_pid):
                procs.kill(pid)
        if self.launcher_pid is not None and (late or (self.init_pid is None and not self.site.weak)):
            # Its death kills an init whose pid we were never told (PDEATHSIG, and no "go" without telling us).
            procs.kill(self.launcher_pid)

    def note_reaped(self, now_ns: int) -> None:
        """The launcher is gone."""
        self.launcher_pid = None
        self._reaped_ns = now_ns

    def empty(self, now_ns: int) -> bool:
        """True once it is proven that nothing is left. The launcher must have been reaped by the guardian's loop."""
        if self.launcher_pid is not None or not self._cgroup.empty():
            return False
        if self._init_pidfd is not None and not procs.has_exited(self._init_pidfd):
            return False
        # Who was not there after the launcher had gone has nobody left to fork it.
        return not self.site.weak or not self.site.finder.look(self._reaped_ns, now_ns).strays(self.mark, None)

    def oom(self) -> bool:
        return self._cgroup.oom_kills() > 0

    def complain(self, scribe: Scribe) -> None:
        """Say in the task's own log what the kernel refused it: `fork` only told it to try again."""
        refused = 0 if self._complained else self._cgroup.forks_refused()
        if refused and self.outputs:
            self._complained = True
            limit = self.site.pids_max
            self.outputs[1].say(scribe, f"the task was at its limit of {limit} processes and threads, {refused} times")

    def disconnect(self) -> list[Connection]:
        """Closes the task's socket and connections; returns those that were open, for the loop to forget."""
        gone = list(self.connections)
        self.connections.clear()
        if self.listener is not None:
            self.socket_path.unlink(missing_ok=True)
        return gone

    def drop(self) -> None:
        """All but the held port: that stays taken until noded has released the slot."""
        if self.launcher_pid is not None:
            procs.kill(self.launcher_pid)
        for fd in (self._init_pidfd, self._task_pidfd):
            if fd is not None:
                os.close(fd)
        self._init_pidfd = self._task_pidfd = None
        self._cgroup.remove()

    def close(self) -> None:
        self.drop()
        if self.control is not None:
            self.control.close()
        for output in self.outputs:
            output.close()
        if self._held is not None:
            self._held.close()
            self._held = None

    def _tell(self, message: JsonObject) -> None:
        # A launcher that is gone is noticed by its reaping.
        if self.control is not None:
            with contextlib.suppress(Closed):
                self.control.send(message)
