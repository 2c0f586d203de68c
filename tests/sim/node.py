"""One host: its clock, disk, guardian and noded. What noded runs is real; what it runs on is simulated here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from noded.core import events as e
from noded.core import instructions as i
from noded.core.agent import AgentCore
from noded.core.messages import Device, Inventory, NodeFacts, SlotRecord
from noded.driver import Driver
from noded.files import NodeFiles
from noded.link.bulk import BulkLink, Target
from noded.link.control import ControlLink
from noded.logs import NodeLog
from noded.run import protocol
from noded.run.client import Connected, GuardianClient, GuardianUnavailable
from noded.run.protocol import SlotState, SlotStatus
from noded.run.slots import Outcome
from noded.worker import Worker
from tests.sim.clock import HostClock
from tests.sim.disk import LOCAL_TIER, HostDisk, Tree, check_shard
from tests.sim.guardian import WIRE_S, LineConnection, SimGuardian
from tests.sim.loop import Life, Process
from tests.sim.streams import SimDialer
from tests.sim.task import Program, Rank
from virialpb.ids import Epoch, NodeUid, SlotId, Token

if TYPE_CHECKING:
    from tests.sim.network import Network
    from tests.sim.world import World

T = TypeVar("T")
FILE_S = (0.0005, 0.01)
GUARDIAN_START_S = (0.1, 0.5)
INVENTORY_S = (0.05, 1.0)


class SimFiles(NodeFiles):
    """The agent's own files on a simulated disk."""

    def __init__(self, disk: HostDisk) -> None:
        super().__init__(Path("/data"))
        self._disk = disk

    def leader(self) -> tuple[Epoch, str]:
        return self._disk.leader_epoch, self._disk.cluster_uid

    def save_leader(self, leader_epoch: Epoch, cluster_uid: str) -> None:
        self._disk.leader_epoch, self._disk.cluster_uid = leader_epoch, cluster_uid

    def records(self) -> tuple[SlotRecord, ...]:
        return tuple(record for _, record in sorted(self._disk.records.items()))

    def remember(self, record: SlotRecord) -> None:
        self._disk.records[record.slot] = record

    def forget(self, slot: str) -> None:
        self._disk.records.pop(slot, None)


class SimWorker(Worker):
    """Blocking work takes a little virtual time and no thread."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._rng = host.world.rng(f"worker/{host.name}/{host.lives}")

    async def run(self, work: Callable[[], T], timeout_seconds: float) -> T:
        del timeout_seconds
        await asyncio.sleep(self._rng.uniform(*FILE_S))
        return work()


class _Writer:
    """noded's end of its connection to the guardian."""

    def __init__(self, host: Host, guardian: SimGuardian, connection: LineConnection) -> None:
        self._host = host
        self._guardian = guardian
        self._connection = connection
        self._last_s = 0.0

    def write(self, line: bytes) -> None:
        loop = self._host.world.loop
        self._last_s = max(self._last_s, loop.time() + self._host.rng.uniform(*WIRE_S))
        message = protocol.decode_line(line)
        loop.call_at(
            self._last_s, self._guardian.hear_noded, self._connection, message, context=self._guardian.process.context
        )

    async def drain(self) -> None:
        return

    def close(self) -> None:
        loop, guardian = self._host.world.loop, self._guardian
        loop.call_soon(guardian.drop_control, self._connection, "closed", context=guardian.process.context)


class SimGuardianClient(GuardianClient):
    """The real client, over a simulated socket."""

    def __init__(self, host: Host, process: Process) -> None:
        super().__init__(Path("/data"), Path("/run"))
        self._host = host
        self._process = process

    async def _open(self) -> tuple[asyncio.StreamReader, protocol.Hello]:
        host = self._host
        if host.guardian is None or not host.guardian.process.alive:
            await asyncio.sleep(host.rng.uniform(*GUARDIAN_START_S))
            host.start_guardian()
        guardian = host.guardian
        assert guardian is not None
        reader = asyncio.StreamReader(limit=16 << 20)
        connection = LineConnection(self._process, host.rng, lambda line: _feed(reader, line))
        guardian.process.on_death.append(connection.close)
        writer = _Writer(host, guardian, connection)
        self._process.on_death.append(writer.close)
        writer.write(protocol.encode_line({"id": 0, "op": "hello"}))
        try:
            async with asyncio.timeout(self._timeout_s):
                hello = protocol.hello_from_json(protocol.decode_line(await reader.readline()))
        except (TimeoutError, ValueError) as error:
            writer.close()
            raise GuardianUnavailable(f"no proper hello: {error!r}") from None
        self._writer = cast("asyncio.StreamWriter", writer)
        await self._events.put(Connected(hello))
        return reader, hello


