"""A relay between one agent and its controller that can go silent: it then forwards nothing and closes nothing."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from dataclasses import dataclass, field

CHUNK_BYTES = 64 << 10
# What one side may be ahead of the other; beyond it the relay reads no more, as a real path would.
BUFFER_BYTES_MAX = 4 << 20


@dataclass(slots=True)
class End:
    """One direction: what was read from `source` and is still to be written to `sink`."""

    source: socket.socket
    sink: socket.socket
    waiting: bytearray = field(default_factory=bytearray)
    ended: bool = False


class Relay:
    """Listens on a loopback port of its own and forwards to `target` from one thread, until `cut`."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._cut = threading.Event()
        self._stop = threading.Event()
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, name="relay", daemon=True)

    def start(self) -> None:
        for sock in (self._listener, self._wake_receiver):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, None)
        self._thread.start()

    def cut(self) -> None:
        """Go silent: from now on nothing passes either way, new connections are taken and lead nowhere."""
        self._cut.set()

    def stop(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"x")
        self._thread.join(5)
        for sock in (*self._sockets, self._listener, self._wake_receiver, self._wake_sender):
            sock.close()

    def _serve(self) -> None:
        while not self._stop.is_set():
            for key, mask in self._selector.select(0.5):
                if self._stop.is_set():
                    return
                if self._cut.is_set():
                    # Busy looping on readable sockets serves nobody once nothing is to pass.
                    self._stop.wait()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._move(key.data, mask)

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
            far = socket.create_connection(self._target, timeout=5)
        except OSError:
            return
        self._sockets += [near, far]
        for sock in (near, far):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = (End(near, far), End(far, near))
        for end, other in (pair, pair[::-1]):
            self._selector.register(end.source, selectors.EVENT_READ, (end, other))

    def _move(self, ends: tuple[End, End], mask: int) -> None:
        """`ends`: the direction that reads from the socket that is ready, and the one that writes to it."""
        reads, writes = ends
        try:
            if mask & selectors.EVENT_READ and not reads.ended:
                data = reads.source.recv(CHUNK_BYTES)
                reads.ended = not data
                reads.waiting += data
            self._flush(reads)
            self._flush(writes)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._drop(ends)
            return
        if (reads.ended and not reads.waiting) or (writes.ended and not writes.waiting):
            self._drop(ends)
            return
        for end, other in (ends, ends[::-1]):
            want_read = not end.ended and len(end.waiting) < BUFFER_BYTES_MAX
            events = (selectors.EVENT_READ if want_read else 0) | (selectors.EVENT_WRITE if other.waiting else 0)
            with contextlib.suppress(KeyError):
                self._selector.modify(end.source, events or selectors.EVENT_WRITE, (end, other))

    @staticmethod
    def _flush(end: End) -> None:
        if end.waiting:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                del end.waiting[: end.sink.send(end.waiting)]

    def _drop(self, ends: tuple[End, End]) -> None:
        for end in ends:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end.source)
            end.source.close()
