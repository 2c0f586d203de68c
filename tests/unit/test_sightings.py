"""What a replica remembers of nodes, and what makes it forget."""

from __future__ import annotations

from dataclasses import replace

from controld.core import keys
from controld.core.ids import NodeUid
from controld.core.model import Liveness, Node
from controld.core.state import Change, State
from controld.health.view import Sighting
from controld.replica.sightings import Sightings
from tests.support_core import incarnation

LIFE = incarnation("n0")
UID = NodeUid("uid-n0")
NODE = Node(UID, "n0", LIFE, Liveness.LIVE, "addr", "pidns", 1000, 1 << 30)
SUSPECT = replace(NODE, liveness=Liveness.SUSPECT)


def commits(*nodes: Node) -> Sightings:
    """Seen at 10, 20, 30... ns as revisions 1, 2, 3..."""
    sightings = Sightings()
    sightings.loaded(State(history=1), 0)
    for number, node in enumerate(nodes, start=1):
        sightings.committed([Change.put(node)], number, 10 * number)
    return sightings


def state(node: Node, revision: int, history: int = 1) -> State:
    made = State(history=history)
    made.apply([Change.put(node)], revision)
    return made


def test_a_suspicion_lasts_from_its_first_commit() -> None:
    assert commits(NODE, SUSPECT).all() == {UID: Sighting(LIFE, 10, 20)}
    assert commits(NODE, SUSPECT, replace(SUSPECT, draining=True)).all() == {UID: Sighting(LIFE, 10, 20)}


def test_it_ends_when_the_node_is_back_and_begins_anew_after_that() -> None:
    assert commits(NODE, SUSPECT, NODE).all() == {UID: Sighting(LIFE, 10)}
    assert commits(NODE, SUSPECT, NODE, SUSPECT).all() == {UID: Sighting(LIFE, 10, 40)}


def test_another_life_is_another_matter() -> None:
    other = replace(SUSPECT, incarnation=incarnation("n0", "g2"))
    assert commits(SUSPECT, other).all() == {UID: Sighting(other.incarnation, 20, 20)}


def test_a_node_that_is_forgotten_is_forgotten_here_too() -> None:
    sightings = commits(SUSPECT)
    sightings.committed([Change(keys.node(UID), None)], 2, 20)
    assert sightings.all() == {}


def test_what_was_seen_outlasts_a_load_only_if_the_record_was_not_touched() -> None:
    kept = commits(NODE, SUSPECT)
    kept.loaded(state(SUSPECT, 2), 99)
    assert kept.all() == {UID: Sighting(LIFE, 10, 20)}
    touched = commits(NODE, SUSPECT)
    touched.loaded(state(SUSPECT, 4), 99)  # LIVE and SUSPECT again, for all that is known
    assert touched.all() == {UID: Sighting(LIFE, 99, 99)}


def test_a_restore_makes_it_void_although_revisions_come_up_again() -> None:
    sightings = commits(NODE, SUSPECT)
    sightings.loaded(state(SUSPECT, 2, history=2), 99)
    assert sightings.all() == {UID: Sighting(LIFE, 99, 99)}
