"""What a watch of etcd is turned into: whole commits in order, each once, and never less than there was."""

from __future__ import annotations

import pytest

from controld.core.ids import Epoch
from controld.store.etcd_keys import Claim, Keys, history_text
from controld.store.etcd_txn import Office
from controld.store.etcd_watch import Feed, Seen
from controld.store.etcd_wire import WireError
from controld.store.port import Commit, CompactedError, Incumbent, LeaderSeen, Leadership, StoredChange
from virialpb.etcd.v1 import etcd_pb2 as pb

KEYS = Keys("t")
CLAIM = Claim("a", "h:1", "n1", evidence=True)


def put(key: bytes, revision: int, value: bytes = b"v") -> pb.Event:
    return pb.Event(type=pb.Event.PUT, kv=pb.KeyValue(key=key, value=value, mod_revision=revision))


def deleted(key: bytes, revision: int) -> pb.Event:
    return pb.Event(type=pb.Event.DELETE, kv=pb.KeyValue(key=key, mod_revision=revision))


def record(key: str, revision: int, value: bytes = b"v") -> pb.Event:
    return put(KEYS.record(key), revision, value)


def answer(*events: pb.Event, fragment: bool = False) -> pb.WatchResponse:
    # The header runs ahead of the events: nothing may be concluded from it.
    return pb.WatchResponse(header=pb.ResponseHeader(revision=1_000), events=events, fragment=fragment)


def feed(position: int = 10, office: Office | None = None) -> Feed:
    return Feed(KEYS, position, office or Office(history=1))


def taken(fed: Feed, *events: pb.Event, fragment: bool = False) -> list[Seen]:
    return list(fed.take(answer(*events, fragment=fragment)))


def test_a_revision_is_one_commit_with_its_changes_in_order() -> None:
    fed = feed()
    assert taken(fed, record("b", 11), deleted(KEYS.record("a"), 11), record("c", 12, b"")) == [
        Commit(11, (StoredChange("b", b"v"), StoredChange("a", None))),
        Commit(12, (StoredChange("c", b""),)),
    ]
    assert fed.position == 12


def test_the_overlap_at_the_start_and_what_comes_again_are_dropped() -> None:
    fed = feed(position=10)
    assert taken(fed, record("x", 10)) == []
    assert taken(fed, record("x", 10), record("x", 11)) == [Commit(11, (StoredChange("x", b"v"),))]
    assert taken(fed, record("x", 9), record("x", 10), record("x", 11)) == []
    assert taken(fed, record("x", 12)) == [Commit(12, (StoredChange("x", b"v"),))]


def test_the_header_is_no_position() -> None:
    fed = feed(position=10)
    assert taken(fed) == []
    assert fed.position == 10


def test_a_revision_that_comes_in_two_parts_is_a_gap_and_not_a_repetition() -> None:
    fed = feed()
    taken(fed, record("x", 11))
    with pytest.raises(CompactedError):
        taken(fed, record("y", 11))


def test_fragments_wait_for_their_end() -> None:
    fed = feed()
    assert taken(fed, record("x", 11), record("y", 11), fragment=True) == []
    assert fed.position == 10
    assert taken(fed, record("z", 11)) == [Commit(11, tuple(StoredChange(k, b"v") for k in "xyz"))]


def test_leadership_and_its_evidence_are_seen_where_they_change() -> None:
    fed = feed()
    leader = Leadership("a", 11, Epoch(1, 11))
    begin = (put(KEYS.leader, 11, CLAIM.encode()), put(KEYS.evidence, 11, b"n1"))
    assert taken(fed, *begin) == [LeaderSeen(11, Incumbent(leader, "h:1"))]
    assert taken(fed, put(KEYS.evidence, 12, b"n1")) == [], "the same evidence under another lease"
    assert taken(fed, deleted(KEYS.evidence, 13)) == [LeaderSeen(13, Incumbent(leader, "h:1", alive=False))]
    assert taken(fed, put(KEYS.evidence, 14, b"other")) == [], "that of another leadership is none of this one"
    assert taken(fed, put(KEYS.evidence, 15, b"n1")) == [LeaderSeen(15, Incumbent(leader, "h:1"))]
    assert taken(fed, deleted(KEYS.leader, 16), deleted(KEYS.evidence, 16)) == [LeaderSeen(16, None)]


def test_a_leadership_without_evidence_is_never_shown_as_dead() -> None:
    quiet = Claim("a", "", "n1", evidence=False)
    (seen,) = taken(feed(), put(KEYS.leader, 11, quiet.encode()), deleted(KEYS.evidence, 11))
    assert isinstance(seen, LeaderSeen)
    assert seen.incumbent is not None
    assert seen.incumbent.alive


def test_who_led_before_it_began_is_known() -> None:
    office = Office(1, pb.KeyValue(key=KEYS.leader, value=CLAIM.encode(), mod_revision=5), b"n1")
    (seen,) = taken(feed(office=office), deleted(KEYS.evidence, 11))
    assert seen == LeaderSeen(11, Incumbent(Leadership("a", 5, Epoch(1, 5)), "h:1", alive=False))


@pytest.mark.parametrize(
    "event",
    [
        put(KEYS.history, 12, history_text(2)),
        put(KEYS.history, 12, history_text(1, restoring=True)),
        deleted(KEYS.history, 12),
    ],
)
def test_a_restore_ends_it(event: pb.Event) -> None:
    with pytest.raises(CompactedError):
        taken(feed(), event)


def test_etcds_own_end_is_told_apart() -> None:
    with pytest.raises(CompactedError) as compacted:
        list(feed().take(pb.WatchResponse(canceled=True, compact_revision=40)))
    assert compacted.value.revision == 40
    with pytest.raises(WireError, match="no leader"):
        list(feed().take(pb.WatchResponse(canceled=True, cancel_reason="etcdserver: no leader")))
