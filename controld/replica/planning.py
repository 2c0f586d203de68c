"""Placements: one question to the planner at a time, its grants committed, its refusals explained.

The next plan is made only when every grant of the last was decided, so no two plans give the same device away. A
job whose grant is refused (the plan saw a snapshot, the head moved on) backs off by itself, so that the best job of
every plan cannot starve the rest by being refused for ever.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from controld.core.commands import Now
from controld.core.ids import JobId
from controld.core.outcome import Reply
from controld.matching.port import (
    Grant,
    NodeView,
    Pending,
    Plan,
    PlannerLostError,
    PlannerPort,
    Snapshot,
    UnfitCount,
    Unplaced,
)
from controld.reconcile.grants import command_for_grant
from controld.replica.clock import SECOND_NS, now
from controld.replica.errors import OverloadedError, RefusedError
from controld.replica.observe import LogName
from controld.replica.office import Office
from controld.replica.snapshots import Snapshots
from controld.replica.writer import Source
from controld.store.port import StoreError
from virialpb.reasons import Unfit


@dataclass(slots=True)
class _BackOff:
    refusals: int
    until_ns: int


class Planning:
    def __init__(self, office: Office, planner: PlannerPort) -> None:
        self._office = office
        self._planner = planner
        self._pending: tuple[Pending, ...] = ()
        self._wake = asyncio.Event()
        self._snapshots = Snapshots()
        self._back_offs: dict[JobId, _BackOff] = {}
        # The last question that gave no grant: equal questions have equal answers.
        self._fruitless: tuple[tuple[NodeView, ...], tuple[Pending, ...]] | None = None

    def want(self, pending: tuple[Pending, ...]) -> None:
        """All gangs that wait, as of the latest tick."""
        self._pending = pending
        if pending:
            self._wake.set()

    async def run(self) -> None:
        await self._warm_up()
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not await self._round():
                # Nothing is lost with the planner: what waits is asked for again, on a new snapshot.
                await asyncio.sleep(self._office.settings.plan_retry_seconds)
                self._wake.set()

    async def _warm_up(self) -> None:
        """A planner that takes a while to start does it before somebody waits for it."""
        try:
            await self._planner.plan(Snapshot(0, ()), ())
        except PlannerLostError as error:
            self._office.log(LogName.PLANNER_LOST, error=str(error), pending=0)

    async def _round(self) -> bool:
        """One question and what follows from its answer. False when the planner was lost."""
        office = self._office
        at = now(office.clock)
        pending = self._ready(at)
        if not pending:
            return True
        question = await self._snapshots.take(office.state, office.view, at)
        if self._fruitless is not None and self._fruitless == (question.nodes, pending):
            return True
        try:
            plan = await self._ask(question, pending)
        except PlannerLostError as error:
            office.log(LogName.PLANNER_LOST, error=str(error), pending=len(pending))
            return False
        self._fruitless = None if plan.grants else (question.nodes, pending)
        for unplaced in plan.unplaced:
            office.view.explain[unplaced.job] = unplaced
        # Queued together: they share one commit.
        granted = [(grant, self._offer(grant, plan)) for grant in plan.grants]
        for grant, future in granted:
            await self._settle(grant, future)
        return True

    async def _ask(self, question: Snapshot, pending: tuple[Pending, ...]) -> Plan:
        office = self._office
        began_ns = office.clock.boottime_ns()
        plan = await self._planner.plan(question, pending)
        seconds = (office.clock.boottime_ns() - began_ns) / SECOND_NS
        office.observer.planned(len(plan.grants), len(plan.unplaced), seconds)
        if plan.grants:
            office.log(LogName.PLAN_MADE, revision=plan.revision, grants=len(plan.grants), unplaced=len(plan.unplaced))
        return plan

    def _ready(self, at: Now) -> tuple[Pending, ...]:
        """What waits and does not back off; of the others, why."""
        for gone in [job for job in self._back_offs if job not in self._office.state.jobs]:
            del self._back_offs[gone]
        ready: list[Pending] = []
        for pending in self._pending:
            back_off = self._back_offs.get(pending.job)
            if back_off is None or back_off.until_ns <= at.boottime_ns:
                ready.append(pending)
            else:
                wait_ms = (back_off.until_ns - at.boottime_ns) // 1_000_000
                numbers = (("refusals", back_off.refusals), ("wait_ms", wait_ms))
                reasons = (UnfitCount(Unfit.BACK_OFF, 0, numbers),)
                self._office.view.explain[pending.job] = Unplaced(pending.job, pending.number, reasons, 0)
        return tuple(ready)

    def _offer(self, grant: Grant, plan: Plan) -> asyncio.Future[Reply] | None:
        cause_id = f"plan.{self._office.epoch}.{plan.revision}"
        try:
            return self._office.writer.offer(command_for_grant(grant, cause_id), Source.LEADER)
        except (OverloadedError, StoreError):
            return None

    async def _settle(self, grant: Grant, future: asyncio.Future[Reply] | None) -> None:
        if future is None:
            return
        try:
            await future
        except RefusedError as error:
            refused = error.refused
            self._back_off(grant.job)
            self._office.log(
                LogName.GRANT_REFUSED,
                job=grant.job,
                generation=grant.number,
                reason=refused.reason,
                subject=refused.subject,
                detail=refused.detail,
            )
        except StoreError:
            return  # the job still waits, and the next tick says so
        else:
            self._back_offs.pop(grant.job, None)

    def _back_off(self, job: JobId) -> None:
        settings = self._office.settings
        known = self._back_offs.get(job)
        refusals = known.refusals + 1 if known is not None else 1
        seconds = min(settings.grant_backoff_seconds * 2 ** min(refusals - 1, 30), settings.grant_backoff_max_seconds)
        until_ns = self._office.clock.boottime_ns() + int(seconds * SECOND_NS)
        self._back_offs[job] = _BackOff(refusals, until_ns)
