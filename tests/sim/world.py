"""One seed: the world is built, troubled for ten virtual minutes, healed, and judged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol

from controld.core.commands import CancelJob, Command, ReleaseHold
from controld.core.model import Job
from controld.core.outcome import Reply
from controld.core.spec import SECOND_NS
from controld.reconcile.explain import explain
from controld.replica.leader import Leader
from controld.replica.settings import LeaderSettings
from controld.store import memory
from tests.sim.checkers import Checkers
from tests.sim.client import IMPOSSIBLE, User
from tests.sim.clock import HostClock
from tests.sim.controller import ObservedDisk, SimController
from tests.sim.disk import HostDisk, Tree
from tests.sim.faults import Faults
from tests.sim.loop import NOBODY, Process, SimLoop
from tests.sim.network import Network
from tests.sim.node import Host
from tests.sim.task import Collective
from tests.sim.trace import Trace
from tests.sim.truth import Truth
from virialpb.ids import Token
from virialpb.reasons import Unfit

GIB = 1 << 30
TROUBLE_S = 500.0
LENGTH_S = 620.0
HEAL_S = 420.0
SETTLE_S = 40.0
COMMANDS = 64
USERS = 3
FAULTS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """How much of everything.

    `menu`: only these faults. `stop_at`: the first accusation by one of these checkers ends the run. `heals`: the world
    is healed in the end, and judged by what comes of it. `several`: in the world of three controllers.
    """

    trouble_s: float = TROUBLE_S
    length_s: float = LENGTH_S
    commands: int = COMMANDS
    faults: int = FAULTS
    menu: tuple[str, ...] = ()
    stop_at: tuple[str, ...] = ()
    heals: bool = True
    several: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    violations: tuple[tuple[str, str], ...]
    digest: str
    commands: int
    faults: int
    virtual_s: float
    counts: dict[str, int] = field(default_factory=dict[str, int])
    lines: tuple[str, ...] = ()


class Controller(Protocol):
    """What users, faults and checkers see of a controller, alone or one of several."""

    name: str
    clock: HostClock
    process: Process | None
    leader: Leader | None

    @property
    def leading(self) -> bool: ...

    async def submit(self, command: Command) -> Reply: ...


class World:
    """One controller, at times a rival of it, on a store that outlives them."""

    addresses: tuple[str, ...] = ("c0", "c1")
    host_counts: tuple[int, ...] = (4, 5, 5)

    def __init__(
        self,
        seed: int,
        shape: Shape,
        *,
        script: Callable[[World], Coroutine[Any, Any, None]] | None = None,
        keep_log: bool = False,
    ) -> None:
        self.seed = seed
        self._script = script or type(self).troubled
        self.shape = shape
        self.loop = SimLoop()
        self.loop.outlives.add(memory._unheard)
        self.trace = Trace(self.loop, keep=keep_log)
        self.checkers = Checkers(self)
        self.truth = Truth(self.checkers.accuse, lambda: self.loop.now_ns)
        self.network = Network(self.loop, self.rng("network"))
        self.shared = Tree()
        self.processes: list[Process] = []
        self.commands = 0
        self.faults = self._make_faults()
        self.hosts: dict[str, Host] = {}
        # Every machine there ever was, those that are gone too.
        self.machines: list[Host] = []
        self._collectives: dict[Token, Collective] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        self._judged: asyncio.Future[None] = self.loop.create_future()
        self._make_controllers(_settings())
        shape_rng = self.rng("shape")
        for number in range(shape_rng.choice(self.host_counts)):
            uid = f"{shape_rng.getrandbits(64):016x}"
            cpu_millis = shape_rng.choice((4000, 4000, 6000))
            self.add_host(f"n{number}", HostDisk(uid), cpu_millis=cpu_millis, devices=shape_rng.choice((2, 2, 4)))

    def _make_faults(self) -> Faults:
        return Faults(self)

    def _make_controllers(self, settings: LeaderSettings) -> None:
        disk = ObservedDisk()
        disk.on_commit = self.checkers.committed
        disk.on_written = self.checkers.written
        self.rivals = [SimController(self, address, disk, settings) for address in self.addresses]

    @property
    def controllers(self) -> Sequence[Controller]:
        return self.rivals

    def _begin_controllers(self) -> None:
        self.rivals[0].wanted = True
        self.rivals[0].start()

    def make_user(self, name: str, count: int, seconds: float) -> User:
        return User(self, name, count, seconds)

    def rng(self, purpose: str) -> Random:
        """Randomness of its own for each purpose, so that more of one thing does not change another."""
        return Random(f"{self.seed}/{purpose}")

    def add_host(self, name: str, disk: HostDisk, *, cpu_millis: int, devices: int) -> Host:
        host = Host(self, name, disk, cpu_millis=cpu_millis, memory_bytes=64 * GIB, devices=devices)
        self.hosts[name] = host
        self.machines.append(host)
        return host

    def collective(self, token: Token, world_size: int) -> Collective:
        return self._collectives.setdefault(token, Collective(world_size))

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Something that belongs to no process: a user, a fault."""
        self._tasks.append(self.loop.create_task(work, context=NOBODY.copy()))

    def accused(self, checker: str) -> None:
        if checker in self.shape.stop_at and not self._judged.done():
            self._judged.set_result(None)

    # -- one run

    def run(self) -> Result:
        failure = ""
        try:
            self.loop.run_until_complete(self._until_judged())
        except Exception as error:
            failure = repr(error)
        if failure:
            self.checkers.accuse("unexpected", f"the world ended: {failure}")
        for process in self.processes:
            for broken in process.broken:
                self.checkers.accuse("unexpected", broken)
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self.checkers.accuse("unexpected", f"a user or fault: {error!r}")
        for complaint in self.loop.complaints:
            self.checkers.accuse("unexpected", complaint)
        result = Result(
            self.seed,
            tuple(self.checkers.violations),
            self.trace.digest(),
            self.commands,
            self.faults.count,
            self.loop.time(),
            dict(self.trace.counts) | {"commits": self.checkers.commits, "ranks": len(self.truth.runs)},
            tuple(self.trace.lines),
        )
        self.loop.tear_down()
        return result

    async def _until_judged(self) -> None:
        main = self.loop.create_task(self._script(self), context=NOBODY.copy())
        await asyncio.wait((main, self._judged), return_when=asyncio.FIRST_COMPLETED)
        if main.done():
            main.result()

    def begin(self) -> None:
        self._begin_controllers()
        for host in self.hosts.values():
            self.loop.after(self.rng(f"boot/{host.name}").uniform(0, 3), host.start_noded)

    async def troubled(self) -> None:
        """The script of a seed."""
        self.begin()
        share = self.shape.commands // USERS + 1
        users = [self.make_user(f"u{number}", share, self.shape.trouble_s * 0.95) for number in range(USERS)]
        asking = [self.loop.create_task(user.run(), context=NOBODY.copy()) for user in users]
        self._tasks += asking
        self.faults.schedule()
        while self.loop.time() < self.shape.trouble_s:
            await asyncio.sleep(5.0)
            self._ask_why()
        if not self.shape.heals:
            return
        self.trace.note("heal")
        for task in asking:
            task.cancel()
        await self.faults.heal()
        admin = self.make_user("admin", 0, 0)
        for host in self.hosts.values():
            await self._release_holds(admin, host)
        await self._until_quiet()
        self.checkers.quiet(self._feasible)
        for job in list(self.checkers.state.jobs.values()):
            if not job.state.ended:
                await admin.ask(CancelJob(admin.next_id(), job.id))
        await asyncio.sleep(max(SETTLE_S, self.shape.length_s - self.loop.time()))
        self.checkers.books()
        self._judge_copies()

    def _judge_copies(self) -> None:
        for controller in self.controllers:
            if controller.leading and controller.leader is not None:
                self.checkers.copied(controller.leader)

    def _ask_why(self) -> None:
        for controller in self.controllers:
            process = controller.process
            if controller.leading and process is not None and process.running and controller.leader is not None:
                self.checkers.explained(controller.leader)

    async def _release_holds(self, admin: User, host: Host) -> None:
        node = next((n for n in self.checkers.state.nodes.values() if n.uid == host.disk.node_uid), None)
        for hold in () if node is None else node.holds:
            assert node is not None
            await admin.ask(ReleaseHold(admin.next_id(), node.uid, hold.owner, hold.device_key))

    async def _until_quiet(self) -> None:
        end_s = self.loop.time() + HEAL_S
        while self.loop.time() < end_s:
            await asyncio.sleep(5.0)
            self._ask_why()
            if all(job.state.ended or not self._feasible(job) for job in self.checkers.state.jobs.values()):
                return

    def _feasible(self, job: Job) -> bool:
        """Whether it must run to an end once everyone is well."""
        if job.spec.name == IMPOSSIBLE:
            return False
        for controller in self.controllers:
            if controller.leading and controller.leader is not None and job.id in controller.leader.state.jobs:
                reasons = explain(controller.leader.state, controller.leader.view, job.id).reasons
                return all(reason.reason is not Unfit.NO_RESTORABLE_CHECKPOINT for reason in reasons)
        return True


def _settings() -> LeaderSettings:
    """The defaults, but less is kept, and sessions and back-offs are short enough to judge the healed world soon.

    The few commands of a small world are decided ahead like those of a large one.
    """
    settings = LeaderSettings()
    limits = replace(
        settings.limits,
        session_fence_after_ns=30 * SECOND_NS,
        refusal_back_off_max_ns=30 * SECOND_NS,
        restart_back_off_max_ns=30 * SECOND_NS,
    )
    return replace(
        settings,
        limits=limits,
        pulse_interval_seconds=0.25,
        ended_jobs_max=3,
        events_max=50,
        prune_interval_seconds=10,
        slice_commands=4,
        ahead_commands_min=1,
    )
