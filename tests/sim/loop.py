"""An event loop whose time only jumps to the next timer: nothing sleeps, nothing threads, real I/O raises.

Simulated processes share it. Each callback belongs to the process in whose context it was made. A frozen process's
are parked until it is thawed (SIGSTOP); a dead one's are dropped, so that not even a `finally` runs (SIGKILL).
"""

from __future__ import annotations

import asyncio
import heapq
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar
from enum import Enum
from typing import Any, NoReturn, TypeVar, cast

T = TypeVar("T")

SPINS_MAX = 200_000
"""So many callbacks without time moving are a loop that feeds itself."""
TIMER_LATE = 1.005
TIMER_LATE_S = 2e-5
"""Timers fire late, as everywhere; by more than clocks drift, or a host with a slow one would find nothing due."""


class Deadlock(Exception):
    """Everything waits and no timer is set."""


class Livelock(Exception):
    """Time does not move any more."""


class Life(Enum):
    RUNNING = "running"
    FROZEN = "frozen"
    DEAD = "dead"


class Process:
    """Something that can be stopped and killed: an agent, a guardian, a task, a controller. `host` is where it runs."""

    def __init__(self, loop: SimLoop, name: str, host: Any) -> None:
        self.loop = loop
        self.name = name
        self.host = host
        self.life = Life.RUNNING
        self._context = Context()
        self._context.run(PROCESS.set, self)
        self._parked: list[asyncio.Handle] = []
        # The loop itself does not keep a task that waits for ever alive.
        self._tasks: set[asyncio.Task[Any]] = set()
        self.on_death: list[Callable[[], None]] = []
        self.broken: list[str] = []
        # It dies after so many more callbacks; 0: it does not.
        self.steps_left = 0

    @property
    def alive(self) -> bool:
        return self.life is not Life.DEAD

    @property
    def running(self) -> bool:
        return self.life is Life.RUNNING

    @property
    def context(self) -> Context:
        return self._context.copy()

    def spawn(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Run in this process. An exception nobody expected is noted in `broken`."""
        task = self.loop.create_task(work, name=name or self.name, context=self.context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def post(self, delay_s: float, call: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call it in this process, `delay_s` from now."""
        return self.loop.call_at(self.loop.time() + delay_s, call, *args, context=self.context)

    def freeze(self) -> None:
        if self.life is Life.RUNNING:
            self.life = Life.FROZEN

    def thaw(self) -> None:
        if self.life is Life.FROZEN:
            self.life = Life.RUNNING
            self.loop.requeue(self._parked)
            self._parked = []

    def kill(self) -> None:
        if self.life is Life.DEAD:
            return
        self.life = Life.DEAD
        self._parked.clear()
        self.loop.bury()
        for told in self.on_death:
            told()

    def step(self) -> None:
        self.steps_left -= 1
        if not self.steps_left:
            self.kill()

    def park(self, handle: asyncio.Handle) -> None:
        self._parked.append(handle)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.broken.append(f"{self.name}/{task.get_name()}: {error!r}")


PROCESS: ContextVar[Process] = ContextVar("PROCESS")
NOBODY = Context()
"""The context of what belongs to no process, such as a message on the wire."""


class SimLoop(asyncio.BaseEventLoop):
    """`run_until_complete` as any loop; time starts at 0 s."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._spins = 0
        # The number keeps timers of one moment in the order in which they were set.
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_made = 0
        self._buried: set[asyncio.Task[Any]] = set()
        self.complaints: list[str] = []
        # Callbacks that their process's death does not stop, such as a request on its way.
        self.outlives: set[Callable[..., object]] = set()
        self.set_exception_handler(self._complain)

    def time(self) -> float:
        return self._now

    @property
    def now_ns(self) -> int:
        return round(self._now * 1e9)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if callback in self.outlives:
            context = NOBODY
        late = delay * TIMER_LATE + TIMER_LATE_S if delay > 0 else 0.0
        return self.call_at(self._now + late, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, handle))
        return handle

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call it in nobody's context, exactly then."""
        return self.call_at(self._now + delay_s, call, *args, context=NOBODY)

    def requeue(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def bury(self) -> None:
        """Keep every task there is: those of a dead process must not be ended by garbage collection meanwhile."""
        self._buried |= asyncio.all_tasks(self)

    def tear_down(self) -> None:
        """Let go of everything that never ended, without letting it do anything."""
        self._ready.clear()
        self._timers.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a `finally` that would have awaited something
            for task in self._buried | asyncio.all_tasks(self):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                if not task.done():
                    with suppress(BaseException):
                        cast("Coroutine[Any, Any, Any]", task.get_coro()).close()
        self._buried.clear()
        self._ready.clear()
        self._timers.clear()
        self.close()

    # -- what BaseEventLoop asks of a loop

    _ready: deque[asyncio.Handle]

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready:
            while timers and timers[0][2]._cancelled:  # type: ignore[attr-defined]
                heapq.heappop(timers)
            if not timers:
                raise Deadlock("everything waits and no timer is set")
            when = timers[0][0]
            if when > self._now:
                self._now, self._spins = when, 0
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:  # type: ignore[attr-defined]
                ready.append(timer)
        self._spins += len(ready)
        if self._spins > SPINS_MAX:
            raise Livelock(f"{self._spins} callbacks at {self._now:.6f} s")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:  # type: ignore[attr-defined]
                continue
            process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
            if process is None or process.life is Life.RUNNING:
                handle._run()  # type: ignore[attr-defined]
                if process is not None and process.steps_left:
                    process.step()
            elif process.life is Life.FROZEN:
                process.park(handle)

    def _check_closed(self) -> None:
        """What is let go of after the end may still want to cancel something: nobody will run it."""

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        del handle  # dropped when its time comes

    def _process_events(self, event_list: object) -> NoReturn:
        raise RuntimeError("a simulated loop has no selector")

    def _write_to_self(self) -> None:
        return

    def run_in_executor(self, executor: object, func: Callable[..., object], *args: Any) -> NoReturn:  # type: ignore[override]
        del executor, args
        raise RuntimeError(f"{func!r}: nothing runs in a thread here")

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        del loop
        task = context.get("task")
        whose = f" ({task.get_name()}, {task.get_coro()!r})" if isinstance(task, asyncio.Task) else ""
        self.complaints.append(f"{context.get('message')}: {context.get('exception')!r}{whose}")
