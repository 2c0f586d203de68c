"""The space of an etcd: refused before etcd's own quota is reached, and won back.

At its quota etcd refuses every put until somebody disarms the alarm, and with it every commit, also one that deletes:
the head is a put. So commits that grow the store are refused by us at a limit below the quota, and those that only
delete pass. The limit is held against the pages in use, since free ones are used again; the quota counts the file,
which shrinks only when it is defragmented. A member that is alone is defragmented here. Of several, one at a time is,
by the leader (`controld.replica.care`), who is told by `short`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Final

from controld.store.etcd_session import Session
from controld.store.etcd_txn import PUT_OVERHEAD_BYTES
from controld.store.etcd_wire import ALARM, COMPACT, DEFRAGMENT, MEMBER_LIST, STATUS, Meaning, WireError, meaning
from controld.store.port import StorageFullError, StoredChange, StoreError
from virialpb.etcd.v1 import etcd_pb2 as pb

_LOOK_PARTS: Final = 64  # of the limit may be written between two looks at the member
_LOOK_BYTES_MIN: Final = 64 << 10
_WORTHWHILE: Final = 0.9  # a file of which less is in use is worth writing anew; it stops the member meanwhile
_SIZE_LAG_SECONDS: Final = 0.5  # etcd commits to disk every 0.1 s
_STEP_SECONDS: Final = 0.1
_RELIEF_PAUSE_SECONDS: Final = 10.0


def growth_bytes(changes: Sequence[StoredChange]) -> int:
    """What a commit adds at most: also an overwritten value stays until it is compacted."""
    return sum(
        len(change.key) + len(change.value) + PUT_OVERHEAD_BYTES for change in changes if change.value is not None
    )


class Space:
    """`limit_bytes` of pages in use. What was written since the last look at the member is counted here, and what was
    written shortly before it again: etcd tells the size as of its last commit to disk.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes: int | None = None
        # (from when on, bytes), in steps of _STEP_SECONDS; and their sum.
        self._written: deque[tuple[float, int]] = deque()
        self._written_bytes = 0
        self._defragmented_bytes = 0
        self._relieving: asyncio.Task[None] | None = None
        # Set when space is short; whoever cares for the members clears it.
        self.short = asyncio.Event()

    async def require(self, session: Session, changes: Sequence[StoredChange]) -> None:
        """Raises StorageFullError; then the store is being relieved."""
        growth = growth_bytes(changes)
        if growth == 0:
            return
        due = self._used_bytes is None or self._written_bytes > max(_LOOK_BYTES_MIN, self._limit_bytes // _LOOK_PARTS)
        if due or self._over(growth):
            await self._look(session)
        if self._over(growth):
            self.relieve_soon(session)
            raise StorageFullError(f"etcd uses {self._used_bytes} of the {self._limit_bytes} bytes the store may have")
        self._count(growth)

    def _over(self, growth: int) -> bool:
        return self._used_bytes is not None and self._used_bytes + self._written_bytes + growth > self._limit_bytes

    def _count(self, growth: int) -> None:
        now = asyncio.get_running_loop().time()
        if self._written and now - self._written[-1][0] < _STEP_SECONDS:
            began, size = self._written.pop()
            self._written.append((began, size + growth))
        else:
            self._written.append((now, growth))
        self._written_bytes += growth

    async def _look(self, session: Session) -> None:
        at = asyncio.get_running_loop().time()
        try:
            status = await session.call(STATUS, pb.StatusRequest(), session.times.status)
        except WireError:
            return  # whether it can be written the commit itself will tell
        self._used_bytes = status.db_size_in_use
        while self._written and self._written[0][0] < at - _SIZE_LAG_SECONDS:
            self._written_bytes -= self._written.popleft()[1]

    def relieve_soon(self, session: Session) -> None:
        self.short.set()
        if self._relieving is None or self._relieving.done():
            self._relieving = asyncio.get_running_loop().create_task(self._relieve_later(session), name="relief")

    def stop(self) -> None:
        if self._relieving is not None:
            self._relieving.cancel()

    async def _relieve_later(self, session: Session) -> None:
        with contextlib.suppress(WireError, StoreError):  # tried again with the next commit that finds no space
            await self.relieve(session, compact=True)
        await asyncio.sleep(_RELIEF_PAUSE_SECONDS)  # until then that one starts nothing

    async def relieve(self, session: Session, *, compact: bool) -> None:
        """Win space back where it is short: compact (all history, `compact`); where the member is alone, defragment
        and disarm. Raises WireError."""
        status = await session.call(STATUS, pb.StatusRequest(), session.times.status)
        alarms = await self._alarms(session)
        if compact:
            await compact_to(session, status.header.revision)
            status = await session.call(STATUS, pb.StatusRequest(), session.times.status)
        size_bytes = status.db_size
        free = status.db_size_in_use < size_bytes * _WORTHWHILE
        grown = self._defragmented_bytes < size_bytes * _WORTHWHILE
        # Pages that were freed just now do not count as free until the next write, and under an alarm there is none.
        bloated = (alarms and grown) or (size_bytes > self._limit_bytes and free)
        if bloated and await self._one_of_several(session):
            self.short.set()
            self._settle(status)
            return
        if bloated:
            await session.call(DEFRAGMENT, pb.DefragmentRequest(), session.times.defragment)
            status = await session.call(STATUS, pb.StatusRequest(), session.times.status)
            self._defragmented_bytes = status.db_size
        self._settle(status)
        if status.db_size < size_bytes:  # else the next put would set the alarm off again
            for alarm in alarms:
                disarm = pb.AlarmRequest(
                    action=pb.AlarmRequest.DEACTIVATE, member_id=alarm.member_id, alarm=alarm.alarm
                )
                await session.call(ALARM, disarm, session.times.read)

    @staticmethod
    async def _one_of_several(session: Session) -> bool:
        return len((await session.call(MEMBER_LIST, pb.MemberListRequest(), session.times.status)).members) > 1

    def _settle(self, status: pb.StatusResponse) -> None:
        self._used_bytes = status.db_size_in_use
        self._written.clear()  # the compaction has brought it all to disk
        self._written_bytes = 0

    @staticmethod
    async def _alarms(session: Session) -> list[pb.AlarmMember]:
        asked = pb.AlarmRequest(action=pb.AlarmRequest.GET, alarm=pb.NOSPACE)
        response = await session.call(ALARM, asked, session.times.status)
        return [alarm for alarm in response.alarms if alarm.alarm == pb.NOSPACE]


async def compact_to(session: Session, revision: int) -> None:
    """Drop the history below a revision, and wait until its pages are free. Raises WireError."""
    try:
        await session.call(COMPACT, pb.CompactionRequest(revision=revision, physical=True), session.times.compact)
    except WireError as error:
        if meaning(error) is not Meaning.COMPACTED:  # by another one, and further
            raise
