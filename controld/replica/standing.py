"""Whether an order may still be sent: orders wait in queues, and what they are about can end meanwhile."""

from __future__ import annotations

from controld.core.agent import Go, Order, Prepare
from controld.core.model import Phase
from controld.core.state import State


def stands(state: State, order: Order) -> bool:
    """False for what would begin something under a lease that is over.

    An agent that hung and comes back would otherwise find the start of a task in front of its stop, or, after an
    expiry, the start alone. Orders that end something are good for ever: they carry the token they are about.
    """
    match order:
        case Prepare():
            phases = (Phase.PREPARING, Phase.GO, Phase.ACTIVE)  # a spare may be prepared late
        case Go():
            phases = (Phase.GO, Phase.ACTIVE)
        case _:
            return True
    generation = state.generations.get(order.token.job, {}).get(order.token.generation)
    if generation is None or generation.phase not in phases or state.epoch_of(generation) != order.token.epoch:
        return False
    member = generation.member(order.slot)
    return member is not None and member.lease.holds
