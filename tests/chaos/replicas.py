"""Three controllers, each with its etcd member in a namespace of its own, two agents in another, all real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from controld.store.etcd_client import GrpcWire
from controld.store.etcd_endpoint import SOCKET, parse_endpoint
from controld.store.etcd_wire import MOVE_LEADER, STATUS, Method, Req, Res, WireError
from tests.chaos import disk
from tests.chaos.disk import Disk
from tests.chaos.netns import Lab, lab, run
from tests.support_etcd import require_etcd
from virial import Client
from virial.cli import _authority
from virial.errors import VirialError
from virial.local import kill_guardian
from virialpb.etcd.v1 import etcd_pb2 as pb
from virialpb.identity import Role

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(str(ROOT / part) for part in (".", "client", "protos"))
CONTROLLERS = (1, 2, 3)
AGENTS = 4
NODES = ("node-0", "node-1")
API, PEER = 7700, 2380
HANG_SECONDS = 90.0
DISK_HOST = 3
PREFIX = "vl"


@dataclass
class Racks:
    """Host `i` has controller `c{i}` and member `m{i}`; `disk` is that of the member on DISK_HOST alone. `module` is
    what runs as controld."""

    lab: Lab
    base: Path
    disk: Disk
    module: str = "controld"
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, subprocess.Popen[bytes]])

    @property
    def addresses(self) -> list[str]:
        return [f"{self.lab.address(host)}:{API}" for host in CONTROLLERS]

    def start_member(self, host: int) -> None:
        files = self.base / "authority" / f"controller-c{host}"
        argv = ["controld", "member", "--name", f"m{host}", "--directory", str(self.base / f"m{host}")]
        for each in CONTROLLERS:
            argv += ["--peer", f"m{each}=https://{self.lab.address(each)}:{PEER}"]
        argv += ["--peer-ca", str(files / "members-ca.pem"), "--log-format", "json"]
        argv += ["--peer-certificate", str(files / "member.pem"), "--peer-key", str(files / "member-key.pem")]
        self._spawn(f"m{host}", host, argv)

    def start_controller(self, host: int) -> None:
        argv = [self.module, "--data-dir", str(self.base / f"c{host}"), "--identity", f"c{host}", "--insecure"]
        argv += ["--listen", self.addresses[host - 1], "--peers", ",".join(self.addresses), "--metrics-listen", "off"]
        argv += ["--store-kind", "etcd", "--store-member-dir", str(self.base / f"m{host}"), "--log-format", "json"]
        self._spawn(f"c{host}", host, argv)

    def start_agent(self, name: str) -> None:
        argv = ["noded", "--name", name, "--data-dir", str(self.base / name), "--insecure", "--kill-tasks-on-exit"]
        argv += ["--controllers", ",".join(self.addresses), "--advertise-address", self.lab.address(AGENTS)]
        argv += ["--cpu", "500m", "--memory", "256MiB", "--allow-root-tasks", "--metrics-listen", "off"]
        self._spawn(name, AGENTS, [*argv, "--log-format", "json"])

    def _spawn(self, name: str, host: int, argv: list[str]) -> None:
        command = [*self.lab.enter(host), "setpriv", "--pdeathsig", "KILL", sys.executable, "-m", *argv]
        with (self.base / f"{name}.log").open("ab") as log:
            environment = {**os.environ, "PYTHONPATH": PATHS}
            self.processes[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)

    def restart_dead(self) -> None:
        """As supervisors do."""
        for name, process in tuple(self.processes.items()):
            if process.poll() is not None:
                if name.startswith("c"):
                    self.start_controller(int(name[1:]))
                elif name.startswith("m"):
                    self.start_member(int(name[1:]))

    def etcd(self, host: int) -> int | None:
        """The pid of the etcd itself; None while it is down."""
        member = self.processes[f"m{host}"].pid
        with contextlib.suppress(OSError):
            for pid in Path(f"/proc/{member}/task/{member}/children").read_text().split():
                if Path(f"/proc/{pid}/comm").read_text().strip() == "etcd":
                    return int(pid)
        return None

    def signal_controller(self, host: int, number: int) -> None:
        self.processes[f"c{host}"].send_signal(number)

    def signal_etcd(self, host: int, number: int) -> None:
        pid = self.etcd(host)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def others(self, host: int) -> list[int]:
        return [each for each in CONTROLLERS if each != host]

    async def leader(self, client: Client) -> int:
        """The host whose controller leads; 0: none."""
        return int((await client.get_status()).leader[1:] or 0)

    async def other_leader(self, former: int) -> int:
        """Who leads in place of `former`, as the others see it. They are asked by a new connection each time, since
        `former` may answer for ever whoever once came to it."""
        others = [self.addresses[host - 1] for host in self.others(former)]

        async def look() -> int | None:
            with contextlib.suppress(VirialError):
                async with Client(others, timeout_s=5) as client:
                    found = await self.leader(client)
                    return None if found == former else found
            return None

        return await until_found(look, lambda: f"nobody took the place of c{former}")

    async def etcd_leader(self) -> int:
        """The host whose member leads the others, once one does."""

        async def look() -> int | None:
            seen = await self._members()
            return next((host for host, status in seen.items() if status.leader == status.header.member_id), None)

        return await until_found(look, lambda: "no member leads")

    async def lead_etcd(self, host: int) -> None:
        """Let the member of `host` lead the others, if it runs."""

        async def look() -> int | None:
            seen = await self._members()
            leading = next((each for each, s in seen.items() if s.leader == s.header.member_id), None)
            if host not in seen or leading is None or leading == host:
                return leading
            with contextlib.suppress(WireError):
                request = pb.MoveLeaderRequest(target_id=seen[host].header.member_id)
                await self._ask(leading, MOVE_LEADER, request)
            return None

        await until_found(look, lambda: f"m{host} does not come to lead")

    async def _members(self) -> dict[int, pb.StatusResponse]:
        """What those say that answer."""
        found: dict[int, pb.StatusResponse] = {}
        for host in CONTROLLERS:
            with contextlib.suppress(WireError):
                found[host] = await self._ask(host, STATUS, pb.StatusRequest())
        return found

    async def _ask(self, host: int, method: Method[Req, Res], request: Req) -> Res:
        """Raises WireError."""
        wire = GrpcWire([parse_endpoint(f"unix:{self.base / f'm{host}' / SOCKET}")])
        try:
            return await wire.call(method, request, 1.0)
        finally:
            await wire.close()

    async def settled(self, client: Client) -> int:
        """The leader, once everything runs and every other controller listens to it."""
        said: list[str] = []

        async def look() -> int | None:
            with contextlib.suppress(VirialError):
                status = await client.get_status()
                said[:] = [one for one in status.problems if any(address in one for address in self.addresses)]
                return None if said else int(status.leader[1:] or 0)
            return None

        return await until_found(look, lambda: f"the controllers never settled: {said}")

    async def joined(self, client: Client) -> None:
        """Once every node was admitted."""

        async def look() -> int | None:
            with contextlib.suppress(VirialError):
                return len(await client.list_nodes(brief=True)) == len(NODES) or None
            return None

        await until_found(look, lambda: "the nodes never joined")

    def epochs(self) -> list[str]:
        """The leadership epochs that began, by the controllers' own logs."""
        found: list[str] = []
        for host in CONTROLLERS:
            for line in (self.base / f"c{host}.log").read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    if entry.get("event") == "leader.started":
                        found.append(entry["epoch"])
        return found

    def tracebacks(self) -> list[str]:
        return [path.name for path in self.base.glob("c?.log") if "Traceback" in path.read_text(errors="replace")]

    def print_logs(self) -> None:
        for log in sorted(self.base.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")

    def stop(self) -> None:
        for name in NODES:
            if name in self.processes:
                self.processes[name].terminate()
        for name in NODES:
            if name in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.processes[name].wait(10)
                kill_guardian(self.base / name)
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


def _remove_left() -> None:
    """Disks and directories of runs that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                run(["umount", "--lazy", str(path / f"m{DISK_HOST}")])
            shutil.rmtree(path, ignore_errors=True)


async def until_found(look: Callable[[], object], never: Callable[[], str]) -> int:
    """A hang guard, not a measure."""
    for _ in range(int(HANG_SECONDS / 0.1)):
        found = look()
        if asyncio.iscoroutine(found):
            found = await found
        if isinstance(found, int) and found:
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(never())


@contextlib.asynccontextmanager
async def racks(module: str = "controld") -> AsyncGenerator[Racks]:
    """Started and settled, at the end stopped. What was logged is printed where the test fails."""
    require_etcd()
    _remove_left()
    base = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    with lab(AGENTS) as made_lab:
        member = base / f"m{DISK_HOST}"
        member.mkdir(mode=0o700)
        try:
            made = Racks(made_lab, base, disk.mount(member, base / "disk"), module)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            pytest.skip(f"no disk of a member's own can be made here: {error}")
        _authority.create(base / "authority", "chaos", datetime.now(UTC))
        for host in CONTROLLERS:
            hosts = (made_lab.address(host),)
            _authority.issue(base / "authority", Role.CONTROLLER, f"c{host}", hosts, datetime.now(UTC), 2)
        try:
            for host in CONTROLLERS:
                made.start_member(host)
                made.start_controller(host)
            for name in NODES:
                made.start_agent(name)
            async with Client(made.addresses, timeout_s=HANG_SECONDS) as client:
                await made.settled(client)
                await made.joined(client)
            yield made
        except BaseException:
            made.print_logs()
            raise
        finally:
            made.stop()
            made.disk.close()
            shutil.rmtree(base, ignore_errors=True)
