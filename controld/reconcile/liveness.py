"""Beats -> LIVE, SUSPECT, EXPIRED, and leases that ran out. Silence is judged by this leader's clock alone."""

from __future__ import annotations

from dataclasses import dataclass

from controld.core.capacity import holding
from controld.core.commands import Command, ExpireLeases, MarkExpired, MarkLive, MarkSuspect, Now
from controld.core.ids import Incarnation, SlotId
from controld.core.model import Generation, Liveness, Member, Node
from controld.core.state import State
from controld.health.view import View
from controld.reconcile.limits import Limits


@dataclass(frozen=True, slots=True)
class Assessment:
    """`look_again_ns`: BOOTTIME at which silence alone will next mean something; None: nothing is due."""

    commands: tuple[Command, ...]
    look_again_ns: int | None


def assess(state: State, view: View, now: Now, limits: Limits) -> Assessment:
    """Commands that bring the stored liveness up to what was heard. Expiries are bounded a tick."""
    by_node = holding(state)
    now_ns = now.boottime_ns
    marks: list[Command] = []
    expiries: list[Command] = []
    due_ns: list[int] = []
    for uid in sorted(state.nodes):
        node = state.nodes[uid]
        mark, suspect_ns = _mark(node, view, now_ns, limits)
        if mark is not None:
            marks.append(mark)
        due_ns.append(suspect_ns)
        expired, expire_ns = _expired(node, by_node.get(uid, []), state, view, now_ns, limits)
        expiries += expired
        due_ns += expire_ns
    coming = [at_ns for at_ns in due_ns if at_ns > now_ns]
    return Assessment((*marks, *expiries[: limits.expiries_per_tick_max]), min(coming, default=None))


def heard_again(node: Node, view: View, now_ns: int) -> bool:
    """Whether this life of the node beats, whatever is stored of it: what says so is committed next."""
    session = view.sessions.get(node.uid)
    if session is None or session.incarnation != node.incarnation or session.last_receipt_ns is None:
        return False
    return now_ns - session.last_receipt_ns < session.arrivals.suspect_after_ns()


def _mark(node: Node, view: View, now_ns: int, limits: Limits) -> tuple[Command | None, int]:
    """What to mark the node now, and when it becomes suspect if nothing is heard."""
    session = view.sessions.get(node.uid)
    if session is not None and session.incarnation == node.incarnation and session.last_receipt_ns is not None:
        patience_ns = session.arrivals.suspect_after_ns()
    else:
        patience_ns = limits.reconnect_ns
    silent_ns = view.silent_ns(node.uid, now_ns)
    suspect_ns = now_ns - silent_ns + patience_ns
    if silent_ns >= patience_ns:
        return (MarkSuspect(node.incarnation) if node.liveness is Liveness.LIVE else None), suspect_ns
    # Only a beat that was heard brings a session back, never the mere absence of suspicion.
    back = node.liveness is not Liveness.LIVE and heard_again(node, view, now_ns)
    return (MarkLive(node.incarnation) if back else None), suspect_ns


def _expired(
    node: Node, leases: list[tuple[Generation, Member]], state: State, view: View, now_ns: int, limits: Limits
) -> tuple[list[Command], list[int]]:
    """Expiries that are due now, and when each lease of the node would run out in silence."""
    silent_ns = view.silent_ns(node.uid, now_ns)
    expired: dict[Incarnation, list[SlotId]] = {}
    longest_ns = limits.session_fence_after_ns
    due_ns: list[int] = []
    for generation, member in leases:
        job = state.jobs.get(generation.job)
        fence_after_ns = job.spec.fence_after_ns if job is not None else limits.session_fence_after_ns
        if member.incarnation == node.incarnation:
            longest_ns = max(longest_ns, fence_after_ns)
            elapsed_ns = silent_ns
        else:
            # A former life of the node renewed last before this one was first heard.
            elapsed_ns = now_ns - view.life_since_ns(node.incarnation)
        due_ns.append(now_ns - elapsed_ns + fence_after_ns + limits.grace_ns)
        if due_ns[-1] <= now_ns:
            expired.setdefault(member.incarnation, []).append(member.slot)
    if node.liveness is not Liveness.EXPIRED and silent_ns >= longest_ns + limits.grace_ns:
        return [MarkExpired(node.incarnation)], due_ns
    return [ExpireLeases(incarnation, tuple(slots)) for incarnation, slots in sorted(expired.items())], due_ns
