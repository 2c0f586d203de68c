"""Giving a leadership away on purpose, so that nobody has to find out that it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from controld.replica.errors import NotLeaderError
from controld.replica.leader import Leader
from controld.replica.observe import Log, LogName
from controld.replica.peers import HandedOver, HandOver, PeerLostError, Peers
from controld.replica.settings import LeaderSettings
from controld.store.port import Leadership, SharedStore, StoreError


async def hand_over(
    leader: Leader, leadership: Leadership, to: Sequence[str], *, peers: Peers, settings: LeaderSettings, log: Log
) -> str:
    """The address of the first of `to` that leads by now; empty when none does, and the leader decides again.

    It decides nothing meanwhile, so its successor misses nothing; what waits is told where to go.
    """
    try:
        async with asyncio.timeout(settings.hand_overs_seconds):
            request = HandOver(leadership.token, await leader.hold())
            for address in to:
                log(LogName.HANDOVER_BEGAN, to=address, revision=request.revision)
                answer = await _ask(address, request, peers, settings)
                if answer.epoch is not None:
                    log(LogName.HANDOVER_DONE, to=address, epoch=str(answer.epoch))
                    leader.step_down(NotLeaderError(f"{address} leads", address))
                    return address
                log(LogName.HANDOVER_REFUSED, to=address, error=answer.why)
    except TimeoutError:
        log(LogName.HANDOVER_REFUSED, to="", error="no time is left for another")
    leader.release()
    return ""


async def _ask(address: str, request: HandOver, peers: Peers, settings: LeaderSettings) -> HandedOver:
    try:
        async with asyncio.timeout(settings.hand_over_seconds):
            return await peers.hand_over(address, request)
    except (PeerLostError, TimeoutError) as error:
        return HandedOver(None, str(error) or "no answer in time")


async def resign(leader: Leader, leadership: Leadership, *, store: SharedStore, log: Log) -> None:
    """Lead no more, so that whoever follows need not wait for evidence of it."""
    try:
        await store.resign(leadership)
        log(LogName.LEADER_RESIGNED, epoch=str(leadership.epoch))
    except StoreError as error:
        log(LogName.LEADER_LOST, reason=error.reason, error=str(error))
    leader.step_down(NotLeaderError("the controller that led is stopping"))
