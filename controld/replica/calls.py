"""Calls from inside tasks: decided like any command, answered with its outcome, never before it is durable.

A wait for an open checkpoint is kept here until the checkpoint's record changes; it costs a future, no tick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from controld.core import keys
from controld.core.agent import CheckpointWaitCall, TaskCall, TaskReply
from controld.core.commands import PrepareShard
from controld.core.model import CheckpointState
from controld.core.outcome import Refused
from controld.reconcile.calls import command_for_call, reply_for
from controld.replica.errors import OverloadedError, RefusedError, SessionClosedError
from controld.replica.hub import CommittedBatch
from controld.replica.office import Office
from controld.replica.session import NodeSession
from controld.replica.writer import Source
from controld.store.port import StoreError
from virialpb.reasons import Reason


class Calls:
    """`answer` puts a reply where the agent takes it."""

    def __init__(self, office: Office, answer: Callable[[NodeSession, TaskReply], None]) -> None:
        self._office = office
        self._answer = answer
        # Store key of a checkpoint -> who waits for a change of it, in order of asking.
        self._waits: dict[str, dict[asyncio.Future[None], None]] = {}
        # Likewise, who has a part of it and is to be decided with the others.
        self._gathering: dict[str, dict[asyncio.Future[None], None]] = {}

    def take(self, session: NodeSession, call: TaskCall) -> None:
        """Answered later by a TaskReply, at once when the session has too many calls open."""
        if session.calls >= self._office.settings.session_calls_max:
            self._answer(session, reply_for(call, Refused(Reason.OVERLOADED, call.slot)))
            return
        session.calls += 1
        self._office.crew.start(self._serve(session, call), f"call {call.slot}", vital=False)

    def committed(self, batch: CommittedBatch) -> None:
        for change in batch.changes:
            for future in self._waits.pop(change.key, {}):
                if not future.done():
                    future.set_result(None)

    def left(self, session: NodeSession, error: SessionClosedError) -> None:
        """Nobody is there to be answered: waits end, commands on their way do not."""
        for future in session.waits:
            if not future.done():
                future.set_exception(error)

    async def _serve(self, session: NodeSession, call: TaskCall) -> None:
        try:
            reply = await self._reply(session, call)
        except SessionClosedError:
            return
        except (StoreError, OverloadedError) as error:
            reply = reply_for(call, Refused(error.reason, call.slot))
        finally:
            session.calls -= 1
        self._answer(session, reply)

    async def _reply(self, session: NodeSession, call: TaskCall) -> TaskReply:
        office = self._office
        while True:
            wanted = command_for_call(call, session.uid, office.state)
            if not isinstance(wanted, TaskReply):
                if isinstance(wanted, PrepareShard):
                    await self._gathered(wanted)
                try:
                    return reply_for(call, await office.writer.offer(wanted, Source.AGENT))
                except RefusedError as error:
                    return reply_for(call, error.refused)
            if not isinstance(call.call, CheckpointWaitCall) or wanted.state != CheckpointState.BEGUN.value:
                # A read: it may say "no such checkpoint" only while this is still the leader.
                await office.barrier.wait()
                return wanted
            await self._changed(keys.checkpoint(call.token.job, call.call.checkpoint), session)

    async def _gathered(self, part: PrepareShard) -> None:
        """Let parts of one large checkpoint be decided together; the last one waits for nobody."""
        office = self._office
        checkpoint = office.state.checkpoints.get(part.job, {}).get(part.checkpoint)
        if checkpoint is None or checkpoint.world_size < office.settings.gather_ranks_min:
            return
        loop = asyncio.get_running_loop()
        key = keys.checkpoint(part.job, part.checkpoint)
        gathering = self._gathering.get(key)
        if gathering is None:
            gathering = self._gathering[key] = {}
            loop.call_later(office.settings.gather_seconds, self._gather, key, gathering)
        future: asyncio.Future[None] = loop.create_future()
        gathering[future] = None
        if len(checkpoint.parts) + len(gathering) >= checkpoint.world_size:
            self._gather(key, gathering)
        await future

    def _gather(self, key: str, gathering: dict[asyncio.Future[None], None]) -> None:
        if self._gathering.get(key) is gathering:
            del self._gathering[key]
        for future in gathering:
            if not future.done():
                future.set_result(None)

    async def _changed(self, key: str, session: NodeSession) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waits = self._waits.setdefault(key, {})
        waits[future] = None
        session.waits.add(future)
        try:
            await future
        finally:
            session.waits.discard(future)
            waits.pop(future, None)
            if not waits and self._waits.get(key) is waits:
                del self._waits[key]
