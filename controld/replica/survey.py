"""How all controllers and all members of the store are, as one controller finds out by asking: no leader is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Protocol

from controld.replica.elector import Place
from controld.replica.peers import PeerLostError
from controld.store.members import Finding, Listed, Look, MembersPort, Seen, assess
from controld.store.port import StoreError

ASK_SECONDS: Final = 1.5
RECENT_SECONDS: Final = 1.0
REFRESH_SECONDS: Final = 0.5


class Role(StrEnum):
    LEADS = "LEADS"
    FOLLOWS = "FOLLOWS"
    LOADING = "LOADING"
    SILENT = "SILENT"


@dataclass(frozen=True, slots=True)
class Told:
    """What a controller says of itself and of the member beside it; `member` None: that does not answer, or none is."""

    identity: str
    role: Role
    version: str
    member: Look | None = None


@dataclass(frozen=True, slots=True)
class ControllerSeen:
    """`address`: HOST:PORT. `told` None: it does not answer."""

    address: str
    told: Told | None = None

    @property
    def role(self) -> Role:
        return Role.SILENT if self.told is None else self.told.role


@dataclass(frozen=True, slots=True)
class Picture:
    """`members` is empty where the store has none of ours, `findings` then too."""

    controllers: tuple[ControllerSeen, ...]
    members: tuple[Seen, ...] = ()
    findings: tuple[Finding, ...] = ()


class Colleagues(Protocol):
    """The other controllers, by address. Raises PeerLostError."""

    async def look(self, address: str) -> Told: ...

    async def defragment(self, address: str) -> int:
        """The member beside that controller; the size of its file afterwards."""
        ...


class Survey:
    """`me` tells this controller's own part, without its member. `members` is None where the store has none of ours."""

    def __init__(
        self, *, place: Place, me: Callable[[], Told], colleagues: Colleagues | None, members: MembersPort | None
    ) -> None:
        self._place = place
        self._me = me
        self._colleagues = colleagues
        self._members = members
        self._last: tuple[float, Picture] | None = None
        self._taking: asyncio.Task[Picture] | None = None

    @property
    def address(self) -> str:
        """Of this controller."""
        return self._place.address

    async def recent(self) -> Picture:
        """For what is shown often: one of a moment ago will do, and an older one where some do not answer at once."""
        now = asyncio.get_running_loop().time()
        if self._last is not None and now - self._last[0] <= RECENT_SECONDS:
            return self._last[1]
        if self._taking is None or self._taking.done():
            self._taking = asyncio.get_running_loop().create_task(self.take(), name="survey")
        if self._last is None:
            return await asyncio.shield(self._taking)
        await asyncio.wait((self._taking,), timeout=REFRESH_SECONDS)
        return self._last[1]

    async def own(self) -> Told:
        return replace(self._me(), member=await self._look())

    async def take(self) -> Picture:
        """Bounded by some seconds, whoever does not answer."""
        first = await self.own()
        others = await asyncio.gather(*(self._ask(address) for address in self._place.others))
        # Asked again: what others have applied meanwhile is no sign that this one lags.
        own = ControllerSeen(self._place.address, replace(first, member=await self._look()))
        controllers = (own, *others)
        picture = Picture(controllers)
        if self._members is not None:
            seen = tuple(_seen(listed, controllers, first.member) for listed in await self._listed())
            picture = Picture(controllers, seen, assess(seen, self._members.limit_bytes))
        self._last = (asyncio.get_running_loop().time(), picture)
        return picture

    async def _ask(self, address: str) -> ControllerSeen:
        if self._colleagues is None:
            return ControllerSeen(address)
        try:
            async with asyncio.timeout(ASK_SECONDS):
                return ControllerSeen(address, await self._colleagues.look(address))
        except (PeerLostError, TimeoutError):
            return ControllerSeen(address)

    async def _look(self) -> Look | None:
        if self._members is None:
            return None
        try:
            return await self._members.look()
        except StoreError:
            return None

    async def _listed(self) -> tuple[Listed, ...]:
        """Empty where the own member does not answer: the others' view of it is not asked for."""
        assert self._members is not None
        try:
            return await self._members.listed()
        except StoreError:
            return ()


def _seen(listed: Listed, controllers: Sequence[ControllerSeen], before: Look | None) -> Seen:
    """`before`: the own member, looked at before the others were asked. A member lags by what somebody had applied
    before it was asked itself."""
    own, *others = controllers
    for controller in controllers:
        look = None if controller.told is None else controller.told.member
        if look is not None and look.id == listed.id:
            if controller is own:
                ahead = max((c.told.member.applied_index for c in others if c.told and c.told.member), default=0)
            else:
                ahead = 0 if before is None else before.applied_index
            return Seen(listed, look, controller.address, max(0, ahead - look.applied_index))
    return Seen(listed)
