"""Beats -> LIVE, SUSPECT, EXPIRED, and leases that ran out. Silence is judged by this leader's clock alone."""

from __future__ import annotations

from controld.core.capacity import holding
from controld.core.commands import Command, ExpireLeases, MarkExpired, MarkLive, MarkSuspect, Now
from controld.core.ids import Incarnation, SlotId
from controld.core.model import Generation, Liveness, Member, Node
from controld.core.state import State
from controld.health.view import View
from controld.reconcile.limits import Limits


def assess(state: State, view: View, now: Now, limits: Limits) -> tuple[Command, ...]:
    """Commands that bring the stored liveness up to what was heard. Expiries are bounded a tick."""
    by_node = holding(state)
    marks: list[Command] = []
    expiries: list[Command] = []
    for uid in sorted(state.nodes):
        node = state.nodes[uid]
        leases = by_node.get(uid, [])
        mark = _mark(node, view, now.boottime_ns, limits)
        if mark is not None:
            marks.append(mark)
        expiries += _expired(node, leases, state, view, now.boottime_ns, limits)
    return (*marks, *expiries[: limits.expiries_per_tick_max])


def _mark(node: Node, view: View, now_ns: int, limits: Limits) -> Command | None:
    session = view.sessions.get(node.uid)
    silent_ns = view.silent_ns(node.uid, now_ns)
    heard = session is not None and session.incarnation == node.incarnation and session.last_receipt_ns is not None
    if session is None or not heard:
        quiet = silent_ns >= limits.reconnect_ns
    else:
        quiet = session.arrivals.suspect(silent_ns)
    if quiet:
        return MarkSuspect(node.incarnation) if node.liveness is Liveness.LIVE else None
    # Only a beat that was heard brings a session back, never the mere absence of suspicion.
    return MarkLive(node.incarnation) if heard and node.liveness is not Liveness.LIVE else None


def _expired(
    node: Node, leases: list[tuple[Generation, Member]], state: State, view: View, now_ns: int, limits: Limits
) -> list[Command]:
    silent_ns = view.silent_ns(node.uid, now_ns)
    session = view.sessions.get(node.uid)
    expired: dict[Incarnation, list[SlotId]] = {}
    longest_ns = limits.session_fence_after_ns
    for generation, member in leases:
        job = state.jobs.get(generation.job)
        fence_after_ns = job.spec.fence_after_ns if job is not None else limits.session_fence_after_ns
        if member.incarnation == node.incarnation:
            longest_ns = max(longest_ns, fence_after_ns)
            elapsed_ns = silent_ns
        else:
            # A former life of the node renewed last before this one was first heard.
            heard_ns = session.since_ns if session is not None else view.started_ns
            elapsed_ns = now_ns - heard_ns
        if elapsed_ns >= fence_after_ns + limits.grace_ns:
            expired.setdefault(member.incarnation, []).append(member.slot)
    if node.liveness is not Liveness.EXPIRED and silent_ns >= longest_ns + limits.grace_ns:
        return [MarkExpired(node.incarnation)]
    return [ExpireLeases(incarnation, tuple(slots)) for incarnation, slots in sorted(expired.items())]
