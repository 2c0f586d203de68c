"""The members of an etcd of ours, through the one beside this controller: the port of `controld.store.members`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from controld.store import member_config
from controld.store.etcd_session import Session
from controld.store.etcd_space import compact_to
from controld.store.etcd_wire import (
    ALARM,
    DEFRAGMENT,
    MEMBER_ADD,
    MEMBER_LIST,
    MEMBER_PROMOTE,
    MEMBER_REMOVE,
    STATUS,
    Method,
    Req,
    Res,
    WireError,
)
from controld.store.members import Listed, Look, MembersRefusedError
from controld.store.port import StoreUnavailableError
from virialpb.etcd.v1 import etcd_pb2 as pb

# Right after a change, and until a member that was away has been back for five seconds, etcd calls the members
# unhealthy; the proposal of a change is not answered while there is no leader.
CHANGE_SECONDS: Final = 20.0
_RETRY_SECONDS: Final = 0.25

# etcd's own texts (api/v3rpc/rpctypes/error.go), the same in 3.4 to 3.6.
_ALARM: Final = re.compile(r"memberID:(\d+)\s+alarm:(\w+)")
_NOT_NOW: Final = ("unhealthy cluster", "too many learner members", "leader changed", "no leader", "request timed out")
_NOT_IN_STEP: Final = "in sync with leader"
_GONE: Final = "member not found"
_THERE: Final = "Peer URLs already exists"
_VOTES: Final = "can only promote a learner"
_WOULD_LOSE: Final = ("not enough started members", "unhealthy cluster")


class EtcdMembers:
    """One for the life of a store, since it knows what it has under way. `session` gives the store's, which may be
    opened anew. Raises StoreClosedError while it is closed."""

    def __init__(self, session: Callable[[], Session], limit_bytes: int) -> None:
        self._session = session
        self.limit_bytes = limit_bytes
        self.quota_bytes = member_config.quota_bytes(limit_bytes)
        self._defragmenting = False

    async def look(self) -> Look:
        response = await self._ask(STATUS, pb.StatusRequest(), self._session().times.status)
        return Look(
            id=response.header.member_id,
            version=response.version,
            leader_id=response.leader,
            applied_index=response.raft_applied_index,
            size_bytes=response.db_size,
            used_bytes=response.db_size_in_use,
            full_ids=_alarmed(response.errors, "NOSPACE"),
            corrupt_ids=_alarmed(response.errors, "CORRUPT"),
            defragmenting=self._defragmenting,
        )

    async def listed(self) -> tuple[Listed, ...]:
        response = await self._ask(MEMBER_LIST, pb.MemberListRequest(), self._session().times.status)
        return _members(response.members)

    async def add(self, peer_url: str) -> Listed:
        try:
            response = await self._change(MEMBER_ADD, pb.MemberAddRequest(peer_urls=[peer_url], is_learner=True))
        except WireError as error:
            if _THERE not in error.text:
                raise MembersRefusedError(f"etcd does not add {peer_url}: {error.text}") from error
            return next(m for m in await self.listed() if m.peer_url == peer_url)
        return _members([response.member])[0]

    async def remove(self, id_: int) -> None:
        try:
            await self._change(MEMBER_REMOVE, pb.MemberRemoveRequest(ID=id_))
        except WireError as error:
            if _GONE in error.text:
                return
            if any(text in error.text for text in _WOULD_LOSE):
                raise MembersRefusedError("the members that would be left have no majority among them") from error
            raise MembersRefusedError(f"etcd does not remove it: {error.text}") from error

    async def promote(self, id_: int) -> bool:
        try:
            await self._call(MEMBER_PROMOTE, pb.MemberPromoteRequest(ID=id_), self._session().times.read)
        except WireError as error:
            # Else: an attempt whose answer was lost has done it.
            return _VOTES in error.text and _NOT_IN_STEP not in error.text
        return True

    async def compact(self) -> None:
        session = self._session()
        try:
            status = await session.call(STATUS, pb.StatusRequest(), session.times.status)
            await compact_to(session, status.header.revision)
        except WireError as error:
            raise _unavailable(error) from error

    async def defragment(self) -> int:
        if self._defragmenting:
            raise StoreUnavailableError("the member is being defragmented already")
        self._defragmenting = True
        try:
            await self._ask(DEFRAGMENT, pb.DefragmentRequest(), self._session().times.defragment)
        finally:
            self._defragmenting = False
        return (await self._ask(STATUS, pb.StatusRequest(), self._session().times.status)).db_size

    async def disarm(self, ids: Sequence[int]) -> None:
        for id_ in ids:
            off = pb.AlarmRequest(action=pb.AlarmRequest.DEACTIVATE, member_id=id_, alarm=pb.NOSPACE)
            await self._ask(ALARM, off, self._session().times.read)

    async def _change(self, method: Method[Req, Res], request: Req) -> Res:
        """Again while etcd says that it is too early. Raises WireError."""
        end = asyncio.get_running_loop().time() + CHANGE_SECONDS
        while True:
            try:
                return await self._call(method, request, self._session().times.read)
            except WireError as error:
                late = asyncio.get_running_loop().time() + _RETRY_SECONDS > end
                if late or not any(text in error.text for text in _NOT_NOW):
                    raise
            await asyncio.sleep(_RETRY_SECONDS)

    async def _ask(self, method: Method[Req, Res], request: Req, timeout_seconds: float) -> Res:
        try:
            return await self._call(method, request, timeout_seconds)
        except WireError as error:
            raise _unavailable(error) from error

    async def _call(self, method: Method[Req, Res], request: Req, timeout_seconds: float) -> Res:
        return await self._session().call(method, request, timeout_seconds)


def _unavailable(error: WireError) -> StoreUnavailableError:
    return StoreUnavailableError(f"the etcd member does not answer: {error}")


def _alarmed(errors: Iterable[str], kind: str) -> tuple[int, ...]:
    """From what a member says of itself: to be asked for its alarms, it would need a majority."""
    found = (_ALARM.search(text) for text in errors)
    return tuple(sorted({int(alarm[1]) for alarm in found if alarm is not None and alarm[2] == kind}))


def _members(listed: Sequence[pb.Member]) -> tuple[Listed, ...]:
    """By name; those that have not started last."""
    made = [Listed(m.ID, m.name, next(iter(m.peer_urls), ""), m.is_learner) for m in listed]
    return tuple(sorted(made, key=lambda m: (not m.name, m.name, m.id)))
