"""What views need of the leader's memory: the last word of each agent, matched by incarnation and token."""

from __future__ import annotations

from controld.core.agent import SlotStatus
from controld.core.model import Generation, Member
from controld.core.state import State
from controld.health.view import View


def status_of(member: Member, generation: Generation, state: State, view: View) -> SlotStatus | None:
    """What the member's agent last said about its slot; None when that was another life or another generation."""
    session = view.sessions.get(member.node)
    if session is None or session.incarnation != member.incarnation:
        return None
    status = session.slots.get(member.slot)
    if status is None or status.token.epoch != state.epoch_of(generation):
        return None
    return status


def progress_step(generation: Generation, state: State, view: View) -> int:
    """The highest step any rank of the generation reported; -1 where none did."""
    found = (status_of(member, generation, state, view) for member in generation.ranks)
    return max((status.progress_step for status in found if status is not None), default=-1)
