"""One spell of following: a warm copy and an election, until this replica has won."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from controld.health.view import View
from controld.replica.clock import Clock
from controld.replica.crew import Crew
from controld.replica.election import Timings
from controld.replica.elector import Elector, Place, Won
from controld.replica.leader import Term, load_term
from controld.replica.observe import Log, LogName
from controld.replica.peers import HandOver, Peers
from controld.replica.settings import LeaderSettings
from controld.replica.sightings import Sightings
from controld.replica.standby import Standby
from controld.store.port import SharedStore, StoreError


class Following:
    def __init__(
        self,
        *,
        place: Place,
        store: SharedStore,
        peers: Peers,
        clock: Clock,
        settings: LeaderSettings,
        sightings: Sightings,
        timings: Timings,
        log: Log,
        on_loaded: Callable[[], None],
        on_news: Callable[[], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._sightings = sightings
        self._log = log
        self._broke: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.elector = Elector(
            place=place,
            store=store,
            peers=peers,
            clock=clock,
            timings=timings,
            log=log,
            sees=lambda: self.standby.sees,
            unused=lambda: self.standby.state is not None and self.standby.state.cluster is None,
            on_news=on_news,
        )
        self.standby = Standby(
            store=store,
            clock=clock,
            settings=settings,
            sightings=sightings,
            log=log,
            on_leader=self.elector.see,
            on_sees=self.elector.wake,
            on_loaded=on_loaded,
        )

    async def run(self) -> Term | None:
        """Until it has won; None when a part of it broke, or the store failed after the takeover."""
        crew = Crew(self._task_broken)
        try:
            crew.start(self.standby.run(), "standby")
            self.elector.start(crew)
            await asyncio.wait((self.elector.won, self._broke), return_when=asyncio.FIRST_COMPLETED)
            return await self._term(self.elector.won.result()) if self.elector.won.done() else None
        except StoreError as error:
            self._log(LogName.TAKEOVER_FAILED, token=0, reason=error.reason, error=str(error))
            return None
        finally:
            await crew.end()

    def close(self, error: Exception) -> None:
        """End every watch of the copy."""
        if self.standby.hub is not None:
            self.standby.hub.close(error)

    def _task_broken(self, name: str, error: BaseException, vital: bool) -> None:
        self._log(LogName.TASK_BROKEN, task=name, error=repr(error))
        if vital and not self._broke.done():
            self._broke.set_result(None)

    async def _term(self, won: Won) -> Term:
        """What the leadership begins with: the copy, once it has seen this very takeover. Raises StoreError."""
        epoch = won.leadership.epoch
        view = View(started_ns=self._clock.boottime_ns())
        try:
            async with asyncio.timeout(self._settings.reach_seconds):
                state = await self.standby.reached(epoch.revision)
        except TimeoutError:
            state = None
        if state is None or self.standby.hub is None or state.history != epoch.history:
            self._log(LogName.STANDBY_DROPPED, error="the copy did not reach the takeover; loading")
            term = await load_term(self._store, won.leadership, self._clock, self._settings, won.began_ns)
            self._sightings.loaded(term.state, self._clock.boottime_ns())
            term.view.sighted = self._sightings.all()
            return term
        view.sighted = self._sightings.all()
        return Term(won.leadership, state, view, self.standby.hub, won.began_ns)

    async def take(self, request: HandOver) -> str:
        """The leader asks to be replaced: get up to its revision and take over. Why not, if it cannot be."""
        incumbent = self.standby.incumbent
        if incumbent is None or incumbent.leadership.token != request.token:
            return "this replica does not follow that leader"
        try:
            async with asyncio.timeout(self._settings.hand_over_seconds):
                await self.standby.reached(request.revision)
        except TimeoutError:
            return f"its copy has not reached revision {request.revision}"
        self.elector.invite(request.token)
        return ""