def _feed(reader: asyncio.StreamReader, line: bytes) -> None:
    if line:
        reader.feed_data(line)
    else:
        reader.feed_eof()


class SimDriver(Driver):
    """The real driver, on a simulated machine."""

    def __init__(self, host: Host, core: AgentCore, guardian: GuardianClient, log: NodeLog, worker: Worker) -> None:
        self._host = host
        files = SimFiles(host.disk)
        super().__init__(
            core, guardian, files, worker, host.clock.boottime_ns, log, bind_address="", on_handled=host.handled
        )

    def _kill(self, order: i.KillSlot) -> None:
        self._host.kill_pid(order.pid)

    async def _verify(self, order: i.VerifyShard) -> None:
        problem = await self._worker.run(
            lambda: check_shard(self._tree(order.directory), order.directory, order.restore), 1
        )
        if problem is None:
            self.post(e.ShardVerified(order.slot, order.token))
        else:
            self._fail(order.slot, order, *problem)

    async def _make_directory(self, order: i.MakeDirectory) -> None:
        def make() -> bool:
            tree = self._tree(order.directory)
            if not tree.full:
                tree.directories.setdefault(order.directory, {})
            return not tree.full

        if await self._worker.run(make, 1):
            self.post(e.DirectoryMade(order.call_id))
        else:
            self.post(e.DirectoryFailed(order.call_id, full=True, detail="no room"))

    async def _drop_files(self, order: i.DropFiles) -> None:
        def drop() -> None:
            self._host.world.checkers.dropping(order.job, order.checkpoint)
            self._tree(order.directory).directories.pop(order.directory, None)

        await self._worker.run(drop, 1)
        self.post(e.FilesDropped(order.job, order.checkpoint))

    def _tree(self, directory: str) -> Tree:
        return self._host.tree(directory)


class WatchedCore(AgentCore):
    """The real core; every order that it follows is shown to the checkers."""

    host: Host

    def handle(self, event: e.Event, now_ns: int) -> list[i.Instruction]:
        found = super().handle(event, now_ns)
        if isinstance(event, e.OrderReceived):
            self.host.world.checkers.followed(self.host, event, found)
        return found


class SimLog(NodeLog):
    def __init__(self, host: Host) -> None:
        super().__init__(None)
        self._host = host

    def info(self, event: str, **fields: object) -> None:
        self._host.log("noded", event, **fields)

    warning = info
    error = info


