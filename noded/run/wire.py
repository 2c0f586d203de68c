"""A non-blocking line connection with bounds on both sides, for the guardian's loop."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from noded.run.protocol import LINE_BYTES_MAX, LineSplitter, decode_line, encode_line

if TYPE_CHECKING:
    from noded.run.fields import JsonObject

READ_BYTES: Final = 1 << 16
OUT_LINES_MAX: Final = 2
"""A peer that lets more than two of its longest lines pile up is cut off."""
CALM_BYTES_MAX: Final = 256 << 10


class Closed(Exception):
    """The other end is gone, or does not read what it is sent."""


class Connection:
    """One peer. The loop calls receive when readable, flush when writable."""

    def __init__(self, sock: socket.socket, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        """`line_bytes_max` bounds what is sent; what is received is bounded by LINE_BYTES_MAX."""
        sock.setblocking(False)
        self.sock = sock
        self._line_bytes_max = line_bytes_max
        self._splitter = LineSplitter()
        self._out = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    def receive(self) -> list[JsonObject]:
        """Whole messages that have come. Raises Closed at the end, BadMessage for what is not the protocol."""
        try:
            data = self.sock.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Closed(str(error)) from None
        if not data:
            raise Closed("end of stream")
        return [decode_line(line) for line in self._splitter.feed(data)]

    def send(self, message: JsonObject) -> None:
        """Queues and tries at once. Raises Closed when the peer lets too much pile up, BadMessage when
        the message is too long."""
        self._out += encode_line(message, self._line_bytes_max)
        self.flush()
        if len(self._out) > OUT_LINES_MAX * self._line_bytes_max:
            raise Closed(f"{len(self._out)} bytes unread by the peer")

    def flush(self) -> None:
        try:
            while self._out:
                sent = self.sock.send(self._out[:READ_BYTES])
                del self._out[:sent]
        except BlockingIOError:
            return
        except OSError as error:
            raise Closed(str(error)) from None

    @property
    def pending(self) -> bool:
        return bool(self._out)

    @property
    def calm(self) -> bool:
        """False when the peer is behind: it is not read from then, and what may be lost (progress) is left out."""
        return len(self._out) < CALM_BYTES_MAX

    def close(self) -> None:
        self.sock.close()
