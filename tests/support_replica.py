"""A leader on a virtual event loop: time passes only when nothing else is left to do, so a test waits for nothing.

`run_until_killed` stops a loop dead after so many steps, as SIGKILL would: no `finally`, no answer, nothing flushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from controld.core.agent import Beat, BeatAck, Hello, Order, SlotStatus, Welcome
from controld.core.commands import Command
from controld.core.ids import Incarnation
from controld.core.outcome import Reply
from controld.matching.engine import plan
from controld.matching.port import PlannerPort
from controld.replica.errors import SessionClosedError
from controld.replica.leader import Leader
from controld.replica.observe import LogName, LogValue
from controld.replica.planner import InlinePlanner
from controld.replica.session import NodeSession
from controld.replica.settings import LeaderSettings
from controld.store.faults import Faults
from controld.store.memory import MemoryDisk, MemoryStore
from controld.store.port import Leadership, StoredChange

T = TypeVar("T")
GIB = 1 << 30


class Killed(KeyboardInterrupt):
    """The process is gone. KeyboardInterrupt, since the event loop lets nothing else through."""


class _NoWaiting(selectors.SelectSelector):
    """Where a loop would sleep, its time jumps instead."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("deadlock: everything waits and no timer is set")
        self.passed_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._no_waiting = _NoWaiting()
        super().__init__(self._no_waiting)
        # Each sleep overshoots by a little, or rounding could make the loop spin on a timer due in 1e-17 s.
        self._clock_resolution = 1e-6
        self.steps = 0
        self.kill_at: int | None = None
        self.dead = False

    def time(self) -> float:
        return self._no_waiting.passed_s

    def _make_self_pipe(self) -> None:
        """No thread and no signal wakes this loop, so it needs no descriptor, and a killed one leaves none behind."""

    def _close_self_pipe(self) -> None:
        return

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        if self.dead:
            return asyncio.Handle(callback, args, self, context)

        def step(*given: Any) -> None:
            self.steps += 1
            if self.steps == self.kill_at:
                raise Killed
            callback(*given)

        return super().call_soon(step, *args, context=context)


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run on a fresh virtual loop, to its end."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main())
    finally:
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        if pending:
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.close()


def run_until_killed(main: Callable[[], Coroutine[Any, Any, None]], kill_at: int) -> bool:
    """Run on a fresh loop and kill it at its `kill_at`th step; False when it ended by itself before.

    The dead loop's coroutines are not resumed, and kept until the next call, so that not even garbage collection
    runs their `finally` blocks while a test looks at what they left behind.
    """
    _bury()
    loop = VirtualLoop()
    loop.kill_at = kill_at
    task = loop.create_task(main())
    try:
        loop.run_until_complete(task)
    except Killed:
        _dead.append((loop, {task, *asyncio.all_tasks(loop)}))
        return True
    loop.close()
    return False


_dead: list[tuple[VirtualLoop, set[asyncio.Task[Any]]]] = []


def _bury() -> None:
    """Unwind what was killed, on a loop that carries nothing out, so that its end is heard nowhere."""
    while _dead:
        loop, tasks = _dead.pop()
        loop.dead = True
        loop.set_exception_handler(lambda _loop, _context: None)
        for task in tasks:
            with contextlib.suppress(Exception):
                coroutine = task.get_coro()
                assert coroutine is not None
                coroutine.close()
        loop.close()


class LoopClock:
    """BOOTTIME is the loop's time plus `offset_ns`, which a test moves to play a suspended machine or a stall. The wall
    clock is off by `wall_offset_ns`, which a test moves to set it."""

    def __init__(self, offset_ns: int = 1_000_000_000_000) -> None:
        self.offset_ns = offset_ns
        self.wall_offset_ns = 0

    def boottime_ns(self) -> int:
        return self.offset_ns + round(asyncio.get_running_loop().time() * 1e9)

    def unix_ns(self) -> int:
        return 1_700_000_000_000_000_000 + round(asyncio.get_running_loop().time() * 1e9) + self.wall_offset_ns


@dataclass
class LogBook:
    entries: list[tuple[LogName, dict[str, LogValue]]] = field(
        default_factory=list[tuple[LogName, dict[str, LogValue]]]
    )

    def __call__(self, name: LogName, /, **fields: LogValue) -> None:
        self.entries.append((name, fields))

    def of(self, name: LogName) -> list[dict[str, LogValue]]:
        return [fields for entry, fields in self.entries if entry is name]


@dataclass
class Rig:
    """One controller on a disk that outlives it."""

    disk: MemoryDisk
    store: MemoryStore
    leader: Leader
    clock: LoopClock
    log: LogBook

    async def submit(self, command: Command) -> Reply:
        return await self.leader.submit(command)

    async def stop(self) -> None:
        await self.leader.stop()


async def lead(
    disk: MemoryDisk | None = None,
    *,
    faults: Faults | None = None,
    settings: LeaderSettings | None = None,
    planner: PlannerPort | None = None,
    clock: LoopClock | None = None,
    store: MemoryStore | None = None,
) -> Rig:
    """A started leader."""
    disk = disk or MemoryDisk()
    store = store or MemoryStore(disk, faults)
    await store.open()
    clock = clock or LoopClock()
    log = LogBook()
    leader = Leader(
        store=store,
        clock=clock,
        rng=random.Random(7),
        planner=planner or InlinePlanner(plan),
        settings=settings or LeaderSettings(),
        identity="c0",
        log=log,
    )
    await leader.start()
    return Rig(disk, store, leader, clock, log)


def hello(incarnation: Incarnation, name: str, *, slots: tuple[SlotStatus, ...] = (), seq: int = 1) -> Hello:
    return Hello(incarnation, name, f"addr-{name}", "pidns", 4_000, 64 * GIB, Beat(seq, slots))


@dataclass
class Peer:
    """An agent's end of one session, read by hand."""

    hello: Hello
    session: NodeSession
    orders: list[Order] = field(default_factory=list[Order])
    reading: asyncio.Task[None] | None = None
    closed: SessionClosedError | None = None

    @classmethod
    async def connect(cls, leader: Leader, greeting: Hello, *, reads: bool = True) -> Peer:
        peer = cls(greeting, await leader.open_session(greeting))
        if reads:
            peer.reading = asyncio.get_running_loop().create_task(peer._read())
        return peer

    async def _read(self) -> None:
        try:
            while True:
                self.orders.append(await self.session.next_order())
        except SessionClosedError as error:
            self.closed = error

    def beat(self, seq: int, slots: tuple[SlotStatus, ...] = ()) -> None:
        self.session.receive(Beat(seq, slots))

    @property
    def acknowledged(self) -> list[int]:
        return [o.seq for o in self.orders if isinstance(o, BeatAck)]

    @property
    def tasks(self) -> list[Order]:
        """Orders about work."""
        return [o for o in self.orders if not isinstance(o, BeatAck | Welcome)]


def quick(**changes: Any) -> LeaderSettings:
    return replace(LeaderSettings(), **changes)


class Gates(MemoryStore):
    """Barriers and commits that wait for their gate."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk)
        self.barriers = asyncio.Event()
        self.commits = asyncio.Event()
        self.barriers.set()
        self.commits.set()
        self.asked = 0
        self.proved = 0

    async def barrier(self, leadership: Leadership) -> None:
        self.asked += 1
        await self.barriers.wait()
        await asyncio.sleep(0.001)
        await super().barrier(leadership)
        self.proved += 1

    async def commit(self, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
        await self.commits.wait()
        return await super().commit(leadership, seq, changes)
