"""One control group a slot: killed whole, seen empty, limited where the controllers are writable.

Hosts differ: v2 only, v1 only, or both ("hybrid": v2 under `unified`, without controllers). So killing and limiting
are looked for apart, each in v2 first. Every path is below `root` (normally /sys/fs/cgroup), which tests replace.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CPU_PERIOD_US: Final = 100_000
PIDS_MAX: Final = 32_768
"""Processes and threads of one slot: far more than any loader of data starts, and few enough that a fork bomb leaves
the node its own. Where the kernel numbers fewer processes, a quarter of those."""
OWNER: Final = "user.virial.owner"
FREEZE_TRIES: Final = 20
FREEZE_WAIT_SECONDS: Final = 0.001
"""The v1 freezer is asked for at most 20 ms at a time; what it missed is killed by the next look 100 ms later."""


@dataclass(frozen=True, slots=True)
class Places:
    """Directories under which groups are made; None where that is not possible."""

    unified: Path | None = None
    unified_limits: bool = False
    freezer: Path | None = None
    memory: Path | None = None
    cpu: Path | None = None
    unified_pids: bool = False
    pids: Path | None = None

    @property
    def can_kill(self) -> bool:
        return self.unified is not None or self.freezer is not None


def find_places(root: Path, self_cgroup: str, name: str) -> Places:
    """`self_cgroup` is the text of /proc/self/cgroup; `name` is the directory made beside our own group's children.

    Makes the directories. Never raises: what cannot be made is None."""
    own: dict[str, str] = {}
    for line in self_cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path.lstrip("/")
    unified = None
    limits = False
    for top in (root, root / "unified"):
        if "" in own and (top / "cgroup.controllers").exists():
            unified = _make(top / own[""] / name)
            limits = unified is not None and _enable_limits(unified)
            break

    def v1(controller: str) -> Path | None:
        return _make(root / controller / own[controller] / name) if controller in own else None

    return Places(
        unified=unified,
        unified_limits=limits,
        freezer=None if unified is not None else v1("freezer"),
        memory=None if limits else v1("memory"),
        cpu=None if limits else v1("cpu"),
        unified_pids=(unified_pids := unified is not None and limits and _enable_pids(unified)),
        pids=None if unified_pids else v1("pids"),
    )


def pids_max(kernel_pid_max: str) -> int:
    """The limit of one slot; the argument is the text of /proc/sys/kernel/pid_max."""
    text = kernel_pid_max.strip()
    return min(PIDS_MAX, int(text) // 4) if text.isdigit() else PIDS_MAX


class Cgroup:
    """The group of one slot, over all hierarchies."""

    def __init__(self, places: Places, slot: str) -> None:
        self._places = places
        self._unified = places.unified / slot if places.unified else None
        self._freezer = places.freezer / slot if places.freezer else None
        self._memory = places.memory / slot if places.memory else None
        self._cpu = places.cpu / slot if places.cpu else None
        self._pids = places.pids / slot if places.pids else None

    @property
    def _all(self) -> list[Path]:
        everywhere = (self._unified, self._freezer, self._memory, self._cpu, self._pids)
        return [path for path in everywhere if path is not None]

    @property
    def _counted(self) -> Path | None:
        """Where processes and threads are counted."""
        return self._unified if self._places.unified_pids else self._pids

    @property
    def procs(self) -> list[str]:
        """Files a process writes "0" to in order to join."""
        return [str(path / "cgroup.procs") for path in self._all]

    def create(self, cpu_millis: int, memory_bytes: int, pids_max: int = 0) -> None:
        """0 means no limit. Raises OSError, also when a limit cannot be set although its controller is here."""
        for path in self._all:
            # Parents too: something that tidies empty groups may have taken ours.
            path.mkdir(parents=True, exist_ok=True)
        quota_us = max(1000, cpu_millis * CPU_PERIOD_US // 1000)
        if self._unified is not None and self._places.unified_limits:
            if memory_bytes:
                _write(self._unified / "memory.max", str(memory_bytes))
                _write(self._unified / "memory.oom.group", "1")
            if cpu_millis:
                _write(self._unified / "cpu.max", f"{quota_us} {CPU_PERIOD_US}")
        if self._memory is not None and memory_bytes:
            _write(self._memory / "memory.limit_in_bytes", str(memory_bytes))
        if self._cpu is not None and cpu_millis:
            _write(self._cpu / "cpu.cfs_period_us", str(CPU_PERIOD_US))
            _write(self._cpu / "cpu.cfs_quota_us", str(quota_us))
        if self._counted is not None and pids_max:
            _write(self._counted / "pids.max", str(pids_max))

    def pids(self) -> list[int]:
        """Processes of the group and of groups the task made below it."""
        top = self._unified or self._freezer
        if top is None:
            return []
        return [pid for path in (top, *_below(top)) for pid in _pids(path)]

    def empty(self) -> bool:
        if self._unified is not None:
            events = _read(self._unified / "cgroup.events")
            return events is None or "populated 0" in events
        return not self.pids()

    def kill(self) -> None:
        """SIGKILL to all; returns before they are gone."""
        if self._unified is not None and (self._unified / "cgroup.kill").exists():
            with contextlib.suppress(OSError):
                _write(self._unified / "cgroup.kill", "1")
            return
        # Without freezing, a fork bomb outruns a loop over its pids.
        if self._unified is not None:
            freeze = (self._unified / "cgroup.freeze", "1", "0", self._unified / "cgroup.events", "frozen 1")
        elif self._freezer is not None:
            state = self._freezer / "freezer.state"
            freeze = (state, "FROZEN", "THAWED", state, "FROZEN")
        else:
            return
        file, frozen, thawed, seen, word = freeze
        with contextlib.suppress(OSError):
            _write(file, frozen)
            for _ in range(FREEZE_TRIES):
                if word in (_read(seen) or word):
                    break
                time.sleep(FREEZE_WAIT_SECONDS)
        try:
            for pid in self.pids():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            with contextlib.suppress(OSError):
                _write(file, thawed)

    def oom_kills(self) -> int:
        found = (self._unified, "memory.events"), (self._memory, "memory.oom_control")
        return next((n for path, name in found if path is not None and (n := _count(path / name, "oom_kill"))), 0)

    def forks_refused(self) -> int:
        """How often the group was at its limit of processes and threads."""
        return _count(self._counted / "pids.events", "max") if self._counted is not None else 0

    def remove(self) -> bool:
        """False while a directory is still in use."""
        for path in self._all:
            for below in (*reversed(_below(path)), path):
                try:
                    below.rmdir()
                except FileNotFoundError:
                    continue
                except OSError:
                    return False
        return True


def remove_places(places: Places) -> None:
    """At the end of a guardian; what is still in use stays."""
    for path in _directories(places):
        with contextlib.suppress(OSError):
            path.rmdir()


def sweep(places: Places) -> None:
    """Groups that an earlier guardian left; only what is empty can be removed."""
    for path in _directories(places):
        for below in reversed(_below(path)):
            with contextlib.suppress(OSError):
                below.rmdir()


def claim(places: Places, owner: str) -> None:
    """Write on our groups whose they are, where the kernel keeps such notes."""
    for path in _directories(places):
        with contextlib.suppress(OSError):
            os.setxattr(path, OWNER, owner.encode())


def sweep_others(places: Places, may_live: Callable[[str], bool]) -> None:
    """Groups of guardians of other data directories that were killed: nobody else would ever remove them.

    An empty group of one that lives may be that of a slot which waits for its GO, so the owner's note decides.
    """
    for ours in _directories(places):
        for path in ours.parent.glob("virial-*"):
            owner = _owner(path)
            if path == ours or owner is None or may_live(owner):
                continue
            for below in (*reversed(_below(path)), path):
                with contextlib.suppress(OSError):
                    below.rmdir()


def _owner(path: Path) -> str | None:
    try:
        return os.getxattr(path, OWNER).decode("ascii", "replace")
    except OSError:
        return None


def _directories(places: Places) -> list[Path]:
    everywhere = (places.unified, places.freezer, places.memory, places.cpu, places.pids)
    return [path for path in everywhere if path is not None]


def _enable_limits(group: Path) -> bool:
    """Controllers are given to children only by a group without processes of its own. Where ours is ours to manage
    (we are alone in it, or systemd delegated it), its processes, noded among them, move one level down."""
    parent = group.parent
    wanted = "+memory +cpu"
    try:
        if {"memory", "cpu"} - set((_read(parent / "cgroup.subtree_control") or "").split()):
            inside = _pids(parent)
            if (parent / "cgroup.type").exists() and (inside == [os.getpid()] or _is_delegated(parent)):
                leaf = parent / "virial-guardian"
                leaf.mkdir(exist_ok=True)
                for pid in inside:
                    _write(leaf / "cgroup.procs", str(pid))
            _write(parent / "cgroup.subtree_control", wanted)
        _write(group / "cgroup.subtree_control", wanted)
    except OSError:
        return False
    return True


def _enable_pids(group: Path) -> bool:
    """Apart from the others: where it is not given to us, tasks have their limits of memory and CPU all the same."""
    try:
        for level in (group.parent, group):
            _write(level / "cgroup.subtree_control", "+pids")
    except OSError:
        return False
    return True


def _is_delegated(group: Path) -> bool:
    """systemd marks a unit with Delegate=yes this way."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _make(path: Path) -> Path | None:
    try:
        path.mkdir(exist_ok=True)
    except OSError:
        return None
    return path if os.access(path, os.W_OK) else None


def _below(path: Path) -> list[Path]:
    return [Path(directory) / name for directory, names, _ in os.walk(path) for name in names]


def _count(path: Path, name: str) -> int:
    """The number after `name` in a file of such lines; 0 where there is none."""
    for line in (_read(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _pids(path: Path) -> list[int]:
    return [int(word) for word in (_read(path / "cgroup.procs") or "").split()]


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
