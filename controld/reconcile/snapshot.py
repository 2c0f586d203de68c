"""State and view -> what the planner sees."""

from __future__ import annotations

from collections.abc import Sequence

from controld.core.agent import SlotState
from controld.core.capacity import WHOLE_THOUSANDTHS, device_use, holding
from controld.core.commands import Now
from controld.core.model import Liveness, Member, Node
from controld.core.state import State
from controld.health.view import SessionView, View
from controld.matching.port import FreeDevice, NodeView, Snapshot
from virialpb.ids import NODE_SLOTS_MAX
from virialpb.reasons import Unfit


def snapshot(state: State, view: View, now: Now) -> Snapshot:
    """Nodes in order of uid, with what no lease holds."""
    by_node = holding(state)
    nodes = tuple(
        node_view(state.nodes[uid], [m for _, m in by_node.get(uid, [])], view, now) for uid in sorted(state.nodes)
    )
    return Snapshot(state.revision, nodes)


def node_view(node: Node, held: Sequence[Member], view: View, now: Now) -> NodeView:
    """One node as the planner sees it; `held` are the members whose leases hold something of it."""
    use = device_use(held)
    holds = [h for h in node.holds if h.active(now.unix_ns)]
    held_back = {h.device_key for h in holds if h.device_key}
    devices = tuple(
        FreeDevice(d, max(0, WHOLE_THOUSANDTHS - use[d.key]))
        for d in sorted(node.inventory.devices, key=lambda d: d.key)
        if d.key not in held_back
    )
    attributes: dict[str, str | int | bool] = dict(node.inventory.attributes)
    attributes |= dict(node.labels)
    attributes["name"] = node.name
    return NodeView(
        uid=node.uid,
        name=node.name,
        incarnation=node.incarnation,
        unfit=_unfit(node, view, any(not h.device_key for h in holds)),
        cpu_free_millis=node.cpu_millis - sum(m.cpu_millis for m in held),
        memory_free_bytes=node.memory_bytes - sum(m.memory_bytes for m in held),
        cpu_millis=node.cpu_millis,
        memory_bytes=node.memory_bytes,
        devices=devices,
        attributes=tuple(sorted(attributes.items())),
        fencing_weak=node.fencing == "weak",
        slots_free=max(0, NODE_SLOTS_MAX - len(held)),
    )


def has_stuck(session: SessionView) -> bool:
    return any(status.state is SlotState.STUCK for status in session.slots.values())


def _unfit(node: Node, view: View, held: bool) -> Unfit | None:
    session = view.sessions.get(node.uid)
    if node.liveness is not Liveness.LIVE or session is None or not session.connected:
        return Unfit.NOT_LIVE
    # No placement before the node has reported to THIS leader: a new leader is not blind (H1).
    if not session.reported or session.incarnation != node.incarnation or not session.guardian_ok:
        return Unfit.NOT_REPORTED
    # A task that SIGKILL does not end has the node's devices still, whatever became of its lease.
    if held or node.draining or has_stuck(session):
        return Unfit.HELD
    return None
