"""Three controllers, each with its member, as they are deployed: who leads where, what is killed, when all is well."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from controld.store.etcd_client import GrpcWire
from controld.store.etcd_endpoint import SOCKET, parse_endpoint
from controld.store.etcd_wire import MOVE_LEADER, STATUS, WireError
from virial import Client
from virial.errors import VirialError
from virial.local import LocalCluster
from virialpb.etcd.v1 import etcd_pb2 as pb

CONTROLLERS = 3
HANG_SECONDS = 120.0
POLL_SECONDS = 0.05
_STALL = re.compile(r"^virial_controld_loop_stall_max_seconds (\S+)$", re.MULTILINE)


class StuckError(Exception):
    """What was waited for did not come."""


@dataclass
class Rack:
    """Host `i` has the controller `controld-i` and the member `member-i`."""

    cluster: LocalCluster
    client: Client
    wires: list[GrpcWire]
    stall_ms_max: float = 0.0

    async def settled(self) -> int:
        """The host whose controller leads, once everything runs and nothing is amiss."""
        said: list[str] = []
        for _ in range(int(HANG_SECONDS / POLL_SECONDS)):
            with suppress(VirialError, WireError):
                statuses = [await wire.call(STATUS, pb.StatusRequest(), 1.0) for wire in self.wires]
                status = await self.client.get_status()
                addresses = self.cluster.address.split(",")
                said = [problem for problem in status.problems if any(one in problem for one in addresses)]
                level = max(s.raft_index for s in statuses) - min(s.raft_applied_index for s in statuses) < 100
                if len({s.leader for s in statuses} - {0}) == 1 and level and status.leader and not said:
                    return int(status.leader.rpartition("-")[2])
            await asyncio.sleep(POLL_SECONDS)
        raise StuckError(f"the controllers did not settle in {HANG_SECONDS:g} s: {said or 'no answer'}")

    async def lead_etcd(self, host: int) -> None:
        """Let the member of `host` lead the members."""
        for _ in range(int(HANG_SECONDS / POLL_SECONDS)):
            with suppress(WireError):
                statuses = [await wire.call(STATUS, pb.StatusRequest(), 1.0) for wire in self.wires]
                ids = [status.header.member_id for status in statuses]
                leader = statuses[host].leader
                if leader == ids[host]:
                    return
                if leader in ids:
                    request = pb.MoveLeaderRequest(target_id=ids[host])
                    await self.wires[ids.index(leader)].call(MOVE_LEADER, request, 5.0)
            await asyncio.sleep(POLL_SECONDS)
        raise StuckError(f"member-{host} did not come to lead in {HANG_SECONDS:g} s")

    def kill_controller(self, host: int) -> None:
        self.cluster.controllers[host].kill()

    def kill_member(self, host: int) -> None:
        """The etcd itself; its `controld member` starts it again."""
        pid = self.cluster.etcd_pid(f"member-{host}")
        if pid is None:
            raise StuckError(f"member-{host} does not run")
        os.kill(pid, signal.SIGKILL)

    def note_stalls(self) -> None:
        """Before they are gone with their process."""
        for controller in self.cluster.controllers:
            with suppress(OSError, ValueError, KeyError, urllib.error.URLError):
                address = json.loads((controller.data_dir / "ports.json").read_text())["metrics_address"]
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=2) as reply:
                    found = _STALL.search(reply.read().decode())
                self.stall_ms_max = max(self.stall_ms_max, float(found[1]) * 1e3 if found else 0.0)


@asynccontextmanager
async def rack(folder: Path) -> AsyncGenerator[Rack]:
    """Started and settled."""
    os.environ["VIRIAL_CONTROLD__KEEP__ENDED_JOBS"] = "100000"  # every write is looked for at the end
    cluster = LocalCluster(folder, nodes=0, controllers=CONTROLLERS)
    try:
        cluster.start()
    except VirialError as error:
        sys.exit(f"benchmarks.failover: {error}")
    wires = [GrpcWire([parse_endpoint(f"unix:{member.data_dir / SOCKET}")]) for member in cluster.members]
    try:
        async with Client(cluster.address, timeout_s=HANG_SECONDS) as client:
            made = Rack(cluster, client, wires)
            await made.settled()
            yield made
    finally:
        for wire in wires:
            await wire.close()
        cluster.stop()
