"""A plan's grant -> the command that commits it."""

from __future__ import annotations

from controld.core.commands import StartGeneration
from controld.core.ids import slot_id
from controld.core.model import Member
from controld.matching.port import Grant, Seat


def command_for_grant(grant: Grant, cause_id: str) -> StartGeneration:
    ranks = [s for s in grant.seats if s.rank is not None]
    spares = [s for s in grant.seats if s.rank is None]
    members = [_member(grant, seat, seat.rank or 0, spare=False) for seat in ranks]
    members += [_member(grant, seat, i, spare=True) for i, seat in enumerate(spares)]
    return StartGeneration(
        job=grant.job, number=grant.number, members=tuple(members), checkpoint=grant.checkpoint, cause_id=cause_id
    )


def _member(grant: Grant, seat: Seat, index: int, *, spare: bool) -> Member:
    return Member(
        slot=slot_id(grant.job, grant.number, index, spare=spare),
        rank=seat.rank,
        node=seat.node,
        incarnation=seat.incarnation,
        cpu_millis=seat.cpu_millis,
        memory_bytes=seat.memory_bytes,
        devices=seat.devices,
    )
