"""A guardian: the real slot table, request handling and call book, over simulated processes instead of real ones.

It outlives noded; its tasks die with it. Each running task has a launcher that enforces the deadline by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, Final

from noded.run import control, slots
from noded.run.calls import Calls
from noded.run.protocol import Event, Fencing, Hello, SlotState, Started, TaskProgress, encode_line, event_to_json
from noded.run.slots import Action, Outcome, Phase, Slot, SlotTable
from noded.run.wire import Closed
from tests.sim.loop import Process
from tests.sim.task import Program, Rank
from virialpb.ids import Epoch, JobId, SlotId, Token

if TYPE_CHECKING:
    from tests.sim.node import Host

PREPARE_S: Final = (0.005, 0.08)
LAUNCH_S: Final = (0.01, 0.1)
KILL_S: Final = (0.001, 0.03)
LOOK_S: Final = 0.01
TERM_S: Final = (0.01, 1.0)
LAUNCHER_CHECK_S: Final = 0.1
WIRE_S: Final = (0.0001, 0.001)

Waiter = Callable[[Slot | None, slots.Refused | None], None]


class LineConnection:
    """The guardian's end of noded's connection."""

    pending = False
    calm = True

    def __init__(self, process: Process, rng: Random, feed: Callable[[bytes], None]) -> None:
        self._process = process
        self._rng = rng
        self._feed = feed
        self.closed = False
        self._last_s = 0.0

    def send(self, message: dict[str, Any]) -> None:
        self._push(encode_line(message, 16 << 20))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._push(b"")

    def _push(self, line: bytes) -> None:
        loop = self._process.loop
        self._last_s = max(self._last_s, loop.time() + self._rng.uniform(*WIRE_S))
        loop.call_at(self._last_s, self._feed, line, context=self._process.context)


class Runner:
    """What there is of one slot on the machine."""

    def __init__(self) -> None:
        self.rank: Rank | None = None
        self.deadline_ns = 0
        self.killed = False
        self.gone = True
        self.outcome: Outcome | None = None
        self.connections: set[Rank] = set()


class SimGuardian:
    """Has what `noded.run.control.handle_request` asks of a service."""

    def __init__(self, host: Host, process: Process, nonce: str) -> None:
        self.host = host
        self.process = process
        self.nonce = nonce
        self.boot_id = host.boot_id
        self.table = SlotTable()
        self.calls = Calls()
        self.noded: Any = None
        self.waiters: dict[str, list[Waiter]] = {}
        self.stop_at_ns: int | None = None
        self.on_stopped: list[Callable[[], None]] = []
        self.runners: dict[str, Runner] = {}
        self._rng = host.world.rng(f"guardian/{host.name}/{nonce}")
        self._port = self._rng.randrange(20_000, 60_000)
        self._wake: Any = None
        process.on_death.append(self._take_tasks_along)

    def begin(self) -> None:
        """What an earlier guardian left: its tasks died with it, so all of it is proven gone."""
        for status, boot_id in list(self.host.disk.statuses.values()):
            if status.state is SlotState.RELEASED:
                continue
            same_boot = boot_id == self.boot_id
            empty = not same_boot or not self.host.truth_has(status.slot)
            self.act(self.table.adopt_leftover(status, empty=empty, now_ns=self.now_ns()))

    def now_ns(self) -> int:
        return self.host.clock.boottime_ns()

    # -- noded

    def hear_noded(self, connection: LineConnection, message: dict[str, Any]) -> None:
        self.tick()
        if not connection.closed:
            control.handle_request(self, connection, message)  # type: ignore[arg-type]
            self._arm()

    def drop_control(self, connection: LineConnection, why: str) -> None:
        del why
        connection.close()
        if self.noded is connection:
            self.noded = None

    def hello(self) -> Hello:
        known = self.table.all()
        return Hello(
            nonce=self.nonce,
            boot_id=self.boot_id,
            pid=1,
            fencing=Fencing.PIDNS_CGROUP,
            slots=tuple(slot.status for slot in known if not slot.leftover),
            leftovers=tuple(slot.status for slot in known if slot.leftover),
        )

    def emit(self, event: Event) -> None:
        if self.noded is not None:
            self.noded.send(event_to_json(event))

    def note(self, name: str, **fields: object) -> None:
        self.host.log("guardian", name, **fields)

    def push(self, slot_id: str, message: dict[str, Any]) -> None:
        for connection in self._connections(slot_id):
            connection.send(message)

    def begin_stop(self, grace_ms_max: int) -> None:
        raise AssertionError(f"nobody shuts a guardian down here ({grace_ms_max})")

    # -- tasks

    def hear_task(self, slot_id: str, rank: Rank, message: dict[str, Any]) -> None:
        self.tick()
        slot = self.table.get(slot_id)
        if slot is None or rank not in self._connections(slot_id):
            return
        try:
            event = self.calls.handle(slot, rank, message, self.now_ns())  # type: ignore[arg-type]
        except Closed:
            return
        if isinstance(event, TaskProgress):
            self.act(self.table.progressed(event.slot, event.progress))
        if event is not None:
            self.emit(event)

    def task_exited(self, slot_id: str, rank: Rank, outcome: Outcome) -> None:
        runner = self.runners.get(slot_id)
        if runner is not None and runner.rank is rank:
            runner.outcome = outcome
            self.act(self.table.ended(slot_id, outcome, self.now_ns()))

    def _connections(self, slot_id: str) -> tuple[Rank, ...]:
        runner = self.runners.get(slot_id)
        return () if runner is None or runner.rank is None or not runner.rank.connected else (runner.rank,)

    def _take_tasks_along(self) -> None:
        """PDEATHSIG."""
        for runner in self.runners.values():
            if runner.rank is not None:
                self.host.kill_rank(runner.rank, self._rng.uniform(0.0005, 0.005))

    # -- the loop

    def tick(self) -> None:
        now_ns = self.now_ns()
        wake_ns = self.table.next_wake_ns()
        if wake_ns is not None and wake_ns <= now_ns:
            self.act(self.table.tick(now_ns))

    def _arm(self) -> None:
        """Wake when the table has something to do, late as a busy machine is."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        wake_ns = self.table.next_wake_ns()
        if wake_ns is not None:
            delay_s = self.host.clock.seconds_until(wake_ns) + self._rng.uniform(0.0001, 0.01)
            self._wake = self.process.post(delay_s, self._woken)

    def _woken(self) -> None:
        self._wake = None
        self.tick()
        self._arm()

    # -- actions

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            self._do(action)
        if actions:
            self._arm()

    def _do(self, action: Action) -> None:
        match action:
            case slots.Reserve(slot_id):
                runner = self.runners[slot_id] = Runner()
                self.process.post(self._rng.uniform(*PREPARE_S), self._prepared, slot_id, runner)
            case slots.Launch(slot_id, env_add):
                runner = self.runners[slot_id]
                runner.gone = False
                self.process.post(self._rng.uniform(*LAUNCH_S), self._launched, slot_id, runner, dict(env_add))
            case slots.SetDeadline(slot_id, deadline_ns):
                self._set_deadline(self.runners[slot_id], deadline_ns)
            case slots.Terminate(slot_id):
                self._terminate(self.runners[slot_id])
            case slots.Kill(slot_id):
                self._kill(slot_id)
            case slots.Drop(slot_id) | slots.Forget(slot_id):
                self._cut_off(slot_id)
                if isinstance(action, slots.Forget):
                    self.runners.pop(slot_id, None)
            case slots.Persist(status):
                self.host.persist(status, self.boot_id)
            case slots.Announce(slot_id, token, end):
                self.emit_exit(slot_id, token, end)

    def emit_exit(self, slot_id: str, token: Any, end: Any) -> None:
        from noded.run.protocol import TaskExit

        self.emit(TaskExit(slot_id, token, end))
        self.note("slot.ended", slot=slot_id, reason=end.reason, empty=end.empty)
        self.settle(slot_id)

    def settle(self, slot_id: str) -> None:
        for waiter in self.waiters.pop(slot_id, []):
            waiter(self.table.get(slot_id), None)

    def _prepared(self, slot_id: str, runner: Runner) -> None:
        self.tick()
        if self.runners.get(slot_id) is runner:
            self._port += 1
            self.act(self.table.prepared(slot_id, self._port))
            self.settle(slot_id)

    def _launched(self, slot_id: str, runner: Runner, env_add: dict[str, str]) -> None:
        self.tick()
        slot = self.table.get(slot_id)
        if self.runners.get(slot_id) is not runner or slot is None or runner.killed:
            runner.gone = True
            return
        token = Token(JobId(slot.token.job), slot.token.generation, Epoch(*slot.token.epoch))
        env = {**slot.request.spec.env, **env_add}
        program = Program.of(slot.request.spec.argv)
        runner.rank = self.host.run_rank(SlotId(slot_id), token, env, program)
        if runner.rank is None:
            self.task_exited_early(slot_id)
            return
        self._set_deadline(runner, slot.deadline_ns)
        self.act(self.table.started(slot_id, Started(self.host.new_pid(runner.rank), 1, 1)))
        self.settle(slot_id)

    def task_exited_early(self, slot_id: str) -> None:
        self.act(self.table.ended(slot_id, Outcome(failure="not granted"), self.now_ns()))

    def _set_deadline(self, runner: Runner, deadline_ns: int) -> None:
        runner.deadline_ns = deadline_ns
        rank = runner.rank
        if rank is not None:
            delay_s = self.host.clock.seconds_until(deadline_ns) + self._rng.uniform(0.0, LAUNCHER_CHECK_S)
            rank.process.post(delay_s, self._launcher_looks, runner)

    def _launcher_looks(self, runner: Runner) -> None:
        """Runs beside the task, not in the guardian: a guardian that hangs is no reason to go on."""
        if runner.rank is not None and self.now_ns() >= runner.deadline_ns:
            self.host.kill_rank(runner.rank, self._rng.uniform(*KILL_S))

    def _terminate(self, runner: Runner) -> None:
        """Most tasks end at SIGTERM; some have to be killed."""
        if runner.rank is not None and self._rng.random() < 0.8:
            self.host.kill_rank(runner.rank, self._rng.uniform(*TERM_S), signal=15)

    def _kill(self, slot_id: str) -> None:
        self._cut_off(slot_id)
        runner = self.runners[slot_id]
        runner.killed = True
        if runner.rank is not None:
            self.host.kill_rank(runner.rank, self._rng.uniform(*KILL_S))
        self.process.post(LOOK_S, self._look, slot_id, runner)

    def _look(self, slot_id: str, runner: Runner) -> None:
        self.tick()
        slot = self.table.get(slot_id)
        if self.runners.get(slot_id) is not runner or slot is None or slot.phase is Phase.EXITED:
            return
        dead = runner.gone if runner.rank is None else runner.rank.run.end_ns is not None
        if dead:
            self.act(self.table.emptied(slot_id, self.now_ns()))
        else:
            self.process.post(LOOK_S, self._look, slot_id, runner)

    def _cut_off(self, slot_id: str) -> None:
        """Nothing this slot's task says is heard any more."""
        for rank in self._connections(slot_id):
            rank.connected = False
            self.calls.forget(rank)  # type: ignore[arg-type]
