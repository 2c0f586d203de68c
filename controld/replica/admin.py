"""What an operator asks for, done by the leader: members changed, the leadership moved, a copy of the state made."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controld.core.ids import Epoch
from controld.replica.observe import Log, LogName
from controld.replica.replica import Replica
from controld.replica.survey import ControllerSeen, Survey
from controld.store import sqlite_db
from controld.store.members import Listed, MembersPort, MembersRefusedError, Seen
from controld.store.port import Store, StoreError
from virialpb.units import format_bytes

# Free space, in sizes of the store: a copy for an operator must not end the commits that it is a copy of.
ROOM_TIMES: Final = 2


@dataclass(frozen=True, slots=True)
class Changed:
    """The members after a change. `peers`: NAME=URL of each, as `controld member` takes them; `added`: None if none."""

    members: tuple[Seen, ...]
    peers: tuple[str, ...]
    added: Listed | None = None


class Admin:
    """`replica` is None for a controller that is alone, `members` where the store has none of ours. `scratch`: where a
    backup is written before it is sent."""

    def __init__(
        self,
        *,
        store: Store,
        survey: Survey,
        replica: Replica | None,
        members: MembersPort | None,
        scratch: Path,
        log: Log,
    ) -> None:
        self.scratch = scratch
        self._address = survey.address
        self.survey = survey
        self.members = members
        self._store = store
        self._replica = replica
        self._log = log
        self._moving: asyncio.Future[str] | None = None
        # One change at a time: of two judged by one picture, each may leave a majority and both together none.
        self._changing = asyncio.Lock()

    async def add(self, name: str, peer_url: str) -> Changed:
        """Raises MembersRefusedError, StoreError."""
        async with self._changing:
            return await self._add(name, peer_url)

    async def _add(self, name: str, peer_url: str) -> Changed:
        members, picture = self._ours(), await self.survey.take()
        for member in picture.members:
            if name == member.listed.name and member.listed.peer_url != peer_url:
                raise MembersRefusedError(
                    f"{name} is a member already, at {member.listed.peer_url}; take another name, or replace it"
                )
        there = next((m.listed for m in picture.members if m.listed.peer_url == peer_url), None)
        if there is not None and there.name and there.name != name:
            raise MembersRefusedError(f"{peer_url} belongs to the member {there.name}; each needs a URL of its own")
        added = there or await members.add(peer_url)
        self._log(LogName.MEMBER_ADDED, name=name, peer_url=peer_url, member=f"{added.id:x}")
        return await self._changed(name, added)

    async def remove(self, member: str) -> Changed:
        """By its name, its id or its URL. Raises MembersRefusedError, StoreError."""
        async with self._changing:
            self._ours()
            picture = await self.survey.take()
            found = _named(member, picture.members)
            if found is None:
                known = ", ".join(m.listed.label for m in picture.members)
                raise MembersRefusedError(f"there are {known}", missing=f"the member {member}")
            await self._remove(found.listed, picture.members)
            return await self._changed("", None)

    async def replace(self, id_: int, name: str, peer_url: str) -> Changed:
        """The same again changes nothing. Raises MembersRefusedError, StoreError."""
        async with self._changing:
            picture = await self.survey.take()
            dead = next((m for m in picture.members if m.listed.id == id_), None)
            if dead is not None and dead.in_step and not dead.listed.learner:
                raise MembersRefusedError(
                    f"{dead.listed.label} answers and is in step, so it need not be replaced; "
                    "stop it first if it shall go"
                )
            if dead is not None:
                await self._remove(dead.listed, picture.members)
            return await self._add(name, peer_url)

    async def _remove(self, listed: Listed, members: Sequence[Seen]) -> None:
        """Never without a majority: what the others have acknowledged must be in what is left. etcd counts who is
        started, not who is in step."""
        own = next((m for m in members if m.listed.id == listed.id), None)
        if own is not None and own.controller and own.controller == self._address:
            raise MembersRefusedError(
                f"{listed.label} is beside the controller that leads; `virial admin move-leader` to another one first"
            )
        left = [m for m in members if m.listed.id != listed.id and not m.listed.learner]
        sound = [m for m in left if m.in_step]
        if not left:
            raise MembersRefusedError(f"{listed.label} is the only member; its data is the state")
        if not listed.learner and len(sound) < len(left) // 2 + 1:
            raise MembersRefusedError(
                f"of the {len(left)} that would be left, {len(sound)} are in step, and that is no majority; "
                "bring them back first, or restore a backup into new members"
            )
        await self._ours().remove(listed.id)
        self._log(LogName.MEMBER_REMOVED, name=listed.label, member=f"{listed.id:x}")

    async def _changed(self, name: str, added: Listed | None) -> Changed:
        members = (await self.survey.take()).members
        peers = [
            f"{name if added is not None and m.listed.id == added.id else m.listed.name}={m.listed.peer_url}"
            for m in members
            if m.listed.name or (added is not None and m.listed.id == added.id)
        ]
        return Changed(members, tuple(sorted(peers)), added)

    async def move_leader(self, to: str) -> str:
        """To a controller by its identity or address; its address. Raises MembersRefusedError, NotLeaderError."""
        if self._replica is None:
            raise MembersRefusedError("this controller is alone: there is none that could lead in its place")
        picture = await self.survey.take()
        target = next((c for c in picture.controllers if to in (c.address, _identity(c))), None)
        if target is None:
            known = ", ".join(_identity(c) or c.address for c in picture.controllers)
            raise MembersRefusedError(f"there are {known}", missing=f"the controller {to}")
        if target.address == self._replica.place.address:
            return target.address
        if self._moving is not None and not self._moving.done():
            raise MembersRefusedError("the leadership is being moved already")
        if target.told is None:
            raise MembersRefusedError(f"{target.address} does not answer, so it cannot lead")
        # To its end, whoever waits for it: a caller that gives up must not leave a leader that decides nothing.
        self._moving = asyncio.ensure_future(self._replica.hand_over([target.address]))
        successor = await asyncio.shield(self._moving)
        if not successor:
            raise MembersRefusedError(
                f"{to} did not take over in time, and this controller leads on; the log says why (handover.refused)"
            )
        return successor

    async def store_problems(self) -> tuple[str, ...]:
        """In words, of a store without members of ours: of those the survey tells more."""
        if self.members is not None:
            return ()
        try:
            return (await self._store.status()).problems
        except StoreError as error:
            return (str(error),)

    async def backup(self, path: Path) -> Epoch:
        """The position that the copy is as of. Raises StoreError, OSError, MembersRefusedError."""
        size_bytes = (await self._store.status()).size_bytes
        free_bytes = (await asyncio.to_thread(shutil.disk_usage, path.parent)).free
        if free_bytes < ROOM_TIMES * size_bytes:
            raise MembersRefusedError(
                f"the copy may take {format_bytes(size_bytes)}, and of the disk under {self.scratch}, on which the "
                f"controller lives, {format_bytes(free_bytes)} are free; free some, or run `controld backup` on the "
                "host of a controller, with a FILE on another disk"
            )
        await self._store.backup(str(path))
        if not await asyncio.to_thread(path.exists):
            raise MembersRefusedError("the store of this controller is in memory only, so there is nothing to keep")
        return await asyncio.to_thread(sqlite_db.position_of, path)

    def _ours(self) -> MembersPort:
        if self.members is None:
            raise MembersRefusedError(
                "the store has no members that these controllers run: it is the embedded one, or an etcd run by others"
            )
        return self.members


def _named(text: str, members: Sequence[Seen]) -> Seen | None:
    return next((m for m in members if text in (m.listed.name, f"{m.listed.id:x}", m.listed.peer_url)), None)


def _identity(controller: ControllerSeen) -> str:
    return "" if controller.told is None else controller.told.identity
