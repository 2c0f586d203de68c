"""The single writer: commands wait in a bounded queue; all that wait are decided on the head and committed at once.

Every answer of a batch, refusals too, was decided on state that the batch makes durable, so all of them wait
for its commit and share its outcome. A batch that changes nothing proves leadership by a barrier instead.

While one batch is in the store, the next is decided ahead, on a head that has the first one in it. One is in the store
at a time, so nothing of the second is written, and nothing of it is answered, before the first is durable; where the
first fails, the second was never decided: its commands wait again, or are told why they will not be decided.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from controld.core.commands import Command, Now
from controld.core.outcome import Outcome, Refused, Reply
from controld.core.state import NOTHING, State
from controld.core.transitions import decide
from controld.replica.batch import Batch
from controld.replica.clock import SECOND_NS, Clock, now
from controld.replica.errors import OverloadedError, RefusedError
from controld.replica.hub import CommittedBatch
from controld.replica.observe import Log, LogName, Observer
from controld.replica.settings import LeaderSettings
from controld.replica.states import fork
from controld.store.port import (
    DeposedError,
    Leadership,
    OutcomeUnknownError,
    StorageFullError,
    Store,
    StoredChange,
    StoreError,
)
from virialpb.reasons import Reason


class Source(StrEnum):
    """Who asks. Each has a bound of its own: a flood of requests must not keep an expiry or a release out."""

    USER = "user"
    AGENT = "agent"
    LEADER = "leader"


Decision = Callable[[State, Now], Outcome]


@dataclass(slots=True, eq=False)
class _Waiting:
    name: str
    source: Source
    decision: Decision
    future: asyncio.Future[Reply]


@dataclass(frozen=True, slots=True)
class Committed:
    """What the leader is told of a commit, after the committed state has it. `began_ns`: when it was given to the
    store, which found the leadership in force after that."""

    batch: CommittedBatch
    size_bytes: int
    began_ns: int


class Writer:
    def __init__(
        self,
        *,
        store: Store,
        leadership: Leadership,
        committed: State,
        clock: Clock,
        settings: LeaderSettings,
        observer: Observer,
        log: Log,
        on_commit: Callable[[Committed], None],
        on_lost: Callable[[StoreError], None],
    ) -> None:
        self.committed = committed
        self._head = fork(committed)
        self._store = store
        self._leadership = leadership
        self._clock = clock
        self._settings = settings
        self._observer = observer
        self._log = log
        self._on_commit = on_commit
        self._on_lost = on_lost
        self._queue: deque[_Waiting] = deque()
        self._counts = dict.fromkeys(Source, 0)
        self._bounds = {
            Source.USER: settings.queue_commands_max,
            Source.AGENT: settings.queue_commands_max,
            Source.LEADER: settings.queue_own_commands_max,
        }
        self._wake = asyncio.Event()
        self._closed: StoreError | None = None
        self._held = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._seq = 1
        # What is in the store, and what was decided on top of it.
        self._under_way: Batch[_Waiting] | None = None
        self._ahead: Batch[_Waiting] | None = None
        self._ahead_due = False
        # After "no space": one command a transaction, so that what frees some is not refused with what needs some.
        self._full = False

    def offer(self, command: Command, source: Source) -> asyncio.Future[Reply]:
        """Queue a command. The future raises RefusedError or a StoreError. Raises OverloadedError, StoreError."""
        return self.offer_decision(type(command).__name__, lambda state, at: decide(state, command, at), source)

    def offer_decision(self, name: str, decision: Decision, source: Source) -> asyncio.Future[Reply]:
        """Queue anything decided on the head state. `name` is for logs and counts."""
        if self._closed is not None:
            raise self._closed
        if self._counts[source] >= self._bounds[source]:
            raise OverloadedError(f"{self._counts[source]} commands wait already")
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(name, source, decision, future))
        self._counts[source] += 1
        self._wake.set()
        self._look_ahead()
        return future

    def close(self, error: StoreError) -> None:
        """Decide nothing more; what is not in the store fails with `error`, and nothing of it was written."""
        if self._closed is None:
            self._closed = error
        self._take_back_ahead()
        while self._queue:
            _fail(self._take().future, error)
        self._wake.set()

    async def hold(self) -> None:
        """Decide nothing until `release`: what comes waits. Returns once no commit is under way."""
        self._held = True
        await self._idle.wait()

    def release(self) -> None:
        self._held = False
        self._wake.set()

    async def run(self) -> None:
        """Until closed. A batch under way is finished first."""
        while self._closed is None:
            await self._wake.wait()
            self._wake.clear()
            self._idle.clear()
            try:
                while self._closed is None and (batch := self._next()).answers:
                    self._under_way = batch
                    self._look_ahead()
                    await self._finish(batch)
            finally:
                self._under_way = None
                self._idle.set()

    def _take(self) -> _Waiting:
        waiting = self._queue.popleft()
        self._counts[waiting.source] -= 1
        return waiting

    def _put_back(self, waiting: Iterable[_Waiting]) -> None:
        """To the front of the queue, in their order."""
        for each in reversed(tuple(waiting)):
            self._queue.appendleft(each)
            self._counts[each.source] += 1

    def _next(self) -> Batch[_Waiting]:
        """What goes to the store now: what was decided ahead, and what waits where that is little."""
        self._observer.queued(len(self._queue))
        batch, self._ahead = self._ahead or self._batch(), None
        self._under_way = None
        if self._held:
            return batch
        return self._fill(batch, 1 if self._full else self._settings.slice_commands)

    def _batch(self) -> Batch[_Waiting]:
        return Batch(self._settings.batch_operations_max, self._settings.batch_bytes_max)

    def _look_ahead(self) -> None:
        """Have the next batch decided soon, where a commit is under way and enough waits."""
        enough = len(self._queue) >= self._settings.ahead_commands_min
        if enough and self._under_way is not None and not self._ahead_due:
            self._ahead_due = True
            asyncio.get_running_loop().call_soon(self._decide_ahead)

    def _decide_ahead(self) -> None:
        self._ahead_due = False
        if self._under_way is None or self._closed is not None or self._held or self._full:
            return
        self._ahead = batch = self._ahead or self._batch()
        decided = len(batch.answers)
        try:
            self._ahead = self._fill(batch, decided + self._settings.slice_commands)
        except Exception as error:  # noqa: BLE001 - the head is not to be trusted any more; `run` would break likewise
            self._on_lost(OutcomeUnknownError(f"deciding broke: {error!r}"))
            return
        if len(self._ahead.answers) > decided:
            self._look_ahead()

    def _take_back_ahead(self) -> None:
        """What was decided ahead was not: it is decided again on another head, or never."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._put_back(waiting for waiting, _ in ahead.answers)

    def _fill(self, batch: Batch[_Waiting], commands_max: int) -> Batch[_Waiting]:
        """The batch with decisions on what waits, in order, as many as there may be and as fit."""
        commands_max = min(commands_max, self._settings.batch_commands_max)
        if batch.closed or not self._queue or len(batch.answers) >= commands_max:
            return batch
        at = now(self._clock)
        before = batch.copy()
        taken = self._admit_waiting(batch, commands_max, at)
        if not taken or self._settled(batch):
            return batch
        self._rewind(batch, before)
        self._put_back(taken)
        return self._fill_one_by_one(before, len(taken), at)

    def _admit_waiting(self, batch: Batch[_Waiting], commands_max: int, at: Now) -> list[_Waiting]:
        taken: list[_Waiting] = []
        enough_ns = at.boottime_ns + int(self._settings.slice_seconds * SECOND_NS)
        while self._queue and len(batch.answers) < commands_max:
            if taken and self._clock.boottime_ns() > enough_ns:
                break
            waiting = self._queue[0]
            # Its caller is gone and nothing was decided: as if it had never come.
            if not waiting.future.done():
                if not self._admit(batch, waiting, at):
                    batch.closed = True
                    break
                taken.append(waiting)
            self._take()
        return taken

    def _admit(self, batch: Batch[_Waiting], waiting: _Waiting, at: Now) -> bool:
        try:
            return batch.admit(waiting, waiting.decision(self._head, at), self._head, at)
        except Exception as error:  # noqa: BLE001 - a broken rule fails its own command, never the leader
            return self._refuse_broken(batch, waiting, error, at)

    def _refuse_broken(self, batch: Batch[_Waiting], waiting: _Waiting, error: Exception, at: Now) -> bool:
        self._log(LogName.COMMAND_BROKEN, command=waiting.name, error=repr(error))
        return batch.admit(waiting, Refused(Reason.INVARIANT_BROKEN, detail=waiting.name), self._head, at)

    def _settled(self, batch: Batch[_Waiting]) -> bool:
        try:
            return batch.settle(self._head)
        except Exception:  # noqa: BLE001 - whose it is, and what, is found out one by one
            return False

    def _fill_one_by_one(self, batch: Batch[_Waiting], commands: int, at: Now) -> Batch[_Waiting]:
        """So that what cannot be stored fails alone, and what is too much for this transaction is in the next."""
        for _ in range(commands):
            before = batch.copy()
            waiting = self._take()
            admitted = self._admit(batch, waiting, at)
            try:
                fits = admitted and batch.settle(self._head)
            except Exception as error:  # noqa: BLE001 - a broken codec fails its own command, never the leader
                self._rewind(batch, before)
                batch = before
                self._refuse_broken(batch, waiting, error, at)
                continue
            # What is too big for any transaction goes alone: the store has the last word.
            if not fits and before.changes:
                self._rewind(batch, before)
                self._put_back((waiting,))
                before.closed = True
                return before
        return batch

    def _rewind(self, batch: Batch[_Waiting], before: Batch[_Waiting]) -> None:
        """The head as it was when `before` was copied."""
        for request in batch.requests[len(before.requests) :]:
            self._head.forget(request)
        layers = [layer.changes for layer in (self._under_way, before) if layer is not None]
        for key in batch.keys_since(before):
            self._head.reset(key, self.committed, [changes[key] for changes in layers if key in changes])

    async def _finish(self, batch: Batch[_Waiting]) -> None:
        try:
            if batch.stored:
                await self._commit(batch)
            elif batch.answers:
                await self._store.barrier(self._leadership)
        except asyncio.CancelledError:
            self._fail_batch(batch, OutcomeUnknownError("the controller stopped while the commit was under way"))
            raise
        except StorageFullError as error:
            # Nothing was written: the committed state is the truth, and the same seq is used again.
            self._take_back_ahead()
            self._head = fork(self.committed)
            self._full = True
            self._fail_batch(batch, error)
        except DeposedError as error:
            self._fail_batch(batch, error)
            self._on_lost(error)
        except OutcomeUnknownError as error:
            self._fail_batch(batch, error)
            if batch.stored:
                self._on_lost(error)
        except Exception as error:  # noqa: BLE001 - whatever the store did, its outcome is not known
            unknown = OutcomeUnknownError(f"the store failed: {error!r}")
            self._fail_batch(batch, unknown)
            self._on_lost(unknown)
        else:
            self._answer(batch)

    async def _commit(self, batch: Batch[_Waiting]) -> None:
        """Commit and make it visible. Raises StoreError."""
        stored = tuple(batch.stored.values())
        began_ns = self._clock.boottime_ns()
        revision = await self._commit_retried(stored)
        if revision <= self.committed.revision:
            raise OutcomeUnknownError(f"revision {revision} after {self.committed.revision}: the store went back")
        self._seq += 1
        self._full = False
        changes = tuple(batch.changes.values())
        self.committed.apply(changes, revision)
        self._head.confirm(changes, revision, NOTHING if self._ahead is None else self._ahead.changes)
        elapsed_ns = self._clock.boottime_ns() - began_ns
        self._observer.committed(len(batch.answers), len(stored), elapsed_ns / 1e9)
        self._on_commit(Committed(CommittedBatch(revision, changes, tuple(batch.events)), batch.size_bytes, began_ns))

    async def _commit_retried(self, stored: tuple[StoredChange, ...]) -> int:
        """The SAME transaction again while its outcome is unknown: the store applies a seq once.

        Once one attempt is in doubt, "deposed" or "full" from a later one says nothing about the first.
        """
        for attempt in range(1, self._settings.commit_attempts_max + 1):
            try:
                return await self._store.commit(self._leadership, self._seq, stored)
            except OutcomeUnknownError as error:
                doubt = error
            except StoreError as error:
                if attempt == 1:
                    raise
                raise OutcomeUnknownError(f"a commit in doubt could not be repeated: {error}") from error
            self._log(LogName.COMMIT_RETRIED, attempt=attempt, error=str(doubt))
            if attempt == self._settings.commit_attempts_max:
                raise doubt
            await asyncio.sleep(self._settings.commit_retry_seconds * 2 ** (attempt - 1))
        raise ValueError("commit_attempts_max must be at least 1")

    def _answer(self, batch: Batch[_Waiting]) -> None:
        for waiting, outcome in batch.answers:
            if isinstance(outcome, Refused):
                self._observer.refused(waiting.name, outcome.reason)
                _fail(waiting.future, RefusedError(outcome))
            elif not waiting.future.done():
                waiting.future.set_result(outcome.reply)

    def _fail_batch(self, batch: Batch[_Waiting], error: StoreError) -> None:
        self._log(LogName.COMMIT_FAILED, commands=len(batch.answers), reason=error.reason, error=str(error))
        for waiting, _ in batch.answers:
            _fail(waiting.future, error)


def _fail(future: asyncio.Future[Reply], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
