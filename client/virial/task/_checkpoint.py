"""One rank's part of one save: a file-like object that is published only when it is whole."""

from __future__ import annotations

import errno
import io
import time
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Final

from virial.task._channel import CallFailed
from virial.task._errors import CheckpointError, SaveError
from virial.task._registry import Begun, Registry
from virialpb.shardfile import ShardIdentity, ShardWriter, make_directory

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long each phase of a save may take; no phase can hang training for ever.

    `write_s` is looked at between writes: a write that the kernel itself blocks (a dead network file system) cannot be
    interrupted from inside, so the controller's own deadline aborts the checkpoint for the other ranks.
    """

    begin_s: float = 20.0
    write_s: float = 600.0
    prepared_s: float = 20.0
    commit_s: float = 60.0


class Shard(io.BufferedIOBase):
    """What `with task.checkpoint(step) as shard` gives: write bytes to it (`np.savez(shard, ...)`, `torch.save`).

    `state` is WRITING, then PREPARED (this rank's part is durable), COMMITTED (every rank's is: a restore may use it),
    ABORTED (the gang gave this checkpoint up) or FAILED (see `error`). After a failure writes are accepted and dropped,
    so that the saving code needs no special case; look at `state` beforehand to spare the work.
    """

    def __init__(
        self, registry: Registry, identity: ShardIdentity, *, wait: bool, strict: bool, deadlines: Deadlines
    ) -> None:
        super().__init__()
        self._registry = registry
        self._identity = identity
        self._wait = wait
        self._strict = strict
        self._deadlines = deadlines
        self._state = "WRITING"
        self._error: SaveError | None = None
        self._begun: Begun | None = None
        self._writer: ShardWriter | None = None
        self._write_deadline = 0.0
        self._entered = False
        self._durable = False

    @property
    def state(self) -> str:
        """WRITING, PREPARED, COMMITTED, ABORTED or FAILED. A durable shard's state moves on when the task is told."""
        return (self._pushed() if self._durable else None) or self._state

    @property
    def error(self) -> SaveError | None:
        """Why it was not saved, or is not known to be committed; None otherwise."""
        if self.state == "COMMITTED":
            return None
        if self._error is None and self.state == "ABORTED":
            return SaveError("ABORTED", f"checkpoint {self.checkpoint_id} of step {self.step} was given up")
        return self._error

    @property
    def step(self) -> int:
        """The step that is saved."""
        return self._identity.step

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's id; empty when it could not be begun."""
        return self._begun.checkpoint_id if self._begun else ""

    @property
    def directory(self) -> str:
        """The directory that the controller named; empty when the checkpoint could not be begun."""
        return self._begun.directory if self._begun else ""

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Append bytes. Returns how many were given, also after a failure.

        Raises ValueError outside the `with` block, CheckpointError when strict.
        """
        if not self._entered or self.closed:
            raise ValueError("a shard takes bytes inside its block only: with task.checkpoint(step) as shard: ...")
        length = memoryview(data).nbytes
        if self._writer is None:
            return length
        if self._pushed() == "ABORTED":
            self._fail(SaveError("ABORTED", "the gang's checkpoint was given up while this shard was written"))
        elif time.monotonic() > self._write_deadline:
            self._fail(SaveError("TIMEOUT", f"not written within {self._deadlines.write_s:g} s"))
        else:
            try:
                self._writer.write(data)
            except OSError as error:
                self._fail(_save_error(error))
        return length

    def __enter__(self) -> Shard:
        if self._entered:
            raise ValueError("a shard is written once; ask for another with task.checkpoint(step)")
        self._entered = True
        try:
            self._begun = self._registry.begin(self.step, self._deadlines.begin_s)
            self._write_deadline = time.monotonic() + self._deadlines.write_s
            make_directory(self._begun.directory)
            identity = replace(self._identity, checkpoint_id=self._begun.checkpoint_id)
            self._writer = ShardWriter(self._begun.directory, identity)
        except CallFailed as failure:
            self._fail(SaveError(failure.reason, failure.message))
        except OSError as error:
            self._fail(_save_error(error))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._writer is None or self._begun is None:
                return
            if raised is not None:
                self._drop(SaveError("EXCEPTION", f"{type(raised).__name__} while the shard was written"))
            else:
                self._publish(self._writer, self._begun)
        finally:
            self.close()

    def _publish(self, writer: ShardWriter, begun: Begun) -> None:
        try:
            manifest = writer.finish()
        except OSError as error:
            self._fail(_save_error(error))
            return
        # From here on only the registry decides what becomes of the files: when an answer is lost, the checkpoint may
        # still commit, so nothing is taken back.
        self._writer, self._durable = None, True
        try:
            self._state = self._registry.prepared(begun, manifest, self._deadlines.prepared_s)
            if self._wait and self._state == "PREPARED":
                self._state = self._registry.wait(begun, self._deadlines.commit_s)
        except CallFailed as failure:
            self._error = SaveError(failure.reason, failure.message)
            if self._state == "WRITING":
                self._state = "FAILED"
        error = self.error
        if error is not None and self._strict:
            raise CheckpointError(error.reason, error.message)

    def _pushed(self) -> str | None:
        return self._registry.state(self._begun.checkpoint_id) if self._begun is not None else None

    def _fail(self, error: SaveError) -> None:
        self._drop(error)
        if self._strict:
            raise CheckpointError(error.reason, error.message)

    def _drop(self, error: SaveError) -> None:
        self._state, self._error = ("ABORTED" if error.reason == "ABORTED" else "FAILED"), error
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.discard()
        if self._begun is not None and self._state == "FAILED":
            self._registry.failed(self._begun, error.reason, error.message)


def _save_error(error: OSError) -> SaveError:
    reason = "STORAGE_FULL" if error.errno in _FULL else "IO_ERROR"
    where = f"{error.filename}: " if error.filename else ""
    return SaveError(reason, f"{where}{error.strerror or error}")
