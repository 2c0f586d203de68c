"""One leadership, from campaign to loss: the single writer, the control loop, planning, agents and watchers.

A Leader leads once. When it loses (`lost`), whatever it had decided and not committed is gone with it; whoever
started it makes a new one, which loads what is committed.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from controld.core.agent import Hello
from controld.core.commands import Command, Now
from controld.core.ids import Epoch
from controld.core.model import Cluster
from controld.core.outcome import Outcome, Reply, Transition
from controld.core.state import Change, State
from controld.health.view import View
from controld.matching.port import PlannerPort
from controld.replica.agents import Agents
from controld.replica.barrier import Barrier
from controld.replica.clock import Clock
from controld.replica.compaction import Compaction
from controld.replica.crew import Crew
from controld.replica.errors import NotLeaderError, SessionClosedError
from controld.replica.hub import WatchHub
from controld.replica.observe import UNOBSERVED, Log, LogName, Observer, silent
from controld.replica.office import Office
from controld.replica.planning import Planning
from controld.replica.session import NodeSession
from controld.replica.settings import LeaderSettings
from controld.replica.sightings import Sightings
from controld.replica.stall import StallWatch
from controld.replica.states import restore
from controld.replica.ticker import Ticker
from controld.replica.writer import Committed, Source, Writer
from controld.store.port import DeposedError, Leadership, OutcomeUnknownError, Store, StoreError
from virialpb.reasons import Reason

CLUSTER_UID_BITS = 128
NEVER_NS = -(1 << 62)
COMMITS_SUFFICE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Term:
    """A leadership that was won already, and what the winner knows: all that is committed, what it saw happen before,
    and the recent commits that watches resume in. `proved_ns`: when it began to campaign."""

    leadership: Leadership
    state: State
    view: View
    hub: WatchHub
    proved_ns: int


class Leader:
    """`store` is open and stays its owner's, as `planner` does. `rng` gives the cluster's uid, once. `sightings` of one
    of several are kept up while it leads."""

    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        rng: random.Random,
        planner: PlannerPort,
        settings: LeaderSettings,
        identity: str,
        log: Log = silent,
        observer: Observer = UNOBSERVED,
        sightings: Sightings | None = None,
    ) -> None:
        self.lost = asyncio.Event()
        self._store = store
        self._clock = clock
        self._rng = rng
        self._planner = planner
        self._settings = settings
        self._identity = identity
        self._log = log
        self._observer = observer
        self._sightings = sightings
        self._crew = Crew(self._broken)
        self._wake = asyncio.Event()
        self._office: Office | None = None
        self._agents: Agents | None = None
        self._hub: WatchHub | None = None
        self._writing: asyncio.Task[None] | None = None
        self._over = False
        self._commit_ns = NEVER_NS

    async def start(self, term: Term | None = None) -> None:
        """Lead: the given term, or campaign and load. Raises StoreError; then nothing runs."""
        try:
            await self._start(await self._campaign() if term is None else term)
        except BaseException:
            await self.stop()
            raise

    async def _campaign(self) -> Term:
        proved_ns = self._clock.boottime_ns()
        leadership = await self._store.campaign(self._identity)
        return await load_term(self._store, leadership, self._clock, self._settings, proved_ns)

    async def _start(self, term: Term) -> None:
        leadership, committed, view = term.leadership, term.state, term.view
        writer = Writer(
            store=self._store,
            leadership=leadership,
            committed=committed,
            clock=self._clock,
            settings=self._settings,
            observer=self._observer,
            log=self._log,
            on_commit=self._committed,
            on_lost=self._lose,
        )
        barrier = Barrier(
            store=self._store,
            leadership=leadership,
            clock=self._clock,
            proved_ns=term.proved_ns,
            settings=self._settings,
            log=self._log,
            on_lost=self._lose,
        )
        office = Office(
            clock=self._clock,
            settings=self._settings,
            log=self._log,
            observer=self._observer,
            view=view,
            epoch=leadership.epoch,
            writer=writer,
            barrier=barrier,
            crew=self._crew,
            wake=self._wake.set,
            lose=self._lose,
        )
        self._office = office
        self._hub = term.hub
        self._agents = Agents(office)
        barrier.attend(self._agents)
        self._writing = self._crew.start(writer.run(), "writer")
        if committed.cluster is None:
            await writer.offer_decision("CreateCluster", self._create_cluster, Source.LEADER)
        self._start_loops(office, self._agents)
        self._log(LogName.LEADER_STARTED, epoch=str(leadership.epoch), revision=committed.revision)

    def _start_loops(self, office: Office, agents: Agents) -> None:
        stall = StallWatch(
            clock=self._clock,
            settings=self._settings,
            view=office.view,
            state=lambda: office.state,
            observer=self._observer,
            log=self._log,
        )
        planning = Planning(office, self._planner)
        ticker = Ticker(office, agents=agents, stall=stall, wake=self._wake, want=planning.want)
        self._crew.start(office.barrier.run(), "barrier")
        self._crew.start(stall.run(), "stall")
        self._crew.start(planning.run(), "planning")
        self._crew.start(ticker.run(), "tick")
        self._crew.start(Compaction(office, self._store).run(), "compaction")
        self._wake.set()

    def _create_cluster(self, state: State, now: Now) -> Outcome:
        del now
        if state.cluster is not None:
            return Transition()
        uid = f"{self._rng.getrandbits(CLUSTER_UID_BITS):032x}"
        return Transition((Change.put(Cluster(uid)),))

    async def stop(self) -> None:
        """Finish the commit under way, answer what waits with "not leader", end every session and watch."""
        self._finish(DeposedError("the controller is stopping"))
        if self._writing is not None and not self._writing.done():
            await asyncio.wait((self._writing,), timeout=self._settings.stop_timeout_seconds)
        await self._crew.end()
        self._log(LogName.LEADER_STOPPED)

    async def hold(self) -> int:
        """Decide nothing until `release`; what comes waits. The revision of the last commit, once none is under way."""
        office = self._working()
        await office.writer.hold()
        return office.state.revision

    def release(self) -> None:
        """Decide again."""
        self._led().writer.release()

    def step_down(self, error: StoreError) -> None:
        """Lead no more; whoever waits is told `error`. `stop` is still to be called."""
        self._lose(error)

    async def submit(self, command: Command) -> Reply:
        """Decide a command and return once its outcome is durable.

        Raises RefusedError, DeposedError, OutcomeUnknownError, StorageFullError, OverloadedError.
        """
        return await self._working().writer.offer(command, Source.USER)

    async def barrier(self) -> None:
        """Return after a proof of leadership that started after this call. Raises StoreError."""
        await self._working().barrier.wait()

    async def open_session(self, hello: Hello) -> NodeSession:
        """Raises SessionRefusedError, OverloadedError, StoreError."""
        self._working()
        assert self._agents is not None
        return await self._agents.open(hello)

    @property
    def state(self) -> State:
        """The committed state. Read only."""
        return self._led().state

    @property
    def view(self) -> View:
        return self._led().view

    @property
    def epoch(self) -> Epoch:
        return self._led().epoch

    @property
    def proved_ns(self) -> int:
        """A BOOTTIME at which this leadership was certainly in force: the newest that is known."""
        return self._led().barrier.proved_ns

    @property
    def shown_ns(self) -> int:
        """The proof that its peers go by. An old one is none where the next will fail too, because its end of the store
        is gone: the sooner another leads then the better. A commit is one as well, for a second without a barrier:
        after an election of etcd a member answers writes sooner than reads."""
        if self._led().barrier.hopeless:
            return NEVER_NS
        return max(self.proved_ns, min(self._commit_ns, self.proved_ns + COMMITS_SUFFICE_NS))

    @property
    def hub(self) -> WatchHub:
        self._led()
        assert self._hub is not None
        return self._hub

    def _led(self) -> Office:
        if self._office is None:
            raise DeposedError("not leading yet")
        return self._office

    def _working(self) -> Office:
        if self._over:
            raise DeposedError("not leading any more")
        return self._led()

    def _committed(self, committed: Committed) -> None:
        assert self._hub is not None
        assert self._agents is not None
        batch = committed.batch
        self._commit_ns = committed.began_ns
        if self._sightings is not None:
            self._sightings.committed(batch.changes, batch.revision, self._clock.boottime_ns())
        self._hub.publish(batch, committed.size_bytes)
        self._agents.committed(batch)
        self._wake.set()

    def _lose(self, error: StoreError) -> None:
        if not self._over:
            self._log(LogName.LEADER_LOST, reason=error.reason, error=str(error))
            told = error if isinstance(error, NotLeaderError) else DeposedError(f"not leading any more: {error}")
            self._finish(told)
            self.lost.set()

    def _finish(self, error: DeposedError) -> None:
        """Decide nothing more. The writer ends by itself: a commit under way still has answers to give."""
        if self._over:
            return
        self._over = True
        if self._office is not None:
            self._office.writer.close(error)
            self._office.barrier.close(error)
        if self._agents is not None:
            leader = error.leader if isinstance(error, NotLeaderError) else ""
            self._agents.end(SessionClosedError(Reason.NOT_LEADER, str(error), leader))
        if self._hub is not None:
            self._hub.close(error)
        self._crew.cancel(keep=self._writing)

    def _broken(self, name: str, error: BaseException, vital: bool) -> None:
        self._log(LogName.TASK_BROKEN, task=name, error=repr(error))
        if vital:
            self._lose(OutcomeUnknownError(f"{name} broke: {error!r}"))


async def load_term(
    store: Store, leadership: Leadership, clock: Clock, settings: LeaderSettings, proved_ns: int
) -> Term:
    """A term that begins with what the store holds. Raises StoreError."""
    state = restore(await store.load())
    hub = WatchHub(
        state.history, state.revision, commits_max=settings.watch_commits_max, bytes_max=settings.watch_bytes_max
    )
    return Term(leadership, state, View(started_ns=clock.boottime_ns()), hub, proved_ns)
