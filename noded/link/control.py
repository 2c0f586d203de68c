"""The control stream: renewals and orders. It dials, and dials again, over all controllers; what to say is the core's.

A stream that ends is no reason to stop anything. One on which nothing comes back is left open while another is dialled
(`redial`): a partition in which bytes stop and nothing closes looks like that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine
from random import Random
from typing import Final, Protocol

import grpc
from grpc import aio

from noded.core.events import Connected, Disconnected, Event, OrderReceived
from noded.core.messages import Beat, Report, SessionRefused, Welcome
from noded.link.backoff import Backoff
from noded.link.convert import BadOrder, ControlDown, ControlUp, epoch_of, order_from_proto, report_to_proto
from noded.link.stream import DIAL_SECONDS, Dialer, DialFailed, Stream, why
from virialpb.reasons import Reason

DUPLICATE_SECONDS: Final = 0.5
DUPLICATE_SECONDS_MAX: Final = 5.0
"""This uid is alive elsewhere: asking often would not make it less so. The first time it may be our own last stream."""
WARM_SECONDS: Final = 5.0
LEADER_KEY: Final = "leader"


class LinkLog(Protocol):
    """Where the link tells what it does; `noded.logs` gives one."""

    def info(self, event: str, **fields: object) -> object: ...
    def warning(self, event: str, **fields: object) -> object: ...


_ControlStream = Stream[ControlUp, ControlDown]


class ControlLink:
    """`on_event` is called from the event loop with Connected, Disconnected and OrderReceived."""

    def __init__(
        self,
        dialer: Dialer,
        addresses: tuple[str, ...],
        random: Random,
        on_event: Callable[[Event], None],
        log: LinkLog,
    ) -> None:
        self._dialer = dialer
        self._addresses = addresses
        self._on_event = on_event
        self._log = log
        self._backoff = Backoff(random)
        self._next = random.randrange(len(addresses))
        self._hint: str | None = None
        # Hinted at since the last welcome: two controllers that name each other are not dialled for ever.
        self._told: set[str] = set()
        self._stream: _ControlStream | None = None
        self._ended = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._pause_seconds = 0.0
        self._duplicates = 0
        self._failure: Exception | None = None
        self.counters: Counter[str] = Counter()

    @property
    def address(self) -> str | None:
        """Of the controller at the other end, while there is one."""
        return None if self._stream is None else self._stream.address

    def send(self, report: Report) -> None:
        """Queue a report on the open stream; without one it is dropped, and the core will say it again."""
        if self._stream is None:
            self.counters["unsent"] += 1
            return
        replaces = _is_beat if isinstance(report, Beat) else None
        if not self._stream.send(report_to_proto(report), replaces):
            self.counters["unsent"] += 1

    def redial(self) -> None:
        """Dial another connection; the present one goes on until that stands."""
        if self._stream is not None:
            self._dialer.suspect(self._stream.address)
        self._ended.set()

    def renew(self, credentials: grpc.ChannelCredentials) -> None:
        """With a new certificate make a new connection; the present one goes on until that stands."""
        present = None if self._stream is None else self._stream.channel
        _background(_close_later(self._dialer.renew(credentials, present)))
        self.redial()

    def new_session(self) -> None:
        """Close the present stream at once and begin another."""
        self._drop()

    async def run(self) -> None:
        """Until cancelled. Raises what a handler of an event raised."""
        warming = asyncio.create_task(self._keep_warm(), name="warm connections")
        try:
            while True:
                await self._connect()
                await self._ended.wait()
                self._ended.clear()
                if self._failure is not None:
                    raise self._failure
                if self._stream is None and not self._told_anew():
                    await self._pause()
        finally:
            warming.cancel()
            self._drop()
            _background(self._dialer.close())

    async def _keep_warm(self) -> None:
        while True:
            self._dialer.keep_warm()
            await asyncio.sleep(WARM_SECONDS)

    async def _connect(self) -> None:
        """Until a stream stands that replaces the present one, if any."""
        while True:
            address = self._choose()
            try:
                stream: _ControlStream = await self._dialer.open(address, lambda stub: stub.Control)
            except DialFailed as failure:
                self.counters["dial_failed"] += 1
                self._log.info("controller.unreachable", address=address, why=str(failure))
                await asyncio.sleep(self._backoff.next_seconds())
                continue
            self._drop()
            self._ended.clear()
            self._stream = stream
            self.counters["connected"] += 1
            self._on_event(Connected())
            self._reader = asyncio.create_task(self._read(stream), name=f"control reader {address}")
            return

    def _choose(self) -> str:
        if self._hint is not None:
            address, self._hint = self._hint, None
            return address
        self._next = (self._next + 1) % len(self._addresses)
        return self._addresses[self._next]

    def _told_anew(self) -> bool:
        """Whether a leader was named that has not been tried since the last welcome: it is dialled without a pause."""
        if self._hint is None or self._hint in self._told:
            return False
        self._told.add(self._hint)
        return True

    async def _pause(self) -> None:
        seconds = max(self._backoff.next_seconds(), self._pause_seconds)
        self._pause_seconds = 0.0
        await asyncio.sleep(seconds)

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        _background(stream.close())
        self._on_event(Disconnected())
        self._ended.set()

    async def _read(self, stream: _ControlStream) -> None:
        try:
            async for message in stream.read():
                self._receive(message)
            self._log.info("session.ended", address=stream.address)
        except aio.AioRpcError as error:
            details = why(error)
            self._hint = details.metadata.get(LEADER_KEY) or None
            self._log.info("session.broken", address=stream.address, reason=details.reason, why=details.message)
        except Exception as error:  # noqa: BLE001 - a defect; it ends the process, which is taken up again by the next
            self._failure = error
        if self._stream is stream:
            self._drop()

    def _receive(self, message: ControlDown) -> None:
        try:
            order = order_from_proto(message)
        except BadOrder as problem:
            self.counters["bad_order"] += 1
            self._log.warning("order.malformed", why=str(problem))
            return
        if order is None:
            self.counters["unknown_order"] += 1
            return
        if isinstance(order, Welcome):
            self._backoff.reset()
            self._duplicates = 0
            self._told.clear()
        elif isinstance(order, SessionRefused):
            self._hint = order.leader or None
            self._log.warning("session.refused", reason=order.reason, why=order.message)
            if order.reason is Reason.DUPLICATE_NODE:
                self._pause_seconds = min(DUPLICATE_SECONDS * 2**self._duplicates, DUPLICATE_SECONDS_MAX)
                self._duplicates = min(self._duplicates + 1, 8)
        self._on_event(OrderReceived(epoch_of(message), order))


def _is_beat(message: ControlUp) -> bool:
    return message.WhichOneof("message") == "beat"


async def _close_later(channels: tuple[aio.Channel, ...]) -> None:
    await asyncio.sleep(2 * DIAL_SECONDS)
    for channel in channels:
        with contextlib.suppress(Exception):
            await channel.close()


_closing: set[asyncio.Task[None]] = set()


def _background(closing: Coroutine[object, object, None]) -> None:
    """Close what nobody waits for; the set keeps the task alive until then."""
    try:
        task = asyncio.get_running_loop().create_task(closing)
    except RuntimeError:  # the loop has ended, and its connections with it
        closing.close()
        return
    _closing.add(task)
    task.add_done_callback(_closing.discard)
