"""The parts of a local cluster together."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from virial.errors import VirialError
from virial.local import members
from virial.local.part import Part, end_all
from virial.local.ports import ReservedPorts

LOCK_FILE: Final = "cluster.lock"
CONTROLLER_COUNTS: Final = (1, 3, 5)
MEMBERS_NAME: Final = "virial-local"
# There from the first start on, of a controller with either store.
_SQLITE_STATE: Final = "state.sqlite3"
_ETCD_STATE: Final = "seen"
_LEADER_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.05


@dataclass(slots=True)
class NodeOptions:
    """What one noded is started with beyond the defaults. `controller`: of each controller, HOST:PORT with commas."""

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

    `controllers`: 1 with the embedded store, named "controld"; 3 or 5 with an etcd member each, "controld-0" and
    "member-0" and so on. Nodes are "node-0" and so on. `part` gives any of them by its name.

    Start it, and restart its parts, from a thread that lives as long as it shall: the kernel tells the parts that their
    starter is dead when the thread that started them ends.
    """

    def __init__(self, directory: Path, *, nodes: int, controllers: int = 1) -> None:
        """Raises VirialError for another number of controllers than 1, 3 or 5."""
        if controllers not in CONTROLLER_COUNTS:
            raise VirialError(f"{controllers} controllers: take 1, 3 or 5; an even number survives no more losses")
        self.directory = directory.resolve()
        self.nodes = nodes
        names = ["controld"] if controllers == 1 else [f"controld-{i}" for i in range(controllers)]
        state = _SQLITE_STATE if controllers == 1 else _ETCD_STATE
        self.controllers = [Part(name, self.directory / name, [], state_file=state) for name in names]
        self.members: list[Part] = []
        self.agents: dict[str, Part] = {}
        self.address = ""
        """Of every controller: HOST:PORT, with commas between several. Clients and agents take it as it is."""
        self._ports: ReservedPorts | None = None
        self._lock_fd: int | None = None

    @property
    def controller(self) -> Part:
        """The one there is, or the first of several."""
        return self.controllers[0]

    def all_parts(self) -> list[Part]:
        """In the order in which they start."""
        return [*self.members, *self.controllers, *self.agents.values()]

    def part(self, name: str) -> Part:
        """Raises VirialError where there is none of this name."""
        found = next((part for part in self.all_parts() if part.name == name), None)
        if found is None:
            raise VirialError(f"no part {name!r}: there are {', '.join(part.name for part in self.all_parts())}")
        return found

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, controller_for: Callable[[str], str] | None = None) -> None:
        """Start everything and wait until every part answers. Raises VirialError with what the part said.

        `controller_for` gives the address a node shall use for the controller (a relay's, say) in place of its own.
        """
        if len(self.controllers) > 1:
            members.require_etcd()
            members.require_short(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        try:
            self._start_controllers()
            share = machine_share(self.nodes)
            for i in range(self.nodes):
                name = f"node-{i}"
                address = controller_for(name) if controller_for is not None else self.address
                self._start_node(name, NodeOptions(share.cpu_millis, share.memory_bytes, controller=address))
            for part in self.agents.values():
                part.wait_for_ports()
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

    def _start_controllers(self) -> None:
        """With their members, where there are several: a controller waits for its own."""
        names = [controller.name for controller in self.controllers]
        member_names = [f"member-{i}" for i in range(len(names))] if len(names) > 1 else []
        self._ports = ReservedPorts(self.directory, [*names, *member_names])
        addresses = [self._ports.address(name) for name in names]
        peers = {name: self._ports.address(name) for name in member_names}
        self.address = ",".join(addresses)
        self.members = [members.make_member(name, self.directory / name, peers, MEMBERS_NAME) for name in member_names]
        for controller, address in zip(self.controllers, addresses, strict=True):
            controller.argv = ["-m", "controld", "--data-dir", str(controller.data_dir), "--listen", address]
            controller.argv += ["--metrics-listen", "127.0.0.1:0", "--log-format", "json"]
        for controller, member in zip(self.controllers, self.members, strict=False):
            controller.argv += ["--identity", controller.name, "--peers", self.address]
            controller.argv += ["--store-kind", "etcd", "--store-member-dir", str(member.data_dir)]
        for part in (*self.members, *self.controllers):
            part.spawn()
        for controller in self.controllers:
            self._wait_for_controller(controller)
        for member in self.members:
            member.note_state()

    def _wait_for_controller(self, controller: Part) -> None:
        """Raises VirialError with what it said, or what its members said that it waited for in vain."""
        try:
            controller.wait_for_ports()
        except VirialError as error:
            down = [f"{member.name}: {member.tail()}" for member in self.members if not member.alive]
            if not down:
                raise
            raise VirialError("\n".join([str(error), *down])) from error

    def _start_node(self, name: str, options: NodeOptions) -> None:
        data_dir = self.directory / name
        argv = ["-m", "noded", "--name", name, "--data-dir", str(data_dir), "--controllers", options.controller]
        argv += ["--advertise-address", "127.0.0.1", "--allow-root-tasks", "--kill-tasks-on-exit"]
        argv += ["--cpu", f"{options.cpu_millis}m", "--memory", f"{options.memory_bytes >> 20}MiB"]
        argv += ["--bind-address", "127.0.0.1", "--log-format", "json"]
        part = Part(name, data_dir, argv)
        self.agents[name] = part
        part.spawn()

    def leader(self, timeout_s: float = _LEADER_TIMEOUT_S) -> str:
        """The name of the controller that leads, once one does. Raises VirialError."""
        if len(self.controllers) == 1:
            return self.controller.name
        from virial import SyncClient

        with SyncClient(self.address, timeout_s=timeout_s) as client:
            return client.get_status().leader

    def leading_member(self, timeout_s: float = _LEADER_TIMEOUT_S) -> str:
        """The name of the etcd member that leads the members, once one does. Raises VirialError."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for member in self.members:
                if members.leads(member):
                    return member.name
            time.sleep(_POLL_S)
        raise VirialError(f"no member led in {timeout_s:g} s")

    def etcd_pid(self, name: str) -> int | None:
        """Of the etcd that the member `name` runs; None while it is down. The part itself is what watches over it."""
        return members.etcd_pid(self.part(name))

    def restart_dead(self) -> list[str]:
        """Start again what has ended by itself; the names. Raises VirialError for a part whose state is gone.

        `Supervision` does so for longer.
        """
        restarted: list[str] = []
        for part in self.all_parts():
            part.note_state()
            if part.process is not None and not part.alive:
                part.spawn()
                restarted.append(part.name)
        return restarted

    def forget(self, name: str) -> None:
        """A node is dead for good: do not restart or stop it."""
        self.agents.pop(name)

    def stop(self) -> None:
        """Stop the nodes with their tasks, then the controllers, then the members. Kills what does not stop in time.
        Safe to repeat."""
        end_all(self.agents.values())
        end_all(self.controllers)
        for member in self.members:  # one by one: a leader among them hands over to one that stays, or waits for it
            end_all([member])
        if self._ports is not None:
            self._ports.close()
            self._ports = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
