"""The task's end of the guardian's socket: newline-delimited JSON, one connection a process.

Duties, in the order in which they bite:

1. Nothing here may stall or kill training. `progress` never blocks: at most one report is in flight and only the
   newest waits behind it, so a stopped guardian costs one buffer entry, and a busy one sets the pace itself.
2. A forked child (data loaders fork) inherits neither the connection nor the thread: both would be shared or dead.
   It starts with a closed channel and new locks, and connects when it first needs to.
3. Answers and pushes are read by one daemon thread, which runs also while the training thread sits in a collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Final, cast

LINE_BYTES_MAX: Final = 1 << 20
RECONNECT_S: Final = 1.0
"""Pause between attempts to reach a guardian that is away, so that a training loop does not spin on connect()."""

Fields = Mapping[str, object]


class CallFailed(Exception):
    """A call had no good answer. `reason`: TIMEOUT, DISCONNECTED, PROTOCOL, or what the other side gave."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class _Waiter:
    """One call that waits for its answer."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.answer: Fields | None = None
        self.failure: CallFailed | None = None

    def fail(self, reason: str, message: str) -> None:
        self.failure = CallFailed(reason, message)
        self.done.set()


class Channel:
    """Calls to the guardian at `path`; `on_push` is called from the reading thread and must be quick."""

    def __init__(self, path: str, on_push: Callable[[Fields], None]) -> None:
        self._path = path
        self._on_push = on_push
        self._reset()
        _channels.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()  # held for microseconds only: never while waiting for the other side
        self._socket: socket.socket | None = None
        self._out = bytearray()  # whole lines, less what the kernel has taken already
        self._waiters: dict[int, _Waiter] = {}
        self._last_id = 0
        self._retry_at = 0.0
        self._progress_id = 0  # the report in flight; 0 when none is
        self._progress_next: Fields | None = None

    def connect(self) -> None:
        """Connect if not connected and not tried within RECONNECT_S. Never raises."""
        with self._lock:
            self._connect()

    def progress(self, args: Fields) -> None:
        """Report, or keep as the newest report while one is unanswered. Never blocks, never raises."""
        with self._lock:
            if not self._connect():
                return
            if self._progress_id:
                self._progress_next = args
            else:
                self._progress_id = self._send("progress", args)

    def notify(self, call: str, args: Fields) -> None:
        """Send a call whose answer nobody waits for. Never blocks, never raises."""
        with self._lock:
            if self._connect():
                self._send(call, args)

    def call(self, call: str, args: Fields, timeout_s: float) -> Fields:
        """Send a call and wait for its result. Raises CallFailed, at the latest after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        waiter = _Waiter()
        call_id = 0
        while True:
            with self._lock:
                if self._connect():
                    call_id = self._send(call, args)
                if call_id:
                    self._waiters[call_id] = waiter
                    break
                retry_at = self._retry_at
            now = time.monotonic()
            if now >= deadline:
                raise CallFailed("DISCONNECTED", f"{call}: the guardian cannot be reached at {self._path}")
            time.sleep(min(max(retry_at - now, 0.01), deadline - now))
        self._drain(deadline)
        answered = waiter.done.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._waiters.pop(call_id, None)
        if waiter.failure is not None:
            raise waiter.failure
        if not answered or waiter.answer is None:
            raise CallFailed("TIMEOUT", f"{call}: no answer within {timeout_s:g} s")
        return _result(call, waiter.answer)

    def close(self) -> None:
        """Send a waiting progress report if there is room, and close. The channel connects again when used again."""
        with self._lock:
            if self._socket is not None and self._progress_next is not None:
                self._send("progress", self._progress_next)
            self._lose("closed by the task")

    def after_fork_in_child(self) -> None:
        """Forget what belongs to the parent. Its lock may be held by a thread that does not exist here."""
        if self._socket is not None:
            self._socket.close()  # this process's copy of the descriptor only
        self._reset()

    # All below but _drain and _read: with self._lock held.

    def _connect(self) -> bool:
        if self._socket is not None:
            return True
        if time.monotonic() < self._retry_at:
            return False
        self._retry_at = time.monotonic() + RECONNECT_S
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)  # a full backlog is an error at once, not a wait
            connection.connect(self._path)
            connection.setblocking(True)  # for the reading thread; every send says MSG_DONTWAIT
            reader = threading.Thread(target=self._read, args=(connection,), name="virial-task", daemon=True)
            self._socket = connection
            reader.start()
        except (OSError, RuntimeError):  # RuntimeError: no thread can be started (limits, or the interpreter ends)
            self._socket = None
            connection.close()
            return False
        return True

    def _send(self, call: str, args: Fields) -> int:
        """Queue one line and hand the kernel what it takes. Returns the call's id, or 0 when it could not be queued."""
        line = json.dumps({"id": self._last_id + 1, "call": call, "args": args}).encode() + b"\n"
        if len(line) > LINE_BYTES_MAX or len(self._out) + len(line) > LINE_BYTES_MAX:
            return 0
        self._last_id += 1
        self._out += line
        self._flush()
        return self._last_id if self._socket is not None else 0

    def _flush(self) -> None:
        if self._socket is None or not self._out:
            return
        try:
            sent = self._socket.send(self._out, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(str(error))
            return
        del self._out[:sent]

    def _lose(self, why: str) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            # shutdown wakes the reading thread, which close alone would leave in recv for ever.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._out.clear()
        self._progress_id, self._progress_next = 0, None
        for waiter in self._waiters.values():
            waiter.fail("DISCONNECTED", f"the guardian's connection ended: {why}")
        self._waiters.clear()

    def _drain(self, deadline: float) -> None:
        """Wait until all lines are with the kernel, or the deadline. Takes the lock for moments only."""
        while True:
            with self._lock:
                self._flush()
                if not self._out or self._socket is None:
                    return
                fd = self._socket.fileno()
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll(min(remaining_s, 0.1) * 1000)

    def _read(self, connection: socket.socket) -> None:
        """The reading thread: ends with its connection."""
        buffer = bytearray()
        why = "closed by the guardian"
        while True:
            try:
                data = connection.recv(65536)
            except OSError as error:
                why, data = str(error), b""
            if not data:
                break
            buffer += data
            *lines, rest = buffer.split(b"\n")
            buffer = bytearray(rest)
            if len(buffer) > LINE_BYTES_MAX or not all(self._handle_line(line) for line in lines):
                why = "it sent what is no protocol line"
                break
        with self._lock:
            if self._socket is connection:
                self._lose(why)

    def _handle_line(self, line: bytearray) -> bool:
        """Take one message; False when it is none."""
        try:
            decoded: object = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(decoded, dict):
            return False
        message = cast("dict[str, object]", decoded)
        if "push" in message:
            self._on_push(message)
            return True
        with self._lock:
            call_id = message.get("id")
            if isinstance(call_id, int) and call_id in self._waiters:
                waiter = self._waiters.pop(call_id)
                waiter.answer = message
                waiter.done.set()
            elif call_id == self._progress_id and self._socket is not None:
                args, self._progress_next = self._progress_next, None
                self._progress_id = self._send("progress", args) if args is not None else 0
        return True


def _result(call: str, answer: Fields) -> Fields:
    if answer.get("ok") is True:
        result = answer.get("result", {})
        if isinstance(result, dict):
            return cast("Fields", result)
        raise CallFailed("PROTOCOL", f"{call}: the answer's result is not an object")
    raise CallFailed(str(answer.get("error") or "PROTOCOL"), str(answer.get("message") or f"{call} was refused"))


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for channel in list(_channels):
        channel.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
