"""What leases take of a node, and whether more fits. The same sums serve snapshots, transitions and invariants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from controld.core.model import Generation, Member, Node
from controld.core.state import State
from virialpb.ids import NODE_SLOTS_MAX

WHOLE_THOUSANDTHS = 1000


def holding(state: State) -> dict[str, list[tuple[Generation, Member]]]:
    """Every lease that holds something, by node uid. One pass over all of them: for snapshots, not for one node."""
    by_node: dict[str, list[tuple[Generation, Member]]] = {}
    for generation in state.leased():
        for member in generation.members:
            if member.lease.holds:
                by_node.setdefault(member.node, []).append((generation, member))
    return by_node


def device_use(members: Iterable[Member]) -> Counter[str]:
    """Thousandths taken of each device key."""
    use: Counter[str] = Counter()
    for member in members:
        for grant in member.devices:
            use[grant.device_key] += grant.share_thousandths
    return use


def fits(node: Node, held: tuple[Member, ...], more: tuple[Member, ...], unix_ns: int) -> str:
    """Name of the first resource of `node` that `more` would exceed beside `held`; empty when it fits."""
    everything = (*held, *more)
    if len(everything) > NODE_SLOTS_MAX:
        return "slots"
    if sum(m.cpu_millis for m in everything) > node.cpu_millis:
        return "cpu_millis"
    if sum(m.memory_bytes for m in everything) > node.memory_bytes:
        return "memory_bytes"
    use = device_use(everything)
    known = {d.key for d in node.inventory.devices}
    held_back = {h.device_key for h in node.holds if h.device_key and h.active(unix_ns)}
    for grant in (g for m in more for g in m.devices):
        if grant.device_key not in known or grant.device_key in held_back:
            return grant.device_key
        if use[grant.device_key] > WHOLE_THOUSANDTHS:
            return grant.device_key
    return ""
