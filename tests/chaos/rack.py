"""A controller and some agents as real processes, with the means to hurt them and to look at what is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

import virial
from noded.run import procs
from virial.local import LocalCluster, Part, guardian_pid
from virial.models import CheckpointPolicy, Durability, Gang, Job, JobSpec, Resources, TaskSpec, Writes

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
RANK = Path(__file__).with_name("rank.py")
HANG_SECONDS = 90.0
SECOND_NS = 1_000_000_000
LONG = bool(os.environ.get("VIRIAL_LONG"))
SEED = int(os.environ.get("VIRIAL_SEED", "1"))
PATHS = os.pathsep.join(str(ROOT / part) for part in (".", "client", "protos"))
MARK = "CHAOS_MARK"
ESCAPED = "sleep 612"  # as rank.py has it


def until(look: Callable[[], T | None], what: str, seconds: float = HANG_SECONDS) -> T:
    """What `look` finds, once it finds something. A hang guard, not a measure."""
    give_up_s = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < give_up_s, f"never: {what}"
        time.sleep(0.02)
    return found


def boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def alive(pid: int) -> bool:
    process = procs.read_process(pid)
    return process is not None and not process.zombie


def marked(*marks: str) -> dict[int, str]:
    """Every live process with one of `marks` in its environment or its command line: pid -> command line."""
    found: dict[int, str] = {}
    wanted = [mark.encode() for mark in marks]
    for process in procs.all_processes():
        with contextlib.suppress(OSError):
            directory = Path(f"/proc/{process.pid}")
            command = (directory / "cmdline").read_bytes()
            text = command + (directory / "environ").read_bytes()
            if any(mark in text for mark in wanted) and not process.zombie and process.pid != os.getpid():
                found[process.pid] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


@dataclass
class Rack:
    """A LocalCluster whose every process, tasks and their children too, carries a mark that nothing else has."""

    cluster: LocalCluster
    mark: str
    base: Path
    clients: list[virial.SyncClient] = field(default_factory=list[virial.SyncClient])

    def client(self, timeout_s: float = HANG_SECONDS) -> virial.SyncClient:
        made = virial.SyncClient(self.cluster.address, timeout_s=timeout_s)
        self.clients.append(made)
        return made

    @property
    def python(self) -> str:
        return sys.executable

    @property
    def controller(self) -> Part:
        return self.cluster.controller

    def node(self, name: str) -> Part:
        return self.cluster.agents[name]

    def kill(self, part: Part) -> None:
        """SIGKILL to one process alone, and see it gone."""
        assert part.process is not None
        part.process.kill()
        part.process.wait()

    def restart(self) -> None:
        """Start whatever is dead again, as its supervisor does. Does not wait for it."""
        self.cluster.restart_dead()

    def until_ready(self, nodes: int | None = None) -> None:
        """The controller answers and so many nodes (all, if not said) take work."""
        client, wanted = self.client(), self.cluster.nodes if nodes is None else nodes
        until(lambda: sum(n.schedulable for n in client.list_nodes(brief=True)) >= wanted, f"{wanted} nodes ready")

    def lines(self, name: str) -> list[list[str]]:
        """What the tasks wrote with one append each: whole lines, in words."""
        path = self.base / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def statuses(self) -> dict[tuple[str, str], dict[str, Any]]:
        """(node, slot) -> what the node's own file says of it."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for path in self.cluster.directory.glob("*/tasks/*/status.json"):
            with contextlib.suppress(FileNotFoundError):
                found[(path.parts[-4], path.parent.name)] = json.loads(path.read_bytes())
        return found

    def exit_of(self, node: str, slot: str) -> dict[str, Any] | None:
        """How a task ended, by its node's own file; None while it runs."""
        return self.statuses().get((node, slot), {}).get("exit")

    def pids(self, job: str, generation: int = 1) -> dict[str, int]:
        """Slot -> pid of the task that runs there, by the nodes' own files."""
        return {
            slot: status["pid"]
            for (_, slot), status in self.statuses().items()
            if slot.startswith(f"{job}.{generation}.") and status["state"] == "RUNNING" and status["pid"]
        }

    def processes(self) -> dict[int, str]:
        """Everything of this rack that lives, by its mark or its directory: pid -> command line."""
        return marked(self.mark, str(self.base))

    def escaped(self, least: int) -> list[int] | None:
        """What rank.py --escape has become, by the host's pids, if there are so many."""
        found = [pid for pid, command in self.processes().items() if command.startswith(ESCAPED)]
        return found if len(found) >= least else None

    @staticmethod
    def start_ns(pid: int) -> int:
        """When the process started, BOOTTIME, rounded down to the kernel's tick."""
        process = procs.read_process(pid)
        assert process is not None, f"process {pid} is gone"
        return process.start_ticks * SECOND_NS // os.sysconf("SC_CLK_TCK")

    def spec(self, name: str, *arguments: str, command: tuple[str, ...] = (), ranks: int = 1, **fields: Any) -> JobSpec:
        """A job of tests/chaos/rank.py with `arguments`, or of `command`."""
        task = TaskSpec(
            command=command or (sys.executable, str(RANK), str(self.base), *arguments),
            env=(("PYTHONPATH", PATHS), ("PATH", os.environ["PATH"]), (MARK, self.mark)),
            working_directory=str(self.base),
            grace_ns=SECOND_NS,
        )
        checkpoints = self.base / "checkpoints" / name
        checkpoints.mkdir(parents=True, exist_ok=True)
        return JobSpec(
            name=name,
            task=task,
            resources=Resources(cpu_millis=100, memory_bytes=128 << 20),
            gang=Gang(ranks=ranks),
            writes=fields.pop("writes", Writes.TOKEN),
            checkpoint=CheckpointPolicy(durability=Durability.SHARED, directory=str(checkpoints)),
            **fields,
        )

    def until_running(self, job: str, ranks: int, generation: int = 1) -> dict[str, int]:
        """Slot -> pid, once every rank runs and the controller knows it."""
        client = self.client()

        def look() -> dict[str, int] | None:
            current = client.get_job(job).current
            found = self.pids(job, generation)
            active = current is not None and (current.number, current.phase) == (generation, "ACTIVE")
            return found if active and len(found) >= ranks else None

        return until(look, f"{ranks} ranks of {job} run")

    def until_ended(self, job: str) -> Job:
        client = self.client()

        def look() -> Job | None:
            found = client.get_job(job)
            return found if found.state.ended else None

        return until(look, f"{job} ended")

    def until_all_ended(self) -> list[Job]:
        client = self.client()

        def look() -> list[Job] | None:
            jobs = client.list_jobs()
            return jobs if all(job.state.ended for job in jobs) else None

        return until(look, "every job ended")

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.cluster.stop()

    def stay_clean(self) -> None:
        """Nothing of this rack lives. Fails with what does, after killing it."""
        with contextlib.suppress(AssertionError):
            until(lambda: not self.processes(), "all processes gone", 10)
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, left


@contextlib.contextmanager
def rack(nodes: int) -> Generator[Rack]:
    """Started, and at the end stopped and seen gone."""
    mark = f"chaos-{uuid.uuid4().hex}"
    # Short: unix sockets lie below it, and their paths are bounded.
    base = Path(tempfile.mkdtemp(prefix="vc-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        patch.setenv("PYTHONPATH", PATHS)
        made = Rack(LocalCluster(base / "cluster", nodes=nodes), mark, base)
        try:
            made.cluster.start()
            made.until_ready()
            yield made
        except BaseException:
            for log in sorted(made.cluster.directory.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
            raise
        finally:
            made.close()
            guardians = [guardian_pid(part.data_dir) for part in made.cluster.agents.values()]
            try:
                made.stay_clean()
                assert guardians == [None] * len(guardians)
            finally:
                shutil.rmtree(base, ignore_errors=True)


__all__ = [
    "LONG",
    "MARK",
    "PATHS",
    "ROOT",
    "SECOND_NS",
    "SEED",
    "Rack",
    "alive",
    "boottime_ns",
    "marked",
    "rack",
    "until",
]
