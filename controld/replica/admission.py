"""Who may have a session: one life of a node at a time, and only a leader that is not behind its agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from controld.core import events
from controld.core.agent import Hello
from controld.core.commands import AdmitNode
from controld.core.ids import NodeUid
from controld.core.outcome import Refused, Transition
from controld.replica.clock import SECOND_NS
from controld.replica.errors import OverloadedError, RefusedError, SessionRefusedError
from controld.replica.futures import ignore_outcome
from controld.replica.observe import LogName
from controld.replica.office import Office
from controld.replica.session import NodeSession
from controld.replica.writer import Source
from controld.store.port import StoreError
from virialpb.reasons import Reason


@dataclass(slots=True)
class _Door:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class Admission:
    def __init__(self, office: Office) -> None:
        self._office = office
        self._doors: dict[NodeUid, _Door] = {}
        self._duplicate_told_ns: dict[NodeUid, int] = {}

    @asynccontextmanager
    async def door(self, uid: NodeUid) -> AsyncGenerator[None]:
        """One hello of a uid at a time: of two clones that come at once the second must find the first."""
        door = self._doors.setdefault(uid, _Door())
        door.users += 1
        try:
            async with door.lock:
                yield
        finally:
            door.users -= 1
            if not door.users:
                del self._doors[uid]

    def refuse_duplicate(self, hello: Hello, former: NodeSession | None, now_ns: int) -> None:
        """Raises SessionRefusedError where another life of the node is connected and beats. That one is kept."""
        if former is None or former.incarnation == hello.incarnation or not self._beats(former, now_ns):
            return
        node = self._office.state.nodes.get(former.uid)
        self._tell_duplicate(hello, former, node.name if node is not None else hello.name, now_ns)
        self._office.log(LogName.SESSION_REFUSED, node=hello.name, uid=former.uid, reason=Reason.DUPLICATE_NODE)
        raise SessionRefusedError(
            Reason.DUPLICATE_NODE,
            f"node {former.uid} is connected from another place already ({node.advertise_address if node else '?'}). "
            "If this machine was cloned, delete the agent's data directory here and start it again",
        )

    def _beats(self, session: NodeSession, now_ns: int) -> bool:
        settings = self._office.settings
        seen = self._office.view.sessions.get(session.uid)
        if session.closed or seen is None or seen.last_receipt_ns is None:
            return False
        return now_ns - seen.last_receipt_ns < settings.duplicate_beats_missed * settings.renew_interval_ms * 1_000_000

    def _tell_duplicate(self, hello: Hello, former: NodeSession, name: str, now_ns: int) -> None:
        interval_ns = int(self._office.settings.duplicate_event_interval_seconds * SECOND_NS)
        told_ns = self._duplicate_told_ns.get(former.uid)
        if told_ns is not None and now_ns - told_ns < interval_ns:
            return
        self._duplicate_told_ns[former.uid] = now_ns
        details = {"address": hello.advertise_address, "boot_id": hello.incarnation.boot_id, "name": hello.name}
        told = Transition(events=(events.event("node.duplicate", node=name, details=details),))
        try:
            ignore_outcome(self._office.writer.offer_decision("TellDuplicate", lambda _, __: told, Source.LEADER))
        except (OverloadedError, StoreError):
            del self._duplicate_told_ns[former.uid]

    async def refuse_newer(self, hello: Hello) -> None:
        """The agent has heard a later leader than this one. Raises StoreError: another leads, or none can tell;
        SessionRefusedError where a barrier proves that this one leads all the same: the store lost commits.
        """
        await self.prove_or_lose(f"{hello.name} has seen leader epoch {hello.leader_epoch_seen}")
        raise SessionRefusedError(
            Reason.FENCED,
            f"the agent has seen leader epoch {hello.leader_epoch_seen} or a later grant, this controller leads at "
            f"{self._office.epoch}: the store was set back without `controld restore`",
        )

    async def prove_or_lose(self, doubt: str) -> None:
        """Step down unless a barrier proves the leadership. Raises StoreError then."""
        self._office.log(LogName.LEADER_DOUBTED, doubt=doubt)
        try:
            await self._office.barrier.wait()
        except StoreError as error:
            self._office.lose(error)
            raise

    async def admit(self, hello: Hello) -> None:
        """Commit what the hello says of the node. Raises SessionRefusedError, OverloadedError, StoreError."""
        command = AdmitNode(
            incarnation=hello.incarnation,
            name=hello.name,
            advertise_address=hello.advertise_address,
            fencing=hello.fencing,
            cpu_millis=hello.cpu_millis,
            memory_bytes=hello.memory_bytes,
            labels=hello.labels,
            version=hello.version,
            gone_slots=hello.gone_slots,
            certified=hello.certified,
        )
        try:
            await self._office.writer.offer(command, Source.AGENT)
        except RefusedError as error:
            refused = error.refused
            self._office.log(LogName.SESSION_REFUSED, node=hello.name, reason=refused.reason)
            raise SessionRefusedError(refused.reason, _why_not(hello, refused)) from error


def _why_not(hello: Hello, refused: Refused) -> str:
    """For the agent's log: an operator reads it there."""
    if refused.reason is Reason.ALREADY_EXISTS:
        return (
            f"node {hello.name} was not admitted: a node of this name is known as {refused.detail}. Where that one is "
            "gone, this one takes its place by itself when its session and its leases have run out; where both shall "
            "stay, give one another --name"
        )
    return f"node {hello.name} was not admitted: {refused.reason} {refused.subject} {refused.detail}".rstrip()
