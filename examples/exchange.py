"""Gradients summed over plain TCP: rank 0 listens at MASTER_ADDR:MASTER_PORT, the others connect.

Summed in rank order and in float64, whatever order they arrive in, so that the result is the same bits every time.
Each rank says first who it is; one of another generation, world size or starting state is refused: its gradients would
spoil the run unseen. Every wait has a time-out.
"""

from __future__ import annotations

import errno
import json
import selectors
import socket
import struct
import time
from dataclasses import asdict, dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

HEADER = struct.Struct("<4sQdI")
MAGIC = b"VTG1"
SAVE_WANTED = 1
LINE_BYTES_MAX = 4096
HELLO_S = 5.0
"""How long one that connected may take to say who it is, and a rank that said so waits for its welcome longer."""


class PeerLost(Exception):
    """A rank is gone, silent or not of this gang; the message says which and when."""


@dataclass(frozen=True)
class Hello:
    """Who a rank is, and what all must agree on: `start` is the digest of the parameters it starts from."""

    job: str
    generation: int
    world_size: int
    step: int
    start: str
    rank: int


@dataclass(frozen=True)
class Reduced:
    """What all ranks have in common after a step."""

    gradient: Floats
    loss: float
    save_wanted: bool


class Exchange:
    """The gang's exchange, seen from one rank. Open it with `join`; `reduce` once a step."""

    def __init__(self, me: Hello, peers: dict[int, socket.socket], timeout_s: float) -> None:
        self._me = me
        self._peers = peers  # rank 0: all others; others: rank 0 alone
        self._timeout_s = timeout_s

    def reduce(self, step: int, gradient: Floats, loss: float, *, save_wanted: bool) -> Reduced:
        """Average over all ranks. Raises PeerLost."""
        mine = _frame(step, gradient, loss, save_wanted)
        if self._me.rank != 0:
            self._send(0, mine, step)
            return self._decode(0, self._receive(len(mine), step)[0], step)
        frames = self._receive(len(mine), step)
        total, losses, wanted = gradient.astype(np.float64), loss, save_wanted
        for rank in sorted(frames):  # in rank order: floating-point sums depend on it
            part = self._decode(rank, frames[rank], step)
            total += part.gradient
            losses += part.loss
            wanted = wanted or part.save_wanted
        mean = (total / self._me.world_size).astype(np.float32)
        result = Reduced(mean, losses / self._me.world_size, wanted)
        frame = _frame(step, mean, result.loss, wanted)
        for rank in sorted(self._peers):
            self._send(rank, frame, step)
        return result

    def close(self) -> None:
        """Close all connections."""
        for peer in self._peers.values():
            peer.close()

    def _send(self, rank: int, frame: bytes, step: int) -> None:
        try:
            self._peers[rank].sendall(frame)
        except OSError as error:
            raise _lost(rank, step, error, self._timeout_s) from None

    def _receive(self, length: int, step: int) -> dict[int, bytearray]:
        """One frame from each peer. All are watched at once, so that a dead one is noticed behind a slow one."""
        deadline = time.monotonic() + self._timeout_s
        frames = {rank: bytearray(length) for rank in self._peers}
        got = dict.fromkeys(self._peers, 0)
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = min(rank for rank in frames if got[rank] < length)
                    raise _lost(silent, step, TimeoutError(), self._timeout_s)
                for key, _ in ready:
                    rank = cast("int", key.data)
                    try:
                        count = self._peers[rank].recv_into(memoryview(frames[rank])[got[rank] :])
                    except OSError as error:
                        raise _lost(rank, step, error, self._timeout_s) from None
                    if count == 0:
                        raise _lost(rank, step, None, self._timeout_s)
                    got[rank] += count
                    if got[rank] == length:
                        selector.unregister(key.fileobj)
        return frames

    def _decode(self, rank: int, frame: bytearray, step: int) -> Reduced:
        magic, its_step, loss, flags = cast("tuple[bytes, int, float, int]", HEADER.unpack_from(frame))
        if magic != MAGIC or its_step != step:
            raise PeerLost(f"rank {rank} sent step {its_step} at step {step}: the ranks are out of step")
        gradient = np.frombuffer(frame, dtype="<f4", offset=HEADER.size).astype(np.float32, copy=False)
        return Reduced(gradient, loss, bool(flags & SAVE_WANTED))


def join(me: Hello, address: str, port: int, timeout_s: float) -> Exchange:
    """Bring the gang together. Raises PeerLost when it is not complete in time, or this rank is refused."""
    deadline = time.monotonic() + timeout_s
    if me.world_size == 1:
        peers: dict[int, socket.socket] = {}
    elif me.rank == 0:
        peers = _accept_all(me, address, port, deadline, timeout_s)
    else:
        peers = {0: _connect(me, address, port, deadline, timeout_s)}
    for peer in peers.values():
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.settimeout(timeout_s)
    return Exchange(me, peers, timeout_s)


