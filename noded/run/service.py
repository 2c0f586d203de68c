"""The guardian's loop: carries out what the slot table decides and tells it what happened. One thread, never a disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from noded.run import procs, slots
from noded.run.calls import Calls
from noded.run.fields import BadMessage
from noded.run.leftovers import Leftover
from noded.run.logs import Output, takes_output
from noded.run.protocol import (
    REPLY_BYTES_MAX,
    Event,
    Hello,
    Refusal,
    SlotStatus,
    Started,
    TaskExit,
    TaskProgress,
    event_to_json,
    status_to_json,
)
from noded.run.reactor import READABLE, WRITABLE, Reactor, reap
from noded.run.runner import TASK_CONNECTIONS_MAX, Runner, Site
from noded.run.slots import Action, Outcome, Phase, Slot, SlotTable
from noded.run.wire import Closed, Connection

if TYPE_CHECKING:
    from noded.run.fields import JsonObject
    from noded.run.scribe import Scribe

CHECK_SECONDS: Final = 0.1
"""The lease clock is looked at least this often."""
LOOK_SECONDS: Final = 0.01
"""While something is being killed: how often to see whether it is gone."""
PREPARE_NS: Final = 10_000_000_000
"""A check of user, command and directory that takes longer hangs on a directory service or a file system."""
PROGRESS_PERSIST_NS: Final = 1_000_000_000
LEFTOVER_LOOK_NS: Final = 1_000_000_000
CONTROL_CONNECTIONS_MAX: Final = 16
DRAIN_CHUNKS: Final = 64
SHUTDOWN_NS: Final = 15_000_000_000
STOP_GRACE_MS_MAX: Final = 60_000
"""SIGTERM comes when the host goes down; init systems wait 90 s by default."""

Waiter = Callable[["Slot | None", "slots.Refused | None"], None]


def boottime_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Service:
    """Everything the guardian does between start and end. `control` answers noded's requests (noded/run/control.py)."""

    def __init__(
        self,
        *,
        site: Site,
        table: SlotTable,
        scribe: Scribe,
        listener: socket.socket,
        nonce: str,
        boot_id: str,
        leftovers: list[Leftover],
        on_request: Callable[[Service, Connection, JsonObject], None],
        deserted: Callable[[], bool],
    ) -> None:
        self.site = site
        self.table = table
        self.nonce = nonce
        self.boot_id = boot_id
        self.identity = procs.identity()
        self.calls = Calls()
        self.noded: Connection | None = None
        self.waiters: dict[str, list[Waiter]] = {}
        self.runners: dict[str, Runner] = {}
        self.stop_asked = False
        self.stop_at_ns: int | None = None
        self.on_stopped: list[Callable[[], None]] = []
        self._scribe = scribe
        self._listener = listener
        self._stuck = {leftover.status.slot: leftover for leftover in leftovers}
        self._stuck_look_ns = 0
        self._on_request = on_request
        self._deserted = deserted
        self._reactor = Reactor()
        self._control: set[Connection] = set()
        self._paused: set[str] = set()
        self._dirty: dict[str, SlotStatus] = {}
        self._dirty_since_ns = 0
        self._reactor.watch(listener, self._accept_control)
        self._reactor.wake_on_signals(self._on_signal)

    # -- the loop

    def run(self) -> None:
        """Until a shutdown, or the end of the data directory, has emptied every slot."""
        while not self._stopped():
            ready = self._reactor.wait(self._timeout_seconds())
            # Deadlines first: after a suspend the sockets are full of reports of tasks that had lost their lease.
            self.tick()
            for handle in ready:
                handle()
                self.tick()
            self._look_at_killed()
            self._housekeep()
            if self.stop_at_ns is None and (self.stop_asked or self._deserted()):
                self.begin_stop(STOP_GRACE_MS_MAX)
        for done in self.on_stopped:
            with contextlib.suppress(Closed):
                done()

    def begin_stop(self, grace_ms_max: int) -> None:
        """Stops every slot, with its own grace but at most this; the loop ends once all are gone, or are stuck."""
        longest_ms = 0
        for slot in self.table.live():
            grace_ms = min(slot.request.spec.grace_ms, grace_ms_max)
            longest_ms = max(longest_ms, grace_ms)
            stopped = self.table.stop(slot.id, grace_ms, boottime_ns())
            if not isinstance(stopped, slots.Refused):
                self.act(stopped)
        self.stop_at_ns = boottime_ns() + longest_ms * slots.NS_PER_MS + SHUTDOWN_NS

    def tick(self) -> None:
        now_ns = boottime_ns()
        wake_ns = self.table.next_wake_ns()
        if wake_ns is not None and wake_ns <= now_ns:
            self.act(self.table.tick(now_ns))

    def _timeout_seconds(self) -> float:
        if any(slot.phase is Phase.STOPPING and slot.killed_at_ns is not None for slot in self.table.live()):
            return LOOK_SECONDS
        wake_ns = self.table.next_wake_ns()
        if wake_ns is None:
            return CHECK_SECONDS
        return min(CHECK_SECONDS, max(0.0, (wake_ns - boottime_ns()) / 1e9))

    def _stopped(self) -> bool:
        if self.stop_at_ns is None:
            return False
        return not self.table.live() or boottime_ns() >= self.stop_at_ns

    # -- actions

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            try:
                self._do(action)
            except OSError as error:
                # Of one slot; its deadline still stands, and the other slots' actions must not wait for this one.
                self.note("action.failed", action=repr(action)[:500], why=str(error))

    def _do(self, action: Action) -> None:
        match action:
            case slots.Reserve():
                self._reserve(action.slot)
            case slots.Launch():
                self.runners[action.slot].launch(dict(action.env_add))
            case slots.SetDeadline():
                self.runners[action.slot].set_deadline(action.deadline_ns)
            case slots.Terminate():
                self.runners[action.slot].terminate()
            case slots.Kill():
                self._cut_off(action.slot)
                self.runners[action.slot].kill(boottime_ns())
            case slots.Drop():
                self._cut_off(action.slot)
                self._let_go(action.slot)
            case slots.Forget():
                self._cut_off(action.slot)
                self._let_go(action.slot)
                self._stuck.pop(action.slot, None)
                runner = self.runners.pop(action.slot, None)
                if runner is not None:
                    runner.close()
            case slots.Persist():
                self._persist(action.status)
            case slots.Announce():
                self.emit(TaskExit(action.slot, action.token, action.exit))
                self.note("slot.ended", slot=action.slot, reason=action.exit.reason, empty=action.exit.empty)
                self.settle(action.slot)

    def settle(self, slot_id: str, refused: slots.Refused | None = None) -> None:
        """Answers whoever waits for this slot to be prepared or started."""
        for waiter in self.waiters.pop(slot_id, []):
            with contextlib.suppress(Closed):
                waiter(self.table.get(slot_id), refused)

    def emit(self, event: Event) -> None:
        if self.noded is None or (isinstance(event, TaskProgress) and not self.noded.calm):
            return
        try:
            self.noded.send(event_to_json(event))
        except Closed as error:
            self.drop_control(self.noded, str(error))

    def note(self, name: str, **fields: object) -> None:
        line = json.dumps({"event": name, "boottime_ns": boottime_ns(), **fields}, default=str)
        self._scribe.note(line.encode() + b"\n")

    def hello(self) -> Hello:
        known = self.table.all()
        return Hello(
            nonce=self.nonce,
            boot_id=self.boot_id,
            pid=os.getpid(),
            fencing=self.site.fencing,
            slots=tuple(slot.status for slot in known if not slot.leftover),
            leftovers=tuple(slot.status for slot in known if slot.leftover),
        )

    def _reserve(self, slot_id: str) -> None:
        slot = self.table.get(slot_id)
        assert slot is not None
        # Short, and new each time: unix paths are limited, and an old client must not find a new task's socket.
        name = hashlib.sha256(f"{self.nonce}/{slot_id}/{slot.token}".encode()).hexdigest()[:16] + ".sock"
        try:
            runner = self.runners[slot_id] = Runner(self.site, slot.request, name, boottime_ns())
        except OSError as error:
            self._fail_prepare(slot_id, slots.Refused(Refusal.PREPARE_FAILED, f"{slot_id}: {error}"))
            return
        assert runner.control is not None
        self._reactor.watch(runner.control, lambda _: self._on_launcher(slot_id, runner))
        for output in runner.outputs:
            self._reactor.watch(output.fd, lambda _, output=output: self._pump(runner, output))

    def _fail_prepare(self, slot_id: str, refused: slots.Refused) -> None:
        self.act(self.table.prepare_failed(slot_id))
        self.settle(slot_id, refused)

    def _cut_off(self, slot_id: str) -> None:
        """Nothing this slot's task says is heard any more."""
        runner = self.runners.get(slot_id)
        if runner is None:
            return
        if runner.listener is not None:
            self._reactor.forget(runner.listener)
        for connection in runner.disconnect():
            self._forget_task(runner, connection)
        if runner.listener is not None:
            runner.listener.close()
            runner.listener = None

    def _let_go(self, slot_id: str) -> None:
        runner = self.runners.get(slot_id)
        if runner is None:
            return
        if runner.control is not None:
            self._reactor.forget(runner.control)
            runner.control.close()
            runner.control = None
        self._drain(runner)
        for output in runner.outputs:
            if output.open:
                self._reactor.forget(output.fd)
                output.close()
        runner.outputs = ()
        runner.drop()

    def _persist(self, status: SlotStatus, *, durable: bool = True) -> None:
        self._dirty.pop(status.slot, None)
        record = {**status_to_json(status), "boot_id": self.boot_id, "guardian_nonce": self.nonce}
        record["guardian"] = self.identity
        self._scribe.status(
            status.slot, json.dumps(record).encode(), durable=durable, released=status.state == "RELEASED"
        )

    # -- launchers

    def _on_launcher(self, slot_id: str, runner: Runner) -> None:
        if runner.control is None:
            return
        try:
            messages = runner.control.receive()
        except (Closed, BadMessage):
            # Its reaping follows and tells the rest.
            self._reactor.forget(runner.control)
            return
        for message in messages:
            if self.runners.get(slot_id) is runner:
                self._on_report(slot_id, runner, message)

    def _on_report(self, slot_id: str, runner: Runner, message: JsonObject) -> None:
        if "checked" in message:
            try:
                listener = runner.open_socket(message["checked"])
            except OSError as error:
                self._fail_prepare(slot_id, slots.Refused(Refusal.PREPARE_FAILED, f"{runner.socket_path}: {error}"))
                return
            self._reactor.watch(listener, lambda _: self._accept_task(slot_id, runner))
            self.act(self.table.prepared(slot_id, runner.port))
            self.settle(slot_id)
        elif "refused" in message:
            self._fail_prepare(slot_id, slots.Refused(Refusal(message["refused"]), message["message"]))
        elif "init" in message:
            runner.note_init(message["init"])
        elif "started" in message:
            started = Started(**message["started"])
            runner.note_started(started)
            self.act(self.table.started(slot_id, started))
            self.settle(slot_id)
        elif "failed" in message:
            self._ended(slot_id, runner, Outcome(failure=message["failed"]))
        elif "exit" in message:
            status = message["exit"]
            # A task that fails after the kernel killed any process of its group failed for want of memory.
            oom = status != 0 and runner.oom()
            if os.WIFSIGNALED(status):
                outcome = Outcome(signal=os.WTERMSIG(status), oom=oom)
            else:
                outcome = Outcome(code=os.WEXITSTATUS(status), oom=oom)
            self._ended(slot_id, runner, outcome)

    def _ended(self, slot_id: str, runner: Runner, outcome: Outcome) -> None:
        slot = self.table.get(slot_id)
        if slot is not None and slot.phase is Phase.PREPARING:
            message = outcome.failure or "the task's helper process died"
            self._fail_prepare(slot_id, slots.Refused(Refusal.PREPARE_FAILED, f"{slot_id}: {message}"))
            return
        self._drain(runner)
        runner.complain(self._scribe)
        tail = runner.outputs[1].tail if runner.outputs else ""
        ended = Outcome(outcome.code, outcome.signal, outcome.oom, outcome.failure, tail)
        self.act(self.table.ended(slot_id, ended, boottime_ns()))

    def _on_signal(self) -> None:
        for pid in reap():
            if pid == self._scribe.pid:
                self._reactor.forget(self._scribe.fd)
                self._scribe.lost()
                continue
            # Others are inits or strays that came to us as the nearest subreaper: reaping them is all they need.
            for slot_id, runner in list(self.runners.items()):
                if runner.launcher_pid == pid:
                    self._on_launcher(slot_id, runner)
                    runner.note_reaped(boottime_ns())
                    self._ended(slot_id, runner, Outcome(signal=int(signal.SIGKILL)))

    def _look_at_killed(self) -> None:
        now_ns = boottime_ns()
        for slot_id, runner in list(self.runners.items()):
            slot = self.table.get(slot_id)
            if slot is None or slot.phase is Phase.EXITED:
                continue
            if runner.killed_at_ns is not None:
                if runner.empty(now_ns):
                    self.act(self.table.emptied(slot_id, now_ns))
                elif now_ns >= runner.kill_again_ns:
                    runner.kill(now_ns)
            elif slot.phase is Phase.PREPARING and now_ns - runner.born_ns > PREPARE_NS:
                refused = slots.Refused(Refusal.PREPARE_FAILED, f"{slot_id}: user, command or cwd: no answer in 10 s")
                self._fail_prepare(slot_id, refused)
        if self._stuck and now_ns - self._stuck_look_ns >= LEFTOVER_LOOK_NS:
            self._stuck_look_ns = now_ns
            for slot_id in [slot_id for slot_id, leftover in self._stuck.items() if leftover.kill()]:
                del self._stuck[slot_id]
                self.act(self.table.emptied(slot_id, now_ns))

    # -- output and housekeeping

    def _pump(self, runner: Runner, output: Output) -> None:
        fd = output.fd
        if not output.pump(self._scribe, boottime_ns()) and (not output.open or self._scribe.full):
            self._reactor.forget(fd)
            if output.open:
                self._paused.add(runner.request.slot)

    def _drain(self, runner: Runner) -> None:
        """What the pipes hold now; bounded, because others than the ended task may still be writing."""
        for output in runner.outputs:
            fd = output.fd
            for _ in range(DRAIN_CHUNKS):
                if not output.open or not output.pump(self._scribe, boottime_ns()):
                    break
            if not output.open:
                self._reactor.forget(fd)

    def _housekeep(self) -> None:
        now_ns = boottime_ns()
        if self._scribe.revive():
            for slot in self.table.all():
                self._persist(slot.status)
        self._scribe.flush()
        if self._scribe.alive:
            watched = self._reactor.watches(self._scribe.fd)
            if watched and self._scribe.idle:
                self._reactor.forget(self._scribe.fd)
            elif not watched and not self._scribe.idle:
                self._reactor.watch(self._scribe.fd, lambda _: self._scribe.flush(), WRITABLE)
        for slot_id in list(self._paused) if takes_output(self._scribe, now_ns) else []:
            runner = self.runners.get(slot_id)
            self._paused.discard(slot_id)
            for output in runner.outputs if runner is not None else ():
                if output.open and not self._reactor.watches(output.fd):
                    assert runner is not None
                    self._reactor.watch(output.fd, lambda _, output=output, r=runner: self._pump(r, output))
        if self._dirty and now_ns - self._dirty_since_ns >= PROGRESS_PERSIST_NS:
            for status in list(self._dirty.values()):
                self._persist(status, durable=False)
        tasks = (connection for runner in self.runners.values() for connection in runner.connections)
        self._reactor.ask_to_write([*self._control, *tasks])

    # -- noded

    def _accept_control(self, _: int) -> None:
        sock = self._reactor.accept(self._listener)
        if sock is None or len(self._control) >= CONTROL_CONNECTIONS_MAX:
            if sock is not None:
                sock.close()
            return
        connection = Connection(sock, REPLY_BYTES_MAX)
        self._control.add(connection)
        self._reactor.watch(connection, lambda mask: self._on_control(connection, mask))

    def _on_control(self, connection: Connection, mask: int) -> None:
        try:
            if mask & WRITABLE:
                connection.flush()
            if mask & READABLE:
                for message in connection.receive():
                    self.tick()
                    if connection in self._control:
                        self._on_request(self, connection, message)
        except (Closed, BadMessage) as error:
            self.drop_control(connection, str(error))

    def drop_control(self, connection: Connection, why: str) -> None:
        if connection not in self._control:
            return
        self.note("control.closed", why=why)
        self._control.discard(connection)
        self._reactor.forget(connection)
        connection.close()
        if self.noded is connection:
            self.noded = None

    # -- tasks

    def _accept_task(self, slot_id: str, runner: Runner) -> None:
        assert runner.listener is not None
        sock = self._reactor.accept(runner.listener)
        if sock is None or len(runner.connections) >= TASK_CONNECTIONS_MAX:
            if sock is not None:
                sock.close()
            return
        connection = Connection(sock)
        runner.connections.add(connection)
        self._reactor.watch(connection, lambda mask: self._on_task(slot_id, runner, connection, mask))

    def _on_task(self, slot_id: str, runner: Runner, connection: Connection, mask: int) -> None:
        try:
            if mask & WRITABLE:
                connection.flush()
            messages = connection.receive() if mask & READABLE else []
            for message in messages:
                self.tick()
                slot = self.table.get(slot_id)
                if connection not in runner.connections or slot is None:
                    return
                event = self.calls.handle(slot, connection, message, boottime_ns())
                if isinstance(event, TaskProgress):
                    self._progress(event)
                if event is not None:
                    self.emit(event)
        except (Closed, BadMessage) as error:
            self.note("task.disconnected", slot=slot_id, why=str(error))
            self._forget_task(runner, connection)

    def _progress(self, event: TaskProgress) -> None:
        for action in self.table.progressed(event.slot, event.progress):
            if isinstance(action, slots.Persist):
                # A file for each step would wear the disk: the newest is written once a second.
                if not self._dirty:
                    self._dirty_since_ns = event.progress.at_ns
                self._dirty[event.slot] = action.status

    def _forget_task(self, runner: Runner, connection: Connection) -> None:
        runner.connections.discard(connection)
        self.calls.forget(connection)
        self._reactor.forget(connection)
        connection.close()

    def push(self, slot_id: str, message: JsonObject) -> None:
        runner = self.runners.get(slot_id)
        for connection in list(runner.connections) if runner is not None else []:
            try:
                connection.send(message)
            except Closed:
                assert runner is not None
                self._forget_task(runner, connection)
