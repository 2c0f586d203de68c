"""One controller of several: it follows, leads while it has the leadership, and follows again; always serving.

To its callers it looks like a leader (`Leader`'s methods), which refuses while another leads, and says who.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from controld.core.agent import Hello
from controld.core.commands import Command
from controld.core.ids import NO_EPOCH, Epoch
from controld.core.outcome import Reply
from controld.core.state import State
from controld.health.view import View
from controld.matching.port import PlannerPort
from controld.replica import handover
from controld.replica.clock import SECOND_NS, Clock
from controld.replica.crew import Crew
from controld.replica.election import Timings, Verdict, judge_leading, may_ping
from controld.replica.elector import Place
from controld.replica.errors import NotLeaderError
from controld.replica.following import Following
from controld.replica.hub import WatchHub
from controld.replica.leader import Leader, Term
from controld.replica.observe import UNOBSERVED, Log, LogName, Observer, silent
from controld.replica.peers import HandedOver, HandOver, Peers, Ping
from controld.replica.reading import STALE_READS
from controld.replica.session import NodeSession
from controld.replica.settings import LeaderSettings
from controld.replica.sightings import Sightings
from controld.store.port import (
    EVIDENCE_SECONDS,
    DeposedError,
    Leadership,
    OutcomeUnknownError,
    SharedStore,
    StoreError,
)

RESTART_SECONDS: Final = 0.2
PROOF_CHECK_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class _Leading:
    leader: Leader
    leadership: Leadership


class Replica:
    """`store`, `planner` and `peers` stay their owner's. `on_lead` is called with each leader as it begins,
    `on_loaded` whenever a copy was loaded."""

    def __init__(
        self,
        *,
        place: Place,
        store: SharedStore,
        peers: Peers,
        clock: Clock,
        rng: random.Random,
        planner: PlannerPort,
        settings: LeaderSettings,
        timings: Timings | None = None,
        log: Log = silent,
        observer: Observer = UNOBSERVED,
        on_lead: Callable[[Leader], None] = lambda _: None,
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        self.place = place
        # Set when a part of it broke that it cannot do without.
        self.broken = asyncio.Event()
        self._store = store
        self._peers = peers
        self._clock = clock
        self._rng = rng
        self._planner = planner
        self._settings = settings
        self._timings = timings or Timings()
        self._log = log
        self._observer = observer
        self._on_lead = on_lead
        self._on_loaded = on_loaded
        self._sightings = Sightings()
        self._following: Following | None = None
        self._leading: _Leading | None = None
        self._stopping = False
        self._moved = asyncio.Event()
        self._epoch = NO_EPOCH
        self._successor = ""
        self._listeners: list[str] = []
        self._blind = View()
        self._work = Crew(self._task_broken)

    async def start(self) -> None:
        """Follow. Returns at once: until its copy is loaded, what it serves is refusals."""
        self._work.start(self._run(), "replica")

    async def stop(self) -> None:
        """Hand a leadership over, or resign it; then end everything."""
        self._stopping = True
        self._move()
        leading = self._leading
        if leading is not None and not leading.leader.lost.is_set() and not await self.hand_over():
            await handover.resign(leading.leader, leading.leadership, store=self._store, log=self._log)
        await self._work.end()
        if self._following is not None:
            self._following.close(self.refusal())

    async def _run(self) -> None:
        while True:
            self._following = Following(
                place=self.place,
                store=self._store,
                peers=self._peers,
                clock=self._clock,
                settings=self._settings,
                sightings=self._sightings,
                timings=self._timings,
                log=self._log,
                on_loaded=self._on_loaded,
                on_news=self._move,
            )
            term = await self._following.run()
            if term is None:
                await asyncio.sleep(RESTART_SECONDS)
            else:
                await self._lead(term)

    async def _lead(self, term: Term) -> None:
        """Until the leadership is lost."""
        leader = Leader(
            store=self._store,
            clock=self._clock,
            rng=self._rng,
            planner=self._planner,
            settings=self._settings,
            identity=self.place.identity,
            log=self._log,
            observer=self._observer,
            sightings=self._sightings,
        )
        try:
            await leader.start(term)
        except StoreError as error:
            self._log(LogName.LEADER_LOST, reason=error.reason, error=str(error))
            return
        self._leading, self._following = _Leading(leader, term.leadership), None
        self._epoch, self._successor = leader.epoch, ""
        self._move()
        watching = asyncio.ensure_future(self._watch_proof(leader))
        try:
            self._on_lead(leader)
            await leader.lost.wait()
        finally:
            self._leading = None
            self._move()
            watching.cancel()
            await leader.stop()

    async def _watch_proof(self, leader: Leader) -> None:
        """A leader that can prove nothing for as long as the store waits for evidence is none. Looked at twice, since
        after a stall of the whole process the next barrier has not come round yet."""
        late = 0
        while late < 2:
            await asyncio.sleep(PROOF_CHECK_SECONDS)
            age_ns = self._clock.boottime_ns() - leader.proved_ns
            late = late + 1 if age_ns > EVIDENCE_SECONDS * SECOND_NS else 0
        leader.step_down(OutcomeUnknownError(f"no proof of leadership for {EVIDENCE_SECONDS:g} s"))

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    def _task_broken(self, name: str, error: BaseException, vital: bool) -> None:
        self._log(LogName.TASK_BROKEN, task=name, error=repr(error))
        if vital:
            self.broken.set()

    # -- what its peers hear of it

    async def hand_over(self, to: Sequence[str] = ()) -> str:
        """Give the leadership to one of `to` (any, where empty) and return its address; empty: nobody took it, and it
        leads on. Raises NotLeaderError where this replica does not lead."""
        leading = self._leading
        if leading is None:
            raise self.refusal()
        # Who listens has a copy, and can be reached.
        willing = to or sorted(self.place.others, key=lambda address: address not in self._listeners)
        leader, leadership = leading.leader, leading.leadership
        successor = await handover.hand_over(
            leader, leadership, willing, peers=self._peers, settings=self._settings, log=self._log
        )
        self._successor = successor
        return successor

    async def take(self, request: HandOver) -> HandedOver:
        """A leader asks to be replaced. Answered once this replica leads, or why it does not."""
        following = self._following
        if following is None:
            return HandedOver(None, "this replica does not follow")
        why = await following.take(request)
        if why:
            return HandedOver(None, why)
        try:
            async with asyncio.timeout(self._settings.hand_over_seconds):
                while (leading := self._leading) is None:
                    await self._moved.wait()
        except TimeoutError:
            return HandedOver(None, "the store did not let it take over in time")
        finally:
            following.elector.invite(None)  # by then the leader has gone on, or asks another
        return HandedOver(leading.leadership.epoch)

    def judge(self, token: int) -> Verdict:
        """Whether the leader of `token` is gone, as far as this replica knows."""
        leading, now_ns = self._leading, self._clock.boottime_ns()
        if leading is not None:
            own, proved_ns = leading.leadership.token, leading.leader.shown_ns
            return judge_leading(now_ns, own, proved_ns, token, self._timings)
        return Verdict.BLIND if self._following is None else self._following.elector.judge(token)

    async def pings(self, listener: str) -> AsyncGenerator[Ping]:
        """While it leads, and can prove it. They come from the loop that leads, to all listeners at once, so that
        silence begins for all of them at once. Raises NotLeaderError."""
        leading = self._leading
        interval_seconds = self._timings.ping_interval_ns / SECOND_NS
        loop = asyncio.get_running_loop()
        self._listeners.append(listener)
        try:
            while leading is not None and self._leading is leading and not leading.leader.lost.is_set():
                now_ns, proved_ns = self._clock.boottime_ns(), leading.leader.shown_ns
                if may_ping(now_ns, proved_ns, self._timings):
                    yield Ping(leading.leadership.epoch, now_ns - proved_ns, leading.leader.state.revision)
                # To the next multiple of the interval, also when this one came a little early.
                ticks = round(loop.time() / interval_seconds) + 1
                await asyncio.sleep(ticks * interval_seconds - loop.time())
        finally:
            self._listeners.remove(listener)
        raise self.refusal()

    # -- a leader, to its callers

    @property
    def leads(self) -> bool:
        return self._leading is not None

    @property
    def loaded(self) -> bool:
        """Whether it has a copy of the state."""
        return self._state() is not None

    @property
    def leader_address(self) -> str:
        """Of whoever leads, as far as this replica knows; empty where nobody does, or none can tell."""
        if self._leading is not None:
            return self.place.address
        incumbent = None if self._following is None else self._following.standby.incumbent
        address = self._successor if incumbent is None else incumbent.address
        return "" if address == self.place.address else address

    @property
    def leadership(self) -> Leadership | None:
        """Of whoever leads, as far as this replica knows."""
        if self._leading is not None:
            return self._leading.leadership
        incumbent = None if self._following is None else self._following.standby.incumbent
        return None if incumbent is None else incumbent.leadership

    @property
    def unheard(self) -> tuple[str, ...]:
        """Of a leader: the others that do not listen to it, so that none of them would take its place at once."""
        return tuple(address for address in self.place.others if address not in self._listeners)

    def refusal(self) -> NotLeaderError:
        """For whoever asked this replica for what only a leader may answer."""
        leader = self.leader_address
        return NotLeaderError(f"{self.place.identity} follows", "" if leader == self.place.address else leader)

    async def submit(self, command: Command) -> Reply:
        """As `Leader.submit`; NotLeaderError is a DeposedError."""
        leader = await self._leader()
        try:
            return await leader.submit(command)
        except DeposedError as error:
            raise self._named(error) from error

    async def barrier(self) -> None:
        """As `Leader.barrier`. A call that is content with a stale read passes wherever there is a copy."""
        if STALE_READS.get() and self._state() is not None:
            return
        leader = await self._leader()
        try:
            await leader.barrier()
        except DeposedError as error:
            raise self._named(error) from error

    async def open_session(self, hello: Hello) -> NodeSession:
        leader = await self._leader()
        try:
            return await leader.open_session(hello)
        except DeposedError as error:
            raise self._named(error) from error

    @property
    def state(self) -> State:
        """The committed state, as this replica has it. Read only. Raises NotLeaderError while it has none."""
        state = self._state()
        if state is None:
            raise self.refusal()
        return state

    @property
    def view(self) -> View:
        """Of a follower empty: agents talk to the leader alone."""
        return self._blind if self._leading is None else self._leading.leader.view

    @property
    def hub(self) -> WatchHub:
        following = None if self._following is None else self._following.standby.hub
        hub = following if self._leading is None else self._leading.leader.hub
        if hub is None:
            raise self.refusal()
        return hub

    @property
    def epoch(self) -> Epoch:
        """Of its present leadership, else of its last."""
        return self._epoch

    async def _leader(self) -> Leader:
        """The leader that this replica is. While it is not clear who leads, the call waits for that: it is then served
        or sent on, when a refusal would have it tried again and again. Raises NotLeaderError."""
        if self._leading is None and self._in_doubt():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.doubt_seconds):
                    while self._leading is None and self._in_doubt():
                        await self._moved.wait()
        if self._leading is None:
            raise self.refusal()
        return self._leading.leader

    def _in_doubt(self) -> bool:
        if self._stopping:
            return False
        following = self._following
        if following is None or following.standby.state is None:
            return not self._successor
        return following.elector.in_doubt()

    def _state(self) -> State | None:
        if self._leading is not None:
            return self._leading.leader.state
        return None if self._following is None else self._following.standby.state

    def _named(self, error: DeposedError) -> NotLeaderError:
        """What a leader that has just lost answers: who leads, where that is known already."""
        return error if isinstance(error, NotLeaderError) else self.refusal()
