"""The care for the members of the store: learners get their vote, space is won back.

It is done by whoever leads. A store without space takes no takeover either: while nobody leads, it is done by the
controller beside the member that leads, of which there is one, or else beside the first of those that answer.

What is done is decided in `controld.store.members.plan`; here it is done, one step after the other, each after a new
look at all of them.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from controld.replica.observe import Log, LogName
from controld.replica.peers import PeerLostError
from controld.replica.survey import Colleagues, Picture, Role, Survey
from controld.store.members import Compact, Defragment, Disarm, MembersPort, Promote, Seen, Step, plan
from controld.store.port import StoreError

# A look costs a few small calls. While a member learns it is looked at more often: its controller waits for it.
LOOK_SECONDS: Final = 5.0
LEARNER_SECONDS: Final = 0.5
STEP_SECONDS: Final = 0.5
DEFRAGMENT_SECONDS: Final = 300.0
STEPS_MAX: Final = 64


class Leads(Protocol):
    @property
    def leads(self) -> bool: ...


class Care:
    """`short` is set when space is short, and wakes it. `address`: this controller's own."""

    def __init__(
        self,
        *,
        address: str,
        office: Leads,
        members: MembersPort,
        colleagues: Colleagues,
        survey: Survey,
        short: asyncio.Event,
        log: Log,
    ) -> None:
        self._address = address
        self._office = office
        self._members = members
        self._colleagues = colleagues
        self._survey = survey
        self._short = short
        self._log = log
        self._compacted = False
        self._defragmented: dict[int, int] = {}
        self._learning: set[int] = set()
        self._learners = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(LEARNER_SECONDS if self._learners else LOOK_SECONDS):
                    await self._short.wait()
            except TimeoutError:
                pass
            self._short.clear()
            try:
                await self._round()
            except Exception as error:  # noqa: BLE001 - told, and tried again: nobody else would care for them
                self._log(LogName.TASK_BROKEN, task="care for the members", error=repr(error))

    async def _round(self) -> None:
        self._learning.clear()
        for _ in range(STEPS_MAX):
            picture = await self._survey.take()
            if not self._mine(picture):
                return
            self._learners = any(m.listed.learner for m in picture.members)
            if not any(m.look is not None and m.look.full_ids for m in picture.members):
                self._compacted = False
            step = plan(
                picture.members,
                limit_bytes=self._members.limit_bytes,
                quota_bytes=self._members.quota_bytes,
                compacted=self._compacted,
                defragmented=self._defragmented,
                learning=self._learning,
            )
            if step is None:
                return
            try:
                await self._take(step)
            except (StoreError, PeerLostError, TimeoutError) as error:
                self._log(LogName.CARE_FAILED, step=type(step).__name__.lower(), error=str(error) or "no answer")
                return
            await asyncio.sleep(STEP_SECONDS)

    def _mine(self, picture: Picture) -> bool:
        if self._office.leads or any(controller.role is Role.LEADS for controller in picture.controllers):
            return self._office.leads
        able = [m for m in picture.members if m.in_step and not m.listed.learner]
        # The one that leads has no controller that answers: then the first of those that have.
        chosen = min(able, key=lambda m: (m.look is None or m.look.id != m.look.leader_id, m.listed.id), default=None)
        return chosen is not None and chosen.controller == self._address

    async def _take(self, step: Step) -> None:
        match step:
            case Promote():
                if await self._members.promote(step.id):
                    self._log(LogName.MEMBER_PROMOTED, member=f"{step.id:x}")
                else:
                    self._learning.add(step.id)
            case Compact():
                await self._members.compact()
                self._compacted = True
            case Defragment():
                await self._defragment(step.member)
            case Disarm():
                await self._members.disarm(step.ids)
                self._compacted = False
                self._log(LogName.ALARM_DISARMED, members=", ".join(f"{i:x}" for i in step.ids))

    async def _defragment(self, member: Seen) -> None:
        assert member.look is not None
        if member.controller == self._address:
            size_bytes = await self._members.defragment()
        else:
            async with asyncio.timeout(DEFRAGMENT_SECONDS):
                size_bytes = await self._colleagues.defragment(member.controller)
        self._defragmented[member.listed.id] = size_bytes
        before = member.look.size_bytes
        self._log(LogName.MEMBER_DEFRAGMENTED, member=member.listed.label, before_bytes=before, size_bytes=size_bytes)