def _accept_all(me: Hello, address: str, port: int, deadline: float, timeout_s: float) -> dict[int, socket.socket]:
    peers: dict[int, socket.socket] = {}
    with _listen(address, port, me.world_size) as listener:
        while len(peers) < me.world_size - 1:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, me.world_size)) - set(peers))
                raise PeerLost(f"rank {missing[0]} did not connect within {timeout_s:g} s") from None
            rank, refusal = _admit(me, connection, peers)
            if refusal:
                print(f"train: refused a connection: {refusal}", flush=True)
                connection.close()
            else:
                peers[rank] = connection
    return peers


def _admit(me: Hello, connection: socket.socket, peers: dict[int, socket.socket]) -> tuple[int, str]:
    """Read one hello and answer it. Returns (rank, why refused or "")."""
    connection.settimeout(HELLO_S)
    rank, refusal = 0, ""
    try:
        fields = _read_line(connection)
        claimed = fields.get("rank")
        expected = asdict(me)
        del expected["rank"]
        differs = [name for name in expected if fields.get(name) != expected[name]]
        if isinstance(claimed, int) and 0 < claimed < me.world_size:
            rank = claimed
        if not rank:
            refusal = f"rank {claimed!r:.20} of world_size {me.world_size}"
        elif differs:
            name = differs[0]
            refusal = f"rank {rank} has {name} {fields.get(name)!r:.80}, this gang has {expected[name]!r:.80}"
        elif rank in peers:
            refusal = f"rank {rank} is connected already"
        connection.sendall(json.dumps({"refused": refusal}).encode() + b"\n")
    except (OSError, ValueError) as error:
        refusal = refusal or f"no hello ({error})"
    return rank, refusal


def _connect(me: Hello, address: str, port: int, deadline: float, timeout_s: float) -> socket.socket:
    """Connect to rank 0 until it listens. The port may be held, bound but not listening: that refuses us meanwhile."""
    last = "not tried"
    while (remaining_s := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((address, port), timeout=min(5.0, remaining_s))
        except OSError as error:
            last = str(error)
            time.sleep(0.05)
            continue
        if connection.getsockname() == connection.getpeername():
            # Nobody listens and the kernel chose the very same port for our end: TCP connects to itself.
            connection.close()
            continue
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection.sendall(json.dumps(asdict(me)).encode() + b"\n")
            refusal = _read_line(connection).get("refused")
        except (OSError, ValueError) as error:
            connection.close()
            raise PeerLost(f"rank 0 at {address}:{port} did not answer ({error})") from None
        if refusal:
            connection.close()
            raise PeerLost(f"rank 0 at {address}:{port} refused this rank: {refusal!s:.300}")
        return connection
    raise PeerLost(f"rank 0 at {address}:{port} could not be reached within {timeout_s:g} s ({last})")


def _listen(address: str, port: int, backlog: int) -> socket.socket:
    """Listen at the rendezvous. SO_REUSEADDR because the port is held for us by a bound, not listening, socket."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))  # the advertised address is translated: it is not one of this machine's
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise PeerLost(f"rank 0 cannot listen at {address}:{port}: {error.strerror}") from None
    return listener


def _read_line(connection: socket.socket) -> dict[str, object]:
    """One JSON object on a line, at most LINE_BYTES_MAX. Raises OSError, ValueError."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if len(line) > LINE_BYTES_MAX:
            raise ValueError("its line is too long")
        data = connection.recv(1)  # nothing behind the line may be taken: gradients follow
        if not data:
            raise ValueError("it closed the connection")
        line += data
    decoded: object = json.loads(line)
    if not isinstance(decoded, dict):
        raise ValueError("its line is no JSON object")
    return cast("dict[str, object]", decoded)


def _frame(step: int, gradient: Floats, loss: float, save_wanted: bool) -> bytes:
    header = HEADER.pack(MAGIC, step, loss, SAVE_WANTED if save_wanted else 0)
    return header + gradient.astype("<f4", copy=False).tobytes()


def _lost(rank: int, step: int, error: OSError | None, timeout_s: float) -> PeerLost:
    if error is None:
        return PeerLost(f"rank {rank} closed its connection at step {step}")
    if isinstance(error, TimeoutError):
        return PeerLost(f"rank {rank} was silent for {timeout_s:g} s at step {step}")
    return PeerLost(f"rank {rank} is lost at step {step}: {error.strerror or error}")
