"""Log entries: registered names, one JSON object a line, and a log that cannot be written breaks nothing."""

from __future__ import annotations

import io
import json

import pytest

from controld.core.model import Event
from controld.replica.observe import LogName as ReplicaLogName
from controld.service.telemetry import LogName, make_log


class Broken(io.StringIO):
    def write(self, s: str, /) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def entries(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_entry_is_one_object_with_its_level() -> None:
    out = io.StringIO()
    log = make_log(out, level="debug")
    log(LogName.CONTROLD_STARTED, data_dir="/x\ny")
    log(ReplicaLogName.LEADER_LOST, reason="NOT_LEADER")
    log(LogName.CALL_SERVED, duration_ms=1.5)
    assert [(entry["event"], entry["level"]) for entry in entries(out)] == [
        ("controld.started", "info"),
        ("leader.lost", "warning"),
        ("call.served", "debug"),
    ]
    assert all("timestamp" in entry for entry in entries(out))


def test_the_level_holds_back_what_is_below() -> None:
    out = io.StringIO()
    log = make_log(out, level="warning")
    log(LogName.CONTROLD_STARTED)
    log.committed(Event("job.submitted"), 3)
    assert entries(out) == []


def test_a_committed_event_keeps_its_facts() -> None:
    out = io.StringIO()
    event = Event("lease.expired", job="a", node="n1", generation=2, numbers=(("ranks", 3),), cause_id="c", sequence=9)
    make_log(out).committed(event, 7)
    (entry,) = entries(out)
    assert {name: entry[name] for name in entry if name not in ("timestamp", "level")} == {
        "event": "lease.expired",
        "job": "a",
        "node": "n1",
        "generation": 2,
        "ranks": 3,
        "cause_id": "c",
        "sequence": 9,
        "revision": 7,
    }


def test_an_unexpected_error_has_its_traceback() -> None:
    out = io.StringIO()
    try:
        raise KeyError("x")
    except KeyError as error:
        make_log(out).broken(LogName.CALL_BROKEN, error)
    (entry,) = entries(out)
    assert entry["level"] == "error"
    assert "KeyError" in str(entry["exception"])


@pytest.mark.parametrize("stream", [Broken(), io.StringIO()])
def test_a_log_that_cannot_be_written_breaks_nothing(stream: io.StringIO) -> None:
    log = make_log(stream)
    if not isinstance(stream, Broken):
        stream.close()
    log(LogName.CONTROLD_STARTED)
    log.committed(Event("job.submitted"), 3)
    log.broken(LogName.CALL_BROKEN, KeyError("x"))


def test_every_name_is_noun_and_verb() -> None:
    names = [name.value for name in (*LogName, *ReplicaLogName)]
    assert len(set(names)) == len(names)
    assert all(len(name.split(".")) == 2 and all(name.split(".")) for name in names)