class Host:
    """`disk` survives whatever happens to the rest."""

    def __init__(
        self, world: World, name: str, disk: HostDisk, *, cpu_millis: int, memory_bytes: int, devices: int
    ) -> None:
        self.world = world
        self.name = name
        self.node_name = name
        self.disk = disk
        self.rng = world.rng(f"host/{name}")
        self.clock = HostClock(world.loop, self.rng)
        self.network: Network = world.network
        self.cpu_millis = cpu_millis
        self.memory_bytes = memory_bytes
        self.inventory = Inventory(tuple(Device(f"gpu{n}", "accelerator", vendor_id="10de") for n in range(devices)))
        self.boot_ids = [self._new_id()]
        self.guardian: SimGuardian | None = None
        self.noded: Process | None = None
        self.core: WatchedCore | None = None
        self.control: ControlLink | None = None
        self.bulk: BulkLink | None = None
        self.lives = 0
        self.powered = True
        self.noded_wanted = True
        self.restart_s = (0.2, 1.0)
        self.highest_epoch = Epoch(0, 0)
        self._pids: dict[int, Rank] = {}
        self._ranks: list[Rank] = []
        world.truth.capacity[name] = cpu_millis

    @property
    def boot_id(self) -> str:
        return self.boot_ids[-1]

    def _new_id(self) -> str:
        return f"{self.rng.getrandbits(64):016x}"

    # -- processes

    def start_guardian(self) -> None:
        process = Process(self.world.loop, f"{self.name}/guardian", self)
        self.guardian = SimGuardian(self, process, self._new_id())
        self.guardian.begin()

    def start_noded(self) -> None:
        if not self.powered or not self.noded_wanted or (self.noded is not None and self.noded.alive):
            return
        self.lives += 1
        process = self.noded = Process(self.world.loop, f"{self.name}/noded.{self.lives}", self)
        process.on_death.append(self._supervise)
        self.world.processes.append(process)
        process.spawn(self._noded(process), "main")

    def _supervise(self) -> None:
        """systemd, or `virial up`: a dead noded is started again within a second, unless told to stay away."""
        low, high = self.restart_s
        self.world.loop.after(self.rng.uniform(low, high), self.start_noded)

    async def _noded(self, process: Process) -> None:
        files = SimFiles(self.disk)
        leader_epoch, cluster_uid = files.leader()
        self.highest_epoch = leader_epoch
        facts = NodeFacts(self.node_name, f"addr-{self.name}", self.cpu_millis, self.memory_bytes, version="sim")
        core = self.core = WatchedCore(
            NodeUid(self.disk.node_uid),
            facts,
            local_tier=LOCAL_TIER,
            leader_epoch=leader_epoch,
            cluster_uid=cluster_uid,
        )
        core.host = self
        guardian = SimGuardianClient(self, process)
        try:
            await guardian.connect()
        except GuardianUnavailable:
            process.kill()
            return
        log, worker = SimLog(self), SimWorker(self)
        self.control = self.bulk = None
        driver = SimDriver(self, core, guardian, log, worker)
        rng = self.world.rng(f"link/{self.name}/{self.lives}")
        control = self.control = ControlLink(SimDialer(), self.world.addresses, rng, driver.post, log)
        bulk = self.bulk = BulkLink(SimDialer(), cast("Any", None), worker, rng, lambda _: True, log)
        driver.attach(control)
        process.spawn(driver.run(), "driver")
        await driver.met_guardian.wait()
        process.spawn(control.run(), "control")
        process.spawn(bulk.run(), "bulk")
        await asyncio.sleep(self.rng.uniform(*INVENTORY_S))
        bulk.report(self.inventory)
        driver.post(e.InventoryRead(self.inventory))

    def handled(self, event: e.Event) -> None:
        """As `noded.app.Agent` wires the bulk stream to the control stream."""
        del event
        core, control, bulk = self.core, self.control, self.bulk
        if core is None or control is None or bulk is None:
            return
        address, incarnation = control.address, core.incarnation
        welcomed = core.welcomed and address is not None and incarnation is not None
        bulk.follow(Target(address, incarnation) if welcomed and address and incarnation else None)

    # -- the machine, for its guardian and its tasks

    def tree(self, directory: str) -> Tree:
        return self.disk.shards if directory.startswith(LOCAL_TIER) else self.world.shared

    def persist(self, status: SlotStatus, boot_id: str) -> None:
        if status.state is SlotState.RELEASED:
            self.disk.statuses.pop(status.slot, None)
        else:
            self.disk.statuses[status.slot] = (status, boot_id)

    def truth_has(self, slot: str) -> bool:
        return any(rank.run.slot == slot and rank.run.end_ns is None for rank in self._ranks)

    def run_rank(self, slot: SlotId, token: Token, env: dict[str, str], program: Program) -> Rank | None:
        run = self.world.truth.start(self.name, slot, token, self.world.checkers.state)
        if run is None:
            return None
        process = Process(self.world.loop, f"{self.name}/{slot}", self)
        rank = Rank(self, process, env, program, run)
        self._ranks = [known for known in self._ranks if known.run.end_ns is None]
        self._ranks.append(rank)
        self.world.processes.append(process)
        self.world.trace.note("task.start", self.name, slot, token.epoch)
        process.spawn(rank.main(), "main")
        return rank

    def new_pid(self, rank: Rank) -> int:
        pid = 1000 + len(self._pids)
        self._pids[pid] = rank
        return pid

    def kill_pid(self, pid: int) -> None:
        if (rank := self._pids.get(pid)) is not None:
            self.kill_rank(rank, self.rng.uniform(0.001, 0.03))

    def kill_slot(self, slot: str) -> None:
        """As the kernel does when memory runs out."""
        for rank in self._ranks:
            if rank.run.slot == slot and rank.run.end_ns is None:
                self.kill_rank(rank, 0.0)

    def kill_rank(self, rank: Rank, after_s: float, signal: int = 9) -> None:
        """It runs on until the kernel is done with it."""
        self.world.loop.after(after_s + rank.stuck_s, self._killed, rank, signal)

    def stick_slot(self, slot: str, seconds: float) -> None:
        """The kernel will not let go of this task for so long: no promise holds for it (design: leases, 4)."""
        for rank in self._ranks:
            if rank.run.slot == slot and rank.run.end_ns is None:
                rank.stuck_s = seconds
                rank.run.exempt = True

    def _killed(self, rank: Rank, signal: int) -> None:
        if rank.run.end_ns is None and rank.process.life is not Life.FROZEN:
            self._end(rank, Outcome(signal=signal))
        elif rank.run.end_ns is None:
            rank.process.post(0.0, self._killed, rank, signal)

    def task_exited(self, slot: str, rank: Rank, code: int) -> None:
        del slot
        if rank.run.end_ns is None:
            self._end(rank, Outcome(code=code))

    def _end(self, rank: Rank, outcome: Outcome) -> None:
        self.world.truth.end(rank.run)
        self.world.trace.note("task.end", self.name, rank.run.slot, outcome.code, outcome.signal)
        rank.process.kill()
        guardian = self.guardian
        if guardian is not None and guardian.process.alive:
            guardian.process.post(self.rng.uniform(*WIRE_S), guardian.task_exited, rank.run.slot, rank, outcome)

    def tell_guardian(self, slot: str, rank: Rank, message: dict[str, Any]) -> None:
        guardian = self.guardian
        if guardian is not None and guardian.process.alive:
            guardian.process.post(self.rng.uniform(*WIRE_S), guardian.hear_task, slot, rank, message)

    # -- what may happen to it

    def kill_noded(self, restart_s: tuple[float, float] = (0.2, 1.0)) -> None:
        self.restart_s = restart_s
        if self.noded is not None:
            self.noded.kill()

    def kill_guardian(self) -> None:
        if self.guardian is not None:
            self.guardian.process.kill()

    def freeze(self, *, noded: bool, guardian: bool, tasks: bool) -> None:
        if noded and self.noded is not None:
            self.noded.freeze()
        if guardian and self.guardian is not None:
            self.guardian.process.freeze()
        if tasks:
            for rank in self._ranks:
                rank.run.exempt = True
                rank.process.freeze()

    def thaw(self) -> None:
        if self.noded is not None:
            self.noded.thaw()
        if self.guardian is not None:
            self.guardian.process.thaw()
        for rank in self._ranks:
            rank.process.thaw()

    def lose_power(self) -> None:
        """Everything ends at once, and nobody is told."""
        self.powered = False
        self.network.forget_host(self.name)
        for rank in self._ranks:
            if rank.run.end_ns is None:
                self.world.truth.end(rank.run)
                rank.process.kill()
        self.kill_guardian()
        if self.noded is not None:
            self.noded.kill()
        self.disk.shards.lose_power()

    def reimage(self) -> None:
        """Installed anew while it is off: another identity under the same name."""
        self.disk = HostDisk(f"{self.rng.getrandbits(64):016x}")

    def boot(self) -> None:
        if self.powered:
            return
        self.powered = True
        self.boot_ids.append(self._new_id())
        self.clock.reboot(self.rng)
        self.start_noded()

    def log(self, who: str, what: str, **fields: object) -> None:
        self.world.trace.log(f"{self.name}/{who}", what, **fields)
