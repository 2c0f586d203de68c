"""The shell around the core: carries its instructions out in order, and tells it what happened.

Nothing is decided here. Requests to the guardian are written in the order in which the core gave them (tasks start in
order, and each writes before it first waits); only their answers come back in any order. No handler waits for anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final, Protocol

from noded.core import events as e
from noded.core import instructions as i
from noded.core.agent import GUARDIAN_PATIENCE_NS, AgentCore
from noded.core.messages import Report, SlotRecord
from noded.files import NodeFiles
from noded.guarding import event_from_guardian, failure_of, hello_from_guardian, request_of, slots_from_guardian
from noded.guarding import token_to_guardian as to_guardian
from noded.logs import LogName, NodeLog
from noded.run.client import Connected, Disconnected, GuardianClient, GuardianRefused, GuardianUnavailable
from noded.run.procs import kill, open_pidfd, read_process
from noded.run.protocol import Refusal
from noded.shards.directories import DirectoryProblem, drop, find_owner, make_local, make_shared
from noded.shards.verify import check_shard, deadline_seconds
from noded.worker import Worker, WorkRefused, WorkTimeout
from virialpb.ids import SlotId
from virialpb.reasons import PrepareFailure

TICK_SECONDS: Final = 0.1
POLL_SECONDS: Final = 1.0
FILE_SECONDS: Final = 30.0
RECORD_SECONDS: Final = 5.0
NS_PER_SECOND: Final = 1_000_000_000


class Link(Protocol):
    """What the driver needs of the control stream."""

    def send(self, report: Report) -> None: ...
    def redial(self) -> None: ...
    def new_session(self) -> None: ...


class Driver:
    """`clock` gives CLOCK_BOOTTIME in ns. `on_handled` is called after each event with what came of it."""

    def __init__(
        self,
        core: AgentCore,
        guardian: GuardianClient,
        files: NodeFiles,
        worker: Worker,
        clock: Callable[[], int],
        log: NodeLog,
        *,
        bind_address: str,
        on_handled: Callable[[e.Event], None] = lambda event: None,
    ) -> None:
        self.core = core
        self.met_guardian = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._guardian = guardian
        self._files = files
        self._worker = worker
        self._clock = clock
        self._log = log
        self._bind_address = bind_address
        self._on_handled = on_handled
        self._link: Link | None = None
        self._local_tier = files.data_dir / "checkpoints"
        self._records = {record.slot: record for record in files.records()}
        self._writing: dict[SlotId, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake_at: asyncio.TimerHandle | None = None
        self._guardian_pid: tuple[int, int] | None = None

    def attach(self, link: Link) -> None:
        self._link = link

    def post(self, event: e.Event) -> None:
        """Let the core see an event, and carry out what it asks for."""
        now_ns = self._clock()
        before = self.core.counters.copy()
        found = self.core.handle(event, now_ns)
        for reason in self.core.counters.keys() - {r for r, n in before.items() if n == self.core.counters[r]}:
            self._log.warning(LogName.ORDER_DROPPED, reason=reason, trigger=type(event).__name__)
        self._log_event(event)
        for instruction in found:
            self._carry_out(instruction)
        if all(slot.ended for slot in self.core.slots.all()):
            self._all_ended.set()
        else:
            self._all_ended.clear()
        self._on_handled(event)
        self._plan_wake(now_ns)

    async def run(self) -> None:
        """Ticks, the guardian's events and the poll of it, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hear_guardian(), name="guardian events")
            group.create_task(self._poll_guardian(), name="guardian poll")
            group.create_task(self._tick(), name="tick")

    async def wait_until_ended(self, timeout_seconds: float) -> bool:
        """Whether every slot ended within the time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._all_ended.wait()
        except TimeoutError:
            return False
        return True

    # -- what happens

    async def _tick(self) -> None:
        while True:
            self.post(e.Tick())
            await asyncio.sleep(TICK_SECONDS)

    def _plan_wake(self, now_ns: int) -> None:
        """A beat that is due before the next tick goes out on time."""
        if self._wake_at is not None:
            self._wake_at.cancel()
            self._wake_at = None
        wait_seconds = (self.core.next_wake_ns() - now_ns) / NS_PER_SECOND
        if self.core.connected and 0 <= wait_seconds < TICK_SECONDS:
            self._wake_at = asyncio.get_running_loop().call_later(wait_seconds, self.post, e.Tick())

    async def _hear_guardian(self) -> None:
        async for event in self._guardian.events():
            match event:
                case Connected(hello):
                    process = read_process(hello.pid)
                    self._guardian_pid = None if process is None else (hello.pid, process.start_ticks)
                    self._log.info(LogName.GUARDIAN_CONNECTED, pid=hello.pid, fencing=hello.fencing)
                    self.post(hello_from_guardian(hello, tuple(self._records.values())))
                    self.met_guardian.set()
                case Disconnected(why):
                    self._log.warning(LogName.GUARDIAN_LOST, why=why)
                    self.post(e.GuardianLost())
                case _:
                    self.post(event_from_guardian(event))

    async def _poll_guardian(self) -> None:
        await self.met_guardian.wait()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                async with asyncio.timeout(GUARDIAN_PATIENCE_NS / NS_PER_SECOND):
                    held = await self._guardian.list_slots()
            except (GuardianUnavailable, GuardianRefused, TimeoutError) as error:
                if self.core.guardian_ok:
                    self._log.warning(LogName.GUARDIAN_LOST, why=str(error) or "no answer")
                    self.post(e.GuardianLost())
            else:
                self.post(e.GuardianAnswered(slots_from_guardian(held)))

    # -- instructions

    def _carry_out(self, instruction: i.Instruction) -> None:
        match instruction:
            case i.SendHello(hello):
                self._send(hello)
            case i.SendBeat(beat):
                self._send(beat)
            case i.SendTaskCall(call):
                self._send(call)
            case i.SendDropDone(done):
                self._send(done)
            case i.Redial():
                self._log.warning(LogName.CONTROLLER_SILENT)
                if self._link is not None:
                    self._link.redial()
            case i.NewSession():
                if self._link is not None:
                    self._link.new_session()
            case i.Remember(record):
                self._remember(record)
            case i.Forget(slot):
                self._forget(slot)
            case i.SaveLeader(leader_epoch, cluster_uid):
                self._start(self._quietly(lambda: self._files.save_leader(leader_epoch, cluster_uid), "leader.json"))
            case i.KillSlot():
                self._kill(instruction)
            case i.ReplaceGuardian():
                self._replace_guardian()
            case i.VerifyShard():
                self._start(self._verify(instruction))
            case i.MakeDirectory():
                self._start(self._make_directory(instruction))
            case i.DropFiles():
                self._start(self._drop_files(instruction))
            case _:
                self._ask_guardian(instruction)

    def _ask_guardian(self, instruction: i.GuardianInstruction) -> None:
        match instruction:
            case i.GuardianPrepare():
                self._start(self._prepare(instruction))
            case i.GuardianStart():
                self._start(self._start_slot(instruction))
            case i.GuardianStop():
                self._start(self._stop(instruction))
            case i.GuardianRelease():
                self._start(self._release(instruction))
            case i.GuardianExtend(deadlines_ns):
                self._start(self._try(self._guardian.extend(dict(deadlines_ns))))
            case i.GuardianReply(slot, call_id, result, error, message):
                if error:
                    self._start(self._try(self._guardian.reply_error(slot, call_id, error, message)))
                else:
                    self._start(self._try(self._guardian.reply(slot, call_id, dict(result))))
            case i.GuardianPush(slot, pushed):
                self._start(self._try(self._guardian.push(slot, dict(pushed))))

    def _send(self, report: Report) -> None:
        if self._link is not None:
            self._link.send(report)

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error(LogName.INSTRUCTION_FAILED, why=f"{type(error).__name__}: {error}")

    # -- the guardian

    async def _prepare(self, order: i.GuardianPrepare) -> None:
        try:
            await self._written(order.slot)
            port = await self._guardian.prepare(request_of(order, self._bind_address))
        except GuardianRefused as refused:
            self._fail(order.slot, order, failure_of(refused.reason), refused.message)
        except GuardianUnavailable:
            return  # asked again once there is a guardian
        except (OSError, ValueError, WorkTimeout, WorkRefused) as error:
            self._fail(order.slot, order, PrepareFailure.GUARDIAN_LOST, f"cannot prepare here: {error}")
        else:
            self.post(e.PrepareDone(order.slot, order.token, port))

    def _fail(
        self, slot: SlotId, order: i.GuardianPrepare | i.VerifyShard, failure: PrepareFailure, detail: str
    ) -> None:
        self._log.warning(LogName.SLOT_PREPARE_FAILED, slot=slot, reason=failure, why=detail)
        self.post(e.PrepareFailed(slot, order.token, failure, detail))

    async def _start_slot(self, order: i.GuardianStart) -> None:
        try:
            started = await self._guardian.start(order.slot, to_guardian(order.token), dict(order.env))
        except GuardianRefused as refused:
            retry = refused.reason is Refusal.NOT_READY
            self.post(e.StartFailed(order.slot, order.token, refused.message, retry=retry))
        except GuardianUnavailable:
            return
        else:
            self.post(e.StartDone(order.slot, order.token, started.pid, started.init_pid, started.start_ticks))

    async def _stop(self, order: i.GuardianStop) -> None:
        try:
            await self._written(order.slot)
            await self._guardian.stop(order.slot, order.grace_ms, order.reason)
        except GuardianRefused as refused:
            if refused.reason is Refusal.NOT_FOUND:
                self.post(e.StopFailed(order.slot, order.token))
        except (GuardianUnavailable, OSError, WorkTimeout, WorkRefused):
            return

    async def _release(self, order: i.GuardianRelease) -> None:
        try:
            await self._guardian.release(order.slot)
        except (GuardianRefused, GuardianUnavailable) as error:
            self._log.warning(LogName.SLOT_RELEASE_FAILED, slot=order.slot, why=str(error))
            self.post(e.ReleaseFailed(order.slot, order.token))
        else:
            self.post(e.ReleaseDone(order.slot, order.token))

    async def _try(self, request: Coroutine[object, object, object]) -> None:
        """A request that need not be told of when it fails: it is made again, or its loss only stops tasks earlier."""
        try:
            await request
        except (GuardianRefused, GuardianUnavailable) as error:
            self._log.info(LogName.GUARDIAN_REFUSED, why=str(error))

    def _kill(self, order: i.KillSlot) -> None:
        fd = open_pidfd(order.pid, order.start_ticks)
        if fd is None:
            return  # gone, and its number may be someone else's
        process = read_process(order.pid)
        self._log.error(LogName.SLOT_KILLED, slot=order.slot, why="its lease is over and the guardian does not answer")
        if process is not None and process.ppid == order.init_pid:
            kill(order.init_pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)

    def _replace_guardian(self) -> None:
        """The client notices the end of the connection, and starts another."""
        fd = None if self._guardian_pid is None else open_pidfd(*self._guardian_pid)
        if fd is not None:
            self._log.error(LogName.GUARDIAN_REPLACED, why="it does not answer, and every lease is over")
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)

    # -- this machine

    def _remember(self, record: SlotRecord) -> None:
        self._records[record.slot] = record
        write = self._worker.run(lambda: self._files.remember(record), RECORD_SECONDS)
        self._writing[record.slot] = asyncio.ensure_future(write)

    async def _written(self, slot: SlotId) -> None:
        """Wait until the slot's record is on disk: whoever restarts must not find a slot it knows nothing of."""
        writing = self._writing.get(slot)
        if writing is not None:
            await asyncio.shield(writing)
            self._writing.pop(slot, None)

    def _forget(self, slot: SlotId) -> None:
        self._records.pop(slot, None)
        self._writing.pop(slot, None)
        self._start(self._quietly(lambda: self._files.forget(slot), slot))

    async def _quietly(self, work: Callable[[], None], what: str) -> None:
        try:
            await self._worker.run(work, FILE_SECONDS)
        except (OSError, WorkTimeout, WorkRefused) as error:
            self._log.warning(LogName.FILE_FAILED, file=what, why=str(error))

    async def _verify(self, order: i.VerifyShard) -> None:
        seconds = deadline_seconds(order.restore.size_bytes)
        loop = asyncio.get_running_loop()

        def told(read_bytes: int) -> None:  # in the worker's thread
            loop.call_soon_threadsafe(self.post, e.ShardRead(order.slot, order.token, read_bytes))

        try:
            problem = await self._worker.run(lambda: check_shard(order.directory, order.restore, told), seconds)
        except (WorkTimeout, WorkRefused) as error:
            problem = (PrepareFailure.CHECKPOINT_DIRECTORY, f"{order.directory}: {error}")
        if problem is None:
            self.post(e.ShardVerified(order.slot, order.token))
        else:
            self._fail(order.slot, order, *problem)

    async def _make_directory(self, order: i.MakeDirectory) -> None:
        path = Path(order.directory)

        def make() -> None:
            owner = find_owner(order.user, order.group)
            if self._local_tier in path.parents:
                make_local(self._local_tier, path, owner)
            else:
                make_shared(path, owner)

        try:
            await self._worker.run(make, FILE_SECONDS)
        except DirectoryProblem as problem:
            self.post(e.DirectoryFailed(order.call_id, problem.full, str(problem)))
        except (OSError, WorkTimeout, WorkRefused) as error:
            self.post(e.DirectoryFailed(order.call_id, False, f"{path}: {error}"))
        else:
            self.post(e.DirectoryMade(order.call_id))

    async def _drop_files(self, order: i.DropFiles) -> None:
        path = Path(order.directory)
        try:
            files = await self._worker.run(lambda: drop(path, order.checkpoint), FILE_SECONDS)
        except (OSError, ValueError, WorkTimeout, WorkRefused) as error:
            # The controller orders it again; nothing is lost but room.
            self._log.warning(LogName.CHECKPOINT_DROP_FAILED, checkpoint=order.checkpoint, why=str(error))
        else:
            self._log.info(LogName.CHECKPOINT_DROPPED, job=order.job, checkpoint=order.checkpoint, files=files)
            self.post(e.FilesDropped(order.job, order.checkpoint))

    # -- logs

    def _log_event(self, event: e.Event) -> None:
        match event:
            case e.TaskExited():
                slot = self.core.slots.get(event.slot)
                self._log.info(
                    LogName.TASK_EXITED,
                    slot=event.slot,
                    reason=event.exit.reason,
                    code=event.exit.code,
                    signal=event.exit.signal,
                    empty=event.empty,
                    cause_id="" if slot is None else slot.record.cause_id,
                )
            case e.OrderReceived(leader_epoch, order):
                self._log.order(leader_epoch, order)
            case e.StartDone():
                self._log.info(LogName.TASK_STARTED, slot=event.slot, pid=event.pid)
            case e.Connected():
                self._log.info(LogName.SESSION_OPENED)
            case e.Disconnected():
                self._log.info(LogName.SESSION_CLOSED)
            case _:
                pass
