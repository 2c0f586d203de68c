"""A seeded network: connections of two FIFO pipes, as TCP has them, that may be slow, cut silently, or broken.

A cut stops bytes in one or both directions and closes nothing: what was under way arrives after the heal, in order,
unless keepalives gave the connection up before. A break or a process's death is seen by the other end as a reset.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from tests.sim.loop import NOBODY, Process, SimLoop
from virialpb.errors import ErrorDetails

DELAY_S = (0.0002, 0.003)
DIAL_SECONDS = 3.0
DIAL_RETRY_S = 0.25
KEEPALIVE_AGENT_S = 15.0
KEEPALIVE_CONTROLLER_S = 30.0
"""As in `noded.link.stream` and `controld.service.server`: interval and time-out together."""
RETRANSMIT_S = (0.05, 2.0)
WINDOW_BYTES = 64 * 1024


class Way(Enum):
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class End:
    """The last thing a pipe delivers. `reset`: without a goodbye. `why`: what the call failed with, if it did."""

    reset: bool
    why: ErrorDetails | None = None


class DialFailed(Exception):
    """Nothing at that address answered in time."""


class Pipe:
    """One direction of a connection."""

    def __init__(self, network: Network, host: str, address: str, way: Way) -> None:
        self._network = network
        self._host = host
        self._address = address
        self._way = way
        self._last_at_s = 0.0
        self._held: deque[bytes | End] = deque()
        self._in_flight_bytes = 0
        self.inbox: deque[bytes | End] = deque()
        self.arrived = asyncio.Event()
        self.room = asyncio.Event()
        self.room.set()
        self.ended = False

    def send(self, item: bytes | End) -> None:
        if self.ended:
            return
        if isinstance(item, End):
            self.ended = True
        else:
            self._in_flight_bytes += len(item)
            if self._in_flight_bytes > WINDOW_BYTES:
                self.room.clear()
        if self._held or self._cut():
            self._held.append(item)
        else:
            self._schedule(item, self._network.delay_s(self._host))

    def _cut(self) -> bool:
        return self._network.is_cut(self._host, self._way) or self._network.is_cut(self._address, self._way)

    def reset(self) -> None:
        """What is under way is lost; the reader sees the end at once."""
        self.ended = True
        self._held.clear()
        self.inbox.clear()
        self._arrive(End(reset=True))

    def heal(self) -> None:
        held, self._held = self._held, deque()
        if held:
            self._last_at_s = max(self._last_at_s, self._network.loop.time() + self._network.retransmit_s())
        for item in held:
            self._schedule(item, self._network.delay_s(self._host))

    def ended_for_reader(self) -> bool:
        return bool(self.inbox) and isinstance(self.inbox[-1], End)

    async def take(self) -> bytes | End:
        while not self.inbox:
            self.arrived.clear()
            await self.arrived.wait()
        item = self.inbox[0]
        if isinstance(item, bytes):
            self.inbox.popleft()
            self._in_flight_bytes -= len(item)
            if self._in_flight_bytes <= WINDOW_BYTES:
                self.room.set()
        return item

    def _schedule(self, item: bytes | End, delay_s: float) -> None:
        loop = self._network.loop
        self._last_at_s = max(self._last_at_s, loop.time() + delay_s)
        loop.call_at(self._last_at_s, self._deliver, item, context=NOBODY)

    def _deliver(self, item: bytes | End) -> None:
        if self._held or self._cut():
            self._held.append(item)
        else:
            self._arrive(item)

    def _arrive(self, item: bytes | End) -> None:
        if not (self.inbox and isinstance(self.inbox[-1], End)):
            self.inbox.append(item)
        self.arrived.set()
        self.room.set()


class Connection:
    """`up` carries what the agent says, `down` what the controller says. `method`: Control or Bulk."""

    def __init__(self, network: Network, host: str, address: str, method: str) -> None:
        self.host = host
        self.address = address
        self.method = method
        self.up = Pipe(network, host, address, Way.UP)
        self.down = Pipe(network, host, address, Way.DOWN)
        self.open = True

    def break_off(self) -> None:
        self.open = False
        self.up.reset()
        self.down.reset()

    def hang_up(self, way: Way, *, reset: bool, why: ErrorDetails | None = None) -> None:
        """The end that sends `way` is gone, and says so."""
        (self.up if way is Way.UP else self.down).send(End(reset, why))


@dataclass(slots=True)
class Server:
    process: Process
    accept: Callable[[Connection], None]
    connections: list[Connection] = field(default_factory=list[Connection])


class Network:
    """Cuts are of an agent's host, or of a controller's address. `refuses`: a dial fails at once where none listens."""

    refuses = False

    def __init__(self, loop: SimLoop, rng: Random) -> None:
        self.loop = loop
        self._rng = rng
        self._cuts: dict[tuple[str, Way], int] = {}
        self._slow: dict[str, float] = {}
        self._servers: dict[str, Server] = {}
        self._connections: list[Connection] = []

    # -- for those who send

    def is_cut(self, host: str, way: Way) -> bool:
        return (host, way) in self._cuts

    def delay_s(self, host: str) -> float:
        return self._rng.uniform(*DELAY_S) + self._slow.get(host, 0.0) * self._rng.random()

    def retransmit_s(self) -> float:
        return self._rng.uniform(*RETRANSMIT_S)

    def listen(self, address: str, process: Process, accept: Callable[[Connection], None]) -> None:
        server = Server(process, accept)
        self._servers[address] = server
        process.on_death.append(lambda: self._gone(address, server))

    def _gone(self, address: str, server: Server) -> None:
        if self._servers.get(address) is server:
            del self._servers[address]
        for connection in server.connections:
            connection.hang_up(Way.DOWN, reset=True)

    async def dial(self, process: Process, host: str, address: str, method: str) -> Connection:
        """Raises DialFailed after DIAL_SECONDS."""
        give_up_s = self.loop.time() + DIAL_SECONDS
        while self.loop.time() < give_up_s:
            await asyncio.sleep(2 * self.delay_s(host))
            server = self._servers.get(address)
            open_ = not self._any_cut(host) and not self._any_cut(address)
            if server is not None and server.process.running and open_:
                return self._connect(process, host, address, method, server)
            if server is None and open_ and self.refuses:
                raise DialFailed(f"{address}: the connection was refused")
            await asyncio.sleep(DIAL_RETRY_S)
        raise DialFailed(f"{address}: no connection within {DIAL_SECONDS:g} s")

    def _any_cut(self, host: str) -> bool:
        return self.is_cut(host, Way.UP) or self.is_cut(host, Way.DOWN)

    def _connect(self, process: Process, host: str, address: str, method: str, server: Server) -> Connection:
        connection = Connection(self, host, address, method)
        server.connections = [c for c in server.connections if c.open]
        self._connections = [c for c in self._connections if c.open]
        server.connections.append(connection)
        self._connections.append(connection)
        process.on_death.append(lambda: connection.hang_up(Way.UP, reset=True))
        server.process.post(0.0, server.accept, connection)
        return connection

    # -- faults

    def cut(self, host: str, *ways: Way) -> None:
        """Bytes stop and nothing closes. Cuts of one host may overlap."""
        for way in ways:
            self._cuts[host, way] = self._cuts.get((host, way), 0) + 1
        for connection in self._of(host):
            self.loop.after(KEEPALIVE_AGENT_S, self._keepalive, connection, Way.DOWN)
            self.loop.after(KEEPALIVE_CONTROLLER_S, self._keepalive, connection, Way.UP)

    def heal(self, host: str, *ways: Way) -> None:
        for way in ways:
            count = self._cuts.pop((host, way), 0)
            if count > 1:
                self._cuts[host, way] = count - 1
            else:
                for connection in self._of(host):
                    (connection.up if way is Way.UP else connection.down).heal()

    def slow(self, host: str, most_s: float) -> None:
        self._slow[host] = most_s

    def forget_host(self, host: str) -> None:
        """It lost power: the other ends hear nothing until their keepalives give up."""
        for connection in self._of(host):
            connection.open = False
            connection.up.ended = True
            self.loop.after(KEEPALIVE_CONTROLLER_S, connection.up.reset)

    def break_connections(self, host: str) -> int:
        found = self._of(host)
        for connection in found:
            connection.break_off()
        return len(found)

    def heal_everything(self) -> None:
        self._slow.clear()
        for host, way in list(self._cuts):
            self._cuts[host, way] = 1
            self.heal(host, way)

    def _keepalive(self, connection: Connection, way: Way) -> None:
        """Pings go unanswered whichever way is cut: one end gives up."""
        if connection.open and (self._any_cut(connection.host) or self._any_cut(connection.address)):
            (connection.down if way is Way.DOWN else connection.up).reset()

    def _of(self, end: str) -> list[Connection]:
        return [c for c in self._connections if end in (c.host, c.address) and c.open]
