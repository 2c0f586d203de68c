"""What comes over the guardian's sockets is checked field by field."""

from __future__ import annotations

from typing import Any

import pytest

from noded.run import protocol
from noded.run.fields import BadMessage, get_metrics, get_slot
from noded.run.protocol import (
    LINE_BYTES_MAX,
    Event,
    Exit,
    ExitReason,
    Fencing,
    Hello,
    LineSplitter,
    PrepareRequest,
    Progress,
    SlotState,
    SlotStatus,
    TaskCall,
    TaskExit,
    TaskProgress,
    TaskSpec,
    Token,
)

TOKEN = Token("job-1", 4, (2, 99))
EXIT = Exit(ExitReason.OOM, None, 9, 123, "killed ü", True)
STATUS = SlotStatus(
    slot="job-1.4.s0",
    token=TOKEN,
    rank=None,
    state=SlotState.EXITED,
    deadline_ns=5,
    device_keys=("a", "b"),
    pid=3,
    init_pid=2,
    start_ticks=77,
    port=29500,
    exit=EXIT,
    progress=Progress(7, {"loss": 0.25}, 9),
)
PREPARE = PrepareRequest(
    slot="job-1.4.0",
    token=TOKEN,
    spec=TaskSpec(("python", "t.py"), {"A": "b=c"}, "/tmp", "ann", "ml", 8192, 2, 500),
    deadline_ns=77,
    rank=0,
    cpu_millis=1500,
    memory_bytes=1 << 30,
    device_keys=("gpu",),
    hold_port=True,
    bind_address="127.0.0.1",
)


def through_the_wire(message: dict[str, Any]) -> dict[str, Any]:
    (line,) = LineSplitter().feed(protocol.encode_line(message))
    return protocol.decode_line(line)


def test_round_trips() -> None:
    assert protocol.status_from_json(through_the_wire(protocol.status_to_json(STATUS))) == STATUS
    assert protocol.prepare_from_json(through_the_wire(protocol.prepare_to_json(PREPARE))) == PREPARE
    hello = Hello("ab", "boot", 12, Fencing.PIDNS, (STATUS,), ())
    assert protocol.hello_from_json(through_the_wire(protocol.hello_to_json(hello))) == hello


@pytest.mark.parametrize(
    "event",
    [
        TaskExit("j.1.0", TOKEN, EXIT),
        TaskCall("j.1.0", TOKEN, "7", "checkpoint_begin", {"step": 3}),
        TaskProgress("j.1.0", TOKEN, Progress(3, {}, 8)),
    ],
)
def test_events_round_trip(event: Event) -> None:
    assert protocol.event_from_json(through_the_wire(protocol.event_to_json(event))) == event


def test_lines_are_cut_wherever_the_stream_was() -> None:
    stream = b'{"a":1}\n\n{"b":2}\n{"c'
    for cut in range(len(stream)):
        splitter = LineSplitter()
        lines = splitter.feed(stream[:cut]) + splitter.feed(stream[cut:])
        assert lines == [b'{"a":1}', b'{"b":2}']


def test_a_line_is_bounded_whether_or_not_it_ends() -> None:
    for tail in (b"", b"\n"):
        with pytest.raises(BadMessage, match="longer"):
            LineSplitter().feed(b"x" * LINE_BYTES_MAX + tail)
    with pytest.raises(BadMessage, match="larger"):
        protocol.encode_line({"a": "x" * LINE_BYTES_MAX})


@pytest.mark.parametrize(
    "line",
    [b"nope", b"[1]", b"7", b"[" * 100_000, b"\xff\xfe", b'{"a":"\\ud800"}', b'{"\\uDFFF":1}', b'{"a":"\xed\xa0\x80"}'],
)
def test_what_is_not_an_object(line: bytes) -> None:
    with pytest.raises(BadMessage):
        protocol.decode_line(line)


def test_a_whole_surrogate_pair_is_text() -> None:
    assert protocol.decode_line(b'{"a":"\\ud83d\\ude00"}') == {"a": "\U0001f600"}


def test_the_name_of_a_metric_is_bounded() -> None:
    """It goes into every beat of the node: one that is too long for a beat would cut the node off."""
    longest = "\U0001f600" * 64
    assert get_metrics({"metrics": {longest: 1}}, "metrics") == {longest: 1.0}
    with pytest.raises(BadMessage, match="256 bytes"):
        get_metrics({"metrics": {longest + "x": 1}}, "metrics")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"slot": "../../etc"}, "slot"),
        ({"slot": "a/b"}, "slot"),
        ({"slot": ".hidden"}, "slot"),
        ({"slot": 7}, "slot"),
        ({"token": {"job": "j", "generation": -1, "epoch": [0, 1]}}, "generation"),
        ({"token": {"job": "j", "generation": 1, "epoch": [0]}}, "epoch"),
        ({"deadline_ns": True}, "deadline_ns"),
        ({"deadline_ns": 1 << 63}, "deadline_ns"),
        ({"device_keys": "gpu"}, "device_keys"),
        ({"device_keys": [1]}, "device_keys"),
        ({"hold_port": "yes"}, "hold_port"),
        ({"spec": {"argv": []}}, "argv"),
        ({"spec": {"argv": ["a\0b"]}}, "argv"),
        ({"spec": {"argv": ["a"], "env": {"A=B": "c"}}}, "env"),
        ({"spec": {"argv": ["a"], "env": {"A": 1}}}, "env"),
        ({"spec": {"argv": ["a"], "cwd": "relative"}}, "cwd"),
        ({"spec": {"argv": ["a"], "log_files_max": 0}}, "log_files_max"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(BadMessage, match=named):
        protocol.prepare_from_json({**protocol.prepare_to_json(PREPARE), **change})


@pytest.mark.parametrize("metrics", [{"a": "1"}, {"a": True}, {"a": 10**400}, {str(n): n for n in range(257)}, [1]])
def test_metrics_are_few_and_numbers(metrics: object) -> None:
    with pytest.raises(BadMessage, match="metrics"):
        get_metrics({"metrics": metrics}, "metrics")


def test_slot_names_of_the_contract_fit() -> None:
    for name in ("train-7.12.0", "01J9Z3.1.s2"):
        assert get_slot({"slot": name}) == name


def test_newer_tokens_are_larger() -> None:
    ordered = [Token("j", 9, (0, 900)), Token("j", 2, (1, 10)), Token("j", 2, (1, 11)), Token("j", 3, (1, 12))]
    assert sorted(ordered, key=lambda token: token.order) == ordered
