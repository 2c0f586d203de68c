"""The shell around the election: listens to the leader, asks the peers, and takes over when `decide` says so.

For one spell of following: it ends with a leadership won.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from controld.replica.clock import SECOND_NS, Clock
from controld.replica.crew import Crew
from controld.replica.election import (
    DENIALS,
    Ask,
    Knowledge,
    TakeOver,
    Timings,
    Verdict,
    Wait,
    Why,
    counts,
    decide,
    in_doubt,
    judge,
)
from controld.replica.observe import Log, LogName
from controld.replica.peers import PeerLostError, Peers, Ping
from controld.store.port import Incumbent, Leadership, SharedStore, StoreError

PULSE_SECONDS: Final = 0.05
REDIAL_SECONDS: Final = 0.05
WAIT_SECONDS_MIN: Final = 0.001


@dataclass(frozen=True, slots=True)
class Place:
    """Who this replica is among the others. Addresses are HOST:PORT; `others` leaves out its own."""

    identity: str
    address: str
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Won:
    """`began_ns`: when the takeover was asked for, so the leadership was in force at some moment after it."""

    leadership: Leadership
    began_ns: int


class Elector:
    """`sees` tells whether the copy goes along with the store, and `unused` whether nobody ever led in it; `on_news` is
    called when who leads, or whether it is heard, has changed. `won` is set once."""

    def __init__(
        self,
        *,
        place: Place,
        store: SharedStore,
        peers: Peers,
        clock: Clock,
        timings: Timings,
        log: Log,
        sees: Callable[[], bool],
        unused: Callable[[], bool],
        on_news: Callable[[], None],
    ) -> None:
        self._place = place
        self._store = store
        self._peers = peers
        self._clock = clock
        self._timings = timings
        self._log = log
        self._sees = sees
        self._unused = unused
        self._on_news = on_news
        self._cut = False
        self._incumbent: Incumbent | None = None
        now_ns = clock.boottime_ns()
        self._seen_ns = now_ns
        self._listening_ns = now_ns
        self._pulse_ns = now_ns
        self._heard_ns: int | None = None
        self._answers: dict[str, tuple[Verdict, int]] = {}
        self._asking: set[str] = set()
        self._asked_ns: int | None = None
        self._invited: int | None = None
        self._held_back_ns = 0
        self._told: Why | None = None
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self.won: asyncio.Future[Won] = asyncio.get_running_loop().create_future()

    # -- what comes in

    def see(self, incumbent: Incumbent | None) -> None:
        """The store shows who leads, or whether it is alive."""
        former, self._incumbent = self._incumbent, incumbent
        if _token(former) != _token(incumbent):
            self._seen_ns = self._clock.boottime_ns()
            self._heard_ns, self._asked_ns, self._told, self._cut = None, None, None, False
            self._answers.clear()
            leader = "" if incumbent is None else incumbent.leadership.identity
            self._log(LogName.LEADER_SEEN, leader=leader, token=_token(incumbent))
            self._changed.set()
        self.wake()
        self._on_news()

    def wake(self) -> None:
        """Something of what is decided on may have changed."""
        self._wake.set()

    def invite(self, token: int | None) -> None:
        """The leader of `token` asks this replica to take its place; None: not any more."""
        self._invited = token
        self.wake()

    def judge(self, token: int) -> Verdict:
        """The answer to a peer that would replace the leader of `token`."""
        now_ns = self._clock.boottime_ns()
        self._notice_stall(now_ns)
        return judge(now_ns, self._known(), token, self._timings)

    def heard(self, ping: Ping) -> None:
        if counts(ping.epoch, self._incumbent):
            self._heard_ns = self._clock.boottime_ns()
            self._told = None
            if self._cut:
                self._cut = False
                self._on_news()

    def in_doubt(self) -> bool:
        """Whether another may lead any moment."""
        return in_doubt(self._clock.boottime_ns(), self._known(), self._timings)

    # -- the work

    def start(self, crew: Crew) -> None:
        crew.start(self._elect(crew), "election")
        crew.start(self._listen(), "pings")
        crew.start(self._pulse(), "election pulse")

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            self._notice_stall(self._clock.boottime_ns())

    def _notice_stall(self, now_ns: int) -> None:
        """Whoever asks first after a stall: pings may wait unread, so silence begins anew."""
        if now_ns - self._pulse_ns > PULSE_SECONDS * SECOND_NS + self._timings.stall_ns:
            self._listening_ns = now_ns
        self._pulse_ns = now_ns

    async def _elect(self, crew: Crew) -> None:
        while not self.won.done():
            now_ns = self._clock.boottime_ns()
            self._notice_stall(now_ns)
            self._wake.clear()
            action = decide(now_ns, self._known(), self._timings)
            match action:
                case Wait(_, until_ns):
                    seconds = None if until_ns is None else (until_ns - now_ns) / SECOND_NS
                    await self._sleep(seconds if seconds is None else max(seconds, WAIT_SECONDS_MIN))
                case Ask(token, why):
                    self._tell_silence(why)
                    self._asked_ns = now_ns
                    self._ask_all(token, crew)
                case TakeOver(token, why):
                    await self._take_over(token, why)

    async def _sleep(self, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        timer = None if seconds is None else loop.call_later(seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _known(self) -> Knowledge:
        return Knowledge(
            identity=self._place.identity,
            address=self._place.address,
            sees=self._sees(),
            incumbent=self._incumbent,
            seen_ns=self._seen_ns,
            listening_ns=self._listening_ns,
            heard_ns=self._heard_ns,
            answers=self._answers,
            asked_ns=self._asked_ns,
            invited=self._invited,
            held_back_ns=self._held_back_ns,
            cut=self._cut,
            unused=self._unused(),
        )

    def _ask_all(self, token: int, crew: Crew) -> None:
        """Whom an earlier question has not come back from is not asked again before."""
        for address in self._place.others:
            if address not in self._asking:
                self._asking.add(address)
                crew.start(self._ask(address, token), f"ask {address}", vital=False)

    async def _ask(self, address: str, token: int) -> None:
        try:
            async with asyncio.timeout(self._timings.takeover_ns / SECOND_NS):
                verdict = await self._peers.ask(address, token)
        except (PeerLostError, TimeoutError):
            return
        finally:
            self._asking.discard(address)
        if token == _token(self._incumbent):
            self._answers[address] = (verdict, self._clock.boottime_ns())
            self.wake()

    async def _take_over(self, token: int, why: Why) -> None:
        began_ns = self._clock.boottime_ns()
        self._log(LogName.TAKEOVER_BEGAN, token=token, why=why.value)
        try:
            leadership = await self._store.take_over(self._place.identity, self._place.address, token)
        except StoreError as error:
            # Another was quicker, or the store did not answer: what it shows next decides.
            self._log(LogName.TAKEOVER_FAILED, token=token, reason=error.reason, error=str(error))
            self._held_back_ns = self._clock.boottime_ns() + self._timings.hold_back_ns
            return
        if not self.won.done():
            self.won.set_result(Won(leadership, began_ns))

    def _tell_silence(self, why: Why) -> None:
        """Once each time the reason changes. That a new cluster begins is said by its leader."""
        if why is self._told or why is Why.VACANT:
            return
        self._told = why
        if why is Why.OTHER_STORE:
            knowing = ", ".join(
                sorted(address for address, (verdict, _) in self._answers.items() if verdict in DENIALS)
            )
            self._log(LogName.STORE_DOUBTED, peers=knowing)
        else:
            self._log(LogName.LEADER_SILENT, token=_token(self._incumbent), why=why.value)

    async def _listen(self) -> None:
        """One stream of pings, to whoever leads; another leader ends it at once."""
        while True:
            self._changed.clear()
            incumbent = self._incumbent
            if incumbent is None or incumbent.address == self._place.address:
                await self._changed.wait()
                continue
            hearing = asyncio.ensure_future(self._hear(incumbent.address))
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait((hearing, changed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                hearing.cancel()
                changed.cancel()
                await asyncio.wait((hearing, changed))
            if not hearing.cancelled() and (error := hearing.exception()) is not None:
                raise error
            if not self._changed.is_set():
                await asyncio.sleep(REDIAL_SECONDS)

    async def _hear(self, address: str) -> None:
        """Until the stream ends, or brings nothing for so long that another connection may do better."""
        patience_seconds = 2 * self._timings.takeover_ns / SECOND_NS
        try:
            async with aclosing(self._peers.pings(address)) as pings:
                while True:
                    async with asyncio.timeout(patience_seconds):
                        self.heard(await anext(pings))
        except (PeerLostError, TimeoutError, StopAsyncIteration):
            self._cut = True


def _token(incumbent: Incumbent | None) -> int:
    return 0 if incumbent is None else incumbent.leadership.token
