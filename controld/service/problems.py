"""What is wrong with the cluster, in words, each with what to do. Empty when nothing is."""

from __future__ import annotations

from collections.abc import Iterable

from controld.core.model import JobState, Liveness, Node
from controld.core.state import State
from controld.health.view import View
from controld.reconcile.snapshot import has_stuck
from controld.replica.replica import Replica

Problems = list[str]
_NAMES_MAX = 5


def problems(state: State, view: View) -> Problems:
    nodes = sorted(state.nodes.values(), key=lambda node: node.name)
    found: Problems = []
    if not nodes and any(not job.state.ended for job in state.jobs.values()):
        found.append("no node has joined, so no job can start: start noded on at least one host")
    _add(found, "not heard from", "see whether noded runs there", _with(nodes, Liveness.SUSPECT))
    _add(
        found,
        "lost",
        "their leases have ended; start noded there again, or `virial remove-node` what is gone for good",
        _with(nodes, Liveness.EXPIRED),
    )
    silent = [n for n in nodes if n.liveness is Liveness.LIVE and not _reported(n, view)]
    _add(found, "without an inventory yet", "no work goes there until noded has reported one", silent)
    unguarded = [n for n in nodes if (s := view.sessions.get(n.uid)) is not None and s.connected and not s.guardian_ok]
    _add(found, "whose guardian does not answer", "no lease is renewed there; restart noded", unguarded)
    stuck = [n for n in nodes if (s := view.sessions.get(n.uid)) is not None and has_stuck(s)]
    _add(found, "with a task that SIGKILL does not end", "no new work goes there; reboot it", stuck)
    failed = sum(1 for job in state.jobs.values() if job.state is JobState.FAILED)
    if failed:
        found.append(f"{failed} failed job(s): `virial job JOB` shows the first error of each")
    return found


def problems_of_replicas(replica: Replica) -> Problems:
    """What is wrong among several controllers, as one of them sees it."""
    if replica.leads:
        return [
            f"controller {address} does not listen to the leader, so it could not take over at once: see whether "
            "controld and its store member run there, and name this cluster's store"
            for address in replica.unheard
        ]
    leadership = replica.leadership
    who = "nobody leads at the moment" if leadership is None else f"{leadership.identity} leads"
    return [f"answered by {replica.place.identity}, which follows ({who}): what only the leader hears is not in it"]


def _with(nodes: Iterable[Node], liveness: Liveness) -> list[Node]:
    return [node for node in nodes if node.liveness is liveness]


def _reported(node: Node, view: View) -> bool:
    session = view.sessions.get(node.uid)
    return session is not None and session.reported


def _add(found: Problems, what: str, todo: str, nodes: list[Node]) -> None:
    if not nodes:
        return
    names = ", ".join(node.name for node in nodes[:_NAMES_MAX])
    more = f" and {len(nodes) - _NAMES_MAX} more" if len(nodes) > _NAMES_MAX else ""
    found.append(f"{len(nodes)} node(s) {what} ({names}{more}): {todo}")
