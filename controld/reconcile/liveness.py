"""Beats -> LIVE, SUSPECT, EXPIRED, and leases that ran out. Silence is judged by this leader's clock alone."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from controld.core.commands import Command, ExpireLeases, MarkExpired, MarkLive, MarkSuspect, Now
from controld.core.ids import Incarnation, NodeUid, SlotId
from controld.core.model import Generation, Liveness, Member, Node
from controld.core.spec import SECOND_NS
from controld.core.state import State
from controld.health.phi import PATIENCE_MIN_NS
from controld.health.view import View
from controld.reconcile.limits import Limits

QUIET_NS: Final = 2 * SECOND_NS
"""Two beats: of a node that was heard since then nothing is due."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """`look_again_ns`: BOOTTIME at which silence alone will next mean something; None: nothing is due."""

    commands: tuple[Command, ...]
    look_again_ns: int | None


def assess(state: State, view: View, now: Now, limits: Limits) -> Assessment:
    """Commands that bring the stored liveness up to what was heard. Expiries are bounded a tick.

    Of most nodes a beat came a moment ago: nothing can be due of them, and each is looked at no further.
    """
    now_ns = now.boottime_ns
    earliest_ns = _earliest_after_ns(state, limits)
    recent_ns = now_ns - min(QUIET_NS, earliest_ns // 2)
    due_ns: list[int] = []
    quiet: set[NodeUid] = set()
    oldest_ns = now_ns
    for uid, node in state.nodes.items():
        session = view.sessions.get(uid)
        heard_ns = None if session is None else session.last_receipt_ns
        if (
            session is not None
            and heard_ns is not None
            and heard_ns > recent_ns
            and node.liveness is Liveness.LIVE
            and session.incarnation == node.incarnation
        ):
            oldest_ns = min(oldest_ns, heard_ns)
        else:
            quiet.add(uid)
    due_ns.append(oldest_ns + earliest_ns)
    by_node = _leases(state, quiet)
    marks: list[Command] = []
    expiries: list[Command] = []
    for uid in sorted(quiet | by_node.keys()):
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


def _earliest_after_ns(state: State, limits: Limits) -> int:
    """The shortest silence that may mean anything of a node that was heard."""
    fences_ns = (job.spec.fence_after_ns for job in state.jobs.values())
    return min(PATIENCE_MIN_NS, min(fences_ns, default=limits.session_fence_after_ns) + limits.grace_ns)


def _leases(state: State, quiet: Set[NodeUid]) -> dict[NodeUid, list[tuple[Generation, Member]]]:
    """What is held on quiet nodes, and on those of which a former life holds something."""
    nodes = state.nodes
    reborn: set[NodeUid] = set()
    for generation in state.leased():
        for member in generation.members:
            node = nodes.get(member.node)
            if node is not None and member.incarnation != node.incarnation and member.lease.holds:
                reborn.add(member.node)
    wanted = quiet | reborn
    found: dict[NodeUid, list[tuple[Generation, Member]]] = {}
    if wanted:
        for generation in state.leased():
            for member in generation.members:
                if member.node in wanted and member.node in nodes and member.lease.holds:
                    found.setdefault(member.node, []).append((generation, member))
    return found


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
