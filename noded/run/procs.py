"""Questions about processes, asked of /proc. `procroot` is an argument so that tests can fake it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
MARK: Final = "VIRIAL_GUARD"
"""Variable in every task's environment whose value names its data directory and slot: how strays are found again."""


FRESH_NS: Final = 20_000_000


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    ppid: int
    start_ticks: int
    zombie: bool


def boot_id(procroot: Path = PROC) -> str:
    return (procroot / "sys/kernel/random/boot_id").read_text().strip()


def read_process(pid: int, procroot: Path = PROC) -> Process | None:
    try:
        text = (procroot / str(pid) / "stat").read_bytes().decode("ascii", "replace")
    except OSError:
        return None
    # The command's name may contain spaces and brackets: everything counts from the last one.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return Process(pid, int(fields[1]), int(fields[19]), fields[0] in ("Z", "X"))


def identity(procroot: Path = PROC) -> str:
    """This process among all that this host ever ran: its PID namespace, its pid there and its start."""
    process = read_process(os.getpid(), procroot)
    ticks = 0 if process is None else process.start_ticks
    return f"{os.stat(procroot / 'self/ns/pid').st_ino} {os.getpid()} {ticks}"


def may_live(identity: str, procroot: Path = PROC) -> bool:
    """False when the process of that `identity()` is certainly gone: of another PID namespace nobody here can tell."""
    words = identity.split()
    if len(words) != 3 or not all(word.isdigit() for word in words):
        return True
    namespace, _, _ = map(int, words)
    return namespace != os.stat(procroot / "self/ns/pid").st_ino or living(identity, procroot) is not None


def living(identity: str, procroot: Path = PROC) -> int | None:
    """The pid of the process of that `identity()`, where it certainly lives."""
    words = identity.split()
    if len(words) != 3 or not all(word.isdigit() for word in words):
        return None
    namespace, pid, ticks = map(int, words)
    if namespace != os.stat(procroot / "self/ns/pid").st_ino:
        return None
    process = read_process(pid, procroot)
    return pid if process is not None and not process.zombie and process.start_ticks == ticks else None


def all_processes(procroot: Path = PROC) -> list[Process]:
    found = (read_process(int(name), procroot) for name in os.listdir(procroot) if name.isdigit())
    return [process for process in found if process is not None]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All processes of one moment, without zombies, which hold nothing."""

    at_ns: int
    processes: tuple[Process, ...]
    marks: dict[int, str]
    """pid -> its mark. Best effort: a task may wipe its environment after it left its session."""

    def strays(self, mark: str, ancestor: int | None) -> list[int]:
        """Pids that descend from `ancestor` (itself left out) or carry the mark."""
        found: set[int] = set() if ancestor is None else {ancestor}
        grew = ancestor is not None
        while grew:
            more = {process.pid for process in self.processes if process.ppid in found} - found
            found |= more
            grew = bool(more)
        found.discard(ancestor or 0)
        found |= {pid for pid, own in self.marks.items() if own == mark and pid != ancestor}
        return sorted(found)


def take_snapshot(now_ns: int = 0, procroot: Path = PROC) -> Snapshot:
    processes = tuple(process for process in all_processes(procroot) if not process.zombie)
    marks: dict[int, str] = {}
    name = f"{MARK}=".encode()
    for process in processes:
        if process.pid != os.getpid():
            with contextlib.suppress(OSError):
                for variable in (procroot / str(process.pid) / "environ").read_bytes().split(b"\0"):
                    if variable.startswith(name):
                        marks[process.pid] = variable[len(name) :].decode("utf-8", "replace")
    return Snapshot(now_ns, processes, marks)


class Finder:
    """Snapshots shared by all slots that are looked at in one moment: reading all of /proc takes milliseconds."""

    def __init__(self) -> None:
        self._last: Snapshot | None = None

    def look(self, since_ns: int, now_ns: int) -> Snapshot:
        """A snapshot begun at `since_ns` or later, and not older than FRESH_NS."""
        if self._last is None or self._last.at_ns < max(since_ns, now_ns - FRESH_NS):
            self._last = take_snapshot(now_ns)
        return self._last


def kill(pid: int) -> None:
    """0 and below would mean whole groups, 1 the host's init: never those."""
    if pid <= 1:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def open_pidfd(pid: int, start_ticks: int | None = None, parents: tuple[int | None, ...] = ()) -> int | None:
    """A pidfd that is certainly of that process, or None when it is gone (and its pid may be someone else's)."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    process = read_process(pid)
    right = (
        process is not None
        and (start_ticks is None or process.start_ticks == start_ticks)
        and (not parents or process.ppid in parents)
    )
    if right and not has_exited(fd):
        return fd
    os.close(fd)
    return None


def has_exited(pidfd: int) -> bool:
    """For the init of a PID namespace this also means that the namespace is empty: the kernel notifies of its exit
    only after every other process of the namespace is gone."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def send(pidfd: int | None, signum: int) -> None:
    if pidfd is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(pidfd, signum)
