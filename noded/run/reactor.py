"""The selector of the guardian's loop, and the signals that wake it."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from noded.run.wire import Connection

if TYPE_CHECKING:
    from types import FrameType

READABLE: Final = selectors.EVENT_READ
WRITABLE: Final = selectors.EVENT_WRITE

Source = socket.socket | Connection | int
Handler = Callable[[int], None]


class Reactor:
    """Handlers by descriptor. Those of one round may forget each other: a forgotten one is not called any more."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, wake_write = socket.socketpair()
        self._wake.setblocking(False)
        wake_write.setblocking(False)
        self._wake_write = wake_write
        self._on_signal: Callable[[], None] = _nothing
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self.watch(self._wake, self._on_wake)

    def wake_on_signals(self, handler: Callable[[], None]) -> None:
        """Calls it after any signal that has a handler, and gives SIGCHLD one: without, it would not wake the loop."""
        self._on_signal = handler
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)

    def watch(self, source: Source, handler: Handler, events: int = READABLE) -> None:
        self._selector.register(source, events, handler)

    def accept(self, listener: socket.socket) -> socket.socket | None:
        """A new peer, or None. Out of descriptors, one is taken and dropped with the spare: else the listener would
        stay readable and the loop would spin."""
        try:
            return listener.accept()[0]
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                os.close(self._spare)
                with contextlib.suppress(OSError):
                    listener.accept()[0].close()
                self._spare = os.open(os.devnull, os.O_RDONLY)
            return None

    def forget(self, source: Source) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def watches(self, fd: int) -> bool:
        return fd in self._selector.get_map()

    def ask_to_write(self, connections: Iterable[Connection]) -> None:
        """Watches those with something to send for writing; those far behind are not read from until they catch up."""
        for connection in connections:
            key = self._selector.get_map().get(connection.fileno())
            wanted = (READABLE if connection.calm else 0) | (WRITABLE if connection.pending else 0)
            if key is not None and key.events != wanted:
                self._selector.modify(connection, wanted, key.data)

    def wait(self, timeout_seconds: float) -> list[Callable[[], None]]:
        """What became ready, to be called in turn."""
        ready = self._selector.select(timeout_seconds)
        return [lambda key=key, mask=mask: self._call(key, mask) for key, mask in ready]

    def _call(self, key: selectors.SelectorKey, mask: int) -> None:
        current = self._selector.get_map().get(key.fd)
        if current is not None and current.data is key.data:
            key.data(mask)

    def _on_wake(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        self._on_signal()


def reap() -> Iterable[int]:
    """Pids of children that have ended, each once."""
    while True:
        try:
            pid, _status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid


def _ignore(signum: int, frame: FrameType | None) -> None:
    return


def _nothing() -> None:
    return
