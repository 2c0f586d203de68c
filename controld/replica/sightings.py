"""What a replica has seen happen to nodes, and when by its own clock: in commits, whoever made them.

It lives as long as the process, through its leaderships and what is loaded between them: else each election would begin
the lease of a dead node anew (C8).
"""

from __future__ import annotations

from collections.abc import Iterable

from controld.core import keys
from controld.core.ids import NodeUid
from controld.core.model import Liveness, Node
from controld.core.state import Change, State
from controld.health.view import Sighting

_NODES = keys.node(NodeUid(""))


class Sightings:
    """Each with the revision of the node's record that it stands for."""

    def __init__(self) -> None:
        self._history = 0
        self._seen: dict[NodeUid, tuple[Sighting, int]] = {}

    def all(self) -> dict[NodeUid, Sighting]:
        return {uid: sighting for uid, (sighting, _) in self._seen.items()}

    def committed(self, changes: Iterable[Change], revision: int, now_ns: int) -> None:
        """A commit, in its turn: none between this and the last was missed."""
        for change in changes:
            if isinstance(change.record, Node):
                known = self._seen.get(change.record.uid)
                former = known[0] if known is not None else None
                self._seen[change.record.uid] = (_sighting(change.record, former, now_ns), revision)
            elif change.record is None and change.key.startswith(_NODES):
                self._seen.pop(NodeUid(change.key.removeprefix(_NODES)), None)

    def loaded(self, state: State, now_ns: int) -> None:
        """Commits may have been missed: what was seen before holds of records that were not touched meanwhile.

        A restore moves revisions back, so it makes all of it void.
        """
        former = self._seen if state.history == self._history else {}
        self._seen, self._history = {}, state.history
        for node in state.nodes.values():
            revision = state.modified.get(keys.of(node), 0)
            known = former.get(node.uid)
            same = known is not None and known[1] == revision
            self._seen[node.uid] = (_sighting(node, known[0] if same and known else None, now_ns), revision)


def _sighting(node: Node, former: Sighting | None, now_ns: int) -> Sighting:
    same = former if former is not None and former.incarnation == node.incarnation else None
    since_ns = now_ns if same is None else same.since_ns
    if node.liveness is not Liveness.SUSPECT:
        return Sighting(node.incarnation, since_ns)
    suspect_ns = None if same is None else same.suspect_since_ns
    return Sighting(node.incarnation, since_ns, now_ns if suspect_ns is None else suspect_ns)
