"""The control loop: looks at the committed state and the view, and asks for what is missing.

It runs once a second and soon after anything happened. What it wants goes through the same queue as every
other command; what it orders goes out after a barrier; what waits for a place goes to planning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from controld.core.agent import OrderTo
from controld.core.commands import Command, ExpireLeases, MarkExpired, MarkSuspect, Now, Prune, ReleaseMember
from controld.core.ids import Incarnation, JobId
from controld.core.outcome import Outcome, Refused, Reply
from controld.core.state import State
from controld.core.transitions import decide
from controld.core.transitions.prune import events_overdue
from controld.matching.port import Pending
from controld.reconcile.decisions import Decisions, Pass
from controld.reconcile.tick import parts
from controld.replica.agents import Agents
from controld.replica.clock import SECOND_NS, now
from controld.replica.errors import OverloadedError, RefusedError
from controld.replica.flight import Flight, FlightKey, flight_key
from controld.replica.observe import LogName
from controld.replica.office import Office
from controld.replica.stall import StallWatch
from controld.replica.writer import Source
from controld.store.port import StoreError
from virialpb.reasons import Reason

SLICE_NS: Final = 5_000_000


class Ticker:
    def __init__(
        self,
        office: Office,
        *,
        agents: Agents,
        stall: StallWatch,
        wake: asyncio.Event,
        want: Callable[[tuple[Pending, ...]], None],
    ) -> None:
        self._office = office
        self._agents = agents
        self._stall = stall
        self._wake = wake
        self._want = want
        self._flight = Flight(int(office.settings.tick_interval_seconds * SECOND_NS))
        self._next_prune_ns = 0
        self._look_again_ns: int | None = None
        # When members of a large generation were last released.
        self._released_ns: dict[tuple[JobId, int], int] = {}

    async def run(self) -> None:
        settings = self._office.settings
        loop = asyncio.get_running_loop()
        while True:
            timer = loop.call_later(self._wait_seconds(), self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            self._wake.clear()
            spent_seconds = await self._tick()
            # What happens meanwhile shares the next tick; a slow tick leaves half of the loop to everyone else.
            await asyncio.sleep(max(settings.tick_gap_seconds, spent_seconds))

    def _wait_seconds(self) -> float:
        """Until the next regular tick, or until a silence is next due to be judged."""
        interval_seconds = self._office.settings.tick_interval_seconds
        if self._look_again_ns is None:
            return interval_seconds
        left_seconds = (self._look_again_ns - self._office.clock.boottime_ns()) / SECOND_NS
        return min(max(left_seconds, 0.0), interval_seconds)

    async def _tick(self) -> float:
        """One pass, in pieces between which everyone else has a turn. The seconds that it took itself."""
        office = self._office
        self._stall.check()
        self._look_again_ns = None
        pending: list[Pending] = []
        spent_ns, last_ns = 0, office.clock.boottime_ns()
        try:
            for part in parts(office.state, office.view):
                at = now(office.clock)
                p = Pass(office.state, office.view, at, office.epoch, office.settings.limits)
                part(p)
                self._act(p.decisions(), at)
                pending += p.pending
                now_ns = office.clock.boottime_ns()
                if now_ns - last_ns > SLICE_NS:
                    spent_ns += now_ns - last_ns
                    await asyncio.sleep(0)
                    last_ns = office.clock.boottime_ns()
        except Exception as error:  # noqa: BLE001 - a broken rule must not end the leadership, and the next tick sees more
            office.log(LogName.TICK_BROKEN, error=repr(error))
            return office.settings.tick_interval_seconds
        self._prune(now(office.clock))
        self._want(tuple(pending))
        spent_seconds = (spent_ns + office.clock.boottime_ns() - last_ns) / SECOND_NS
        office.observer.ticked(spent_seconds)
        return spent_seconds

    def _act(self, decisions: Decisions, at: Now) -> None:
        office = self._office
        if decisions.look_again_ns is not None:
            self._look_again_ns = decisions.look_again_ns
        for job, error in decisions.broken:
            office.log(LogName.TICK_BROKEN, job=job, error=error)
        for command in decisions.commands:
            self._submit(command, at)
        if decisions.newer_seen:
            self._agents.doubt("an agent holds a token of a later commit")
        if decisions.orders:
            office.crew.start(self._deliver(decisions.orders), "orders")

    async def _deliver(self, orders: tuple[OrderTo, ...]) -> None:
        """A deposed leader would stop what its successor has started, so orders wait for a barrier."""
        try:
            await self._office.barrier.wait()
        except StoreError:
            return  # given again by a later tick, of whoever leads then
        self._agents.deliver(orders)

    def _prune(self, at: Now) -> None:
        settings = self._office.settings
        overdue = events_overdue(self._office.state, settings.events_max)
        if at.boottime_ns < self._next_prune_ns and not overdue:
            return
        self._next_prune_ns = at.boottime_ns + int(settings.prune_interval_seconds * SECOND_NS)
        before_unix_ns = at.unix_ns - settings.request_keep_seconds * SECOND_NS
        self._submit(Prune(before_unix_ns, settings.events_max, settings.ended_jobs_max), at)

    def _submit(self, command: Command, at: Now) -> None:
        """Queue a command of the loop's own, unless the like of it is under way or was refused a moment ago."""
        key = flight_key(command)
        if isinstance(command, ReleaseMember) and not self._paced(command, at):
            return
        if not self._flight.take_off(key, at.boottime_ns):
            return
        match command:
            case MarkExpired() | ExpireLeases():
                # Judged by what is heard from this moment on: the task starts later, when more may have come in.
                work = self._expire(command, key, self._unheard(command.incarnation))
                self._office.crew.start(work, f"expiry {command.incarnation.node_uid}")
            case MarkSuspect():
                self._queue(command, key, self._unheard(command.incarnation))
            case _:
                self._queue(command, key, _always)

    def _paced(self, command: ReleaseMember, at: Now) -> bool:
        """Whether a member of a generation may be released now: those of a large one together, every now and then."""
        settings = self._office.settings
        generation = self._office.state.generations.get(command.job, {}).get(command.generation)
        if generation is None or len(generation.members) < settings.gather_ranks_min:
            return True
        gather_ns = int(settings.gather_seconds * SECOND_NS)
        key = (command.job, command.generation)
        last_ns = self._released_ns.get(key)
        if last_ns is None or at.boottime_ns >= last_ns + gather_ns:
            # Bounded by the large generations that had a release within one such time.
            recent = {k: ns for k, ns in self._released_ns.items() if at.boottime_ns < ns + gather_ns}
            self._released_ns = recent | {key: at.boottime_ns}
        elif last_ns != at.boottime_ns:  # not of the same piece of the same pass
            self._look_again_ns = min(self._look_again_ns or last_ns + gather_ns, last_ns + gather_ns)
            return False
        return True

    async def _expire(self, command: MarkExpired | ExpireLeases, key: FlightKey, unheard: Callable[[], bool]) -> None:
        """Expire only what this leader, proven to be it, has not heard since it made up its mind."""
        try:
            await self._office.barrier.wait()
        except StoreError:
            self._flight.land(key, self._office.clock.boottime_ns(), carried_out=False)
            return
        self._agents.expiry_began(command.incarnation)
        future = self._queue(command, key, unheard)
        if future is None:
            self._agents.expiry_ended(command.incarnation)
        else:
            future.add_done_callback(lambda _: self._agents.expiry_ended(command.incarnation))

    def _unheard(self, incarnation: Incarnation) -> Callable[[], bool]:
        """Whether nothing has come from this life of the node since now (nor were the sessions timed anew)."""
        sessions = self._office.view.sessions
        view = self._office.view

        def heard() -> tuple[int, int | None]:
            seen = sessions.get(incarnation.node_uid)
            same = seen is not None and seen.incarnation == incarnation
            return view.started_ns, seen.last_receipt_ns if same and seen is not None else None

        before = heard()
        return lambda: heard() == before

    def _queue(self, command: Command, key: FlightKey, still: Callable[[], bool]) -> asyncio.Future[Reply] | None:
        """`still` is asked again at the moment of the decision."""
        office = self._office

        def decision(state: State, at: Now) -> Outcome:
            if not still():
                return Refused(Reason.STALE, detail="heard meanwhile")
            return decide(state, command, at)

        try:
            future = office.writer.offer_decision(type(command).__name__, decision, Source.LEADER)
        except (OverloadedError, StoreError):
            self._flight.land(key, office.clock.boottime_ns(), carried_out=False)
            return None
        future.add_done_callback(partial(self._landed, type(command).__name__, key))
        return future

    def _landed(self, name: str, key: FlightKey, future: asyncio.Future[Reply]) -> None:
        error = None if future.cancelled() else future.exception()
        self._flight.land(key, self._office.clock.boottime_ns(), carried_out=error is None)
        if isinstance(error, RefusedError):
            refused = error.refused
            self._office.log(
                LogName.COMMAND_REFUSED,
                command=name,
                reason=refused.reason,
                subject=refused.subject,
                detail=refused.detail,
            )


def _always() -> bool:
    return True
