"""The stored form of records: complete, loud about what it does not know, defaults for what was not yet there."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Any, cast, get_args

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from controld.core import keys
from controld.core.ids import Incarnation, JobId, NodeUid
from controld.core.model import Cluster, Event, Generation, Job, JobState, Node, Phase, Record, Request
from controld.core.spec import GangSpec, JobSpec, Resources, TaskSpec
from controld.store import codec
from controld.store.port import RecordError
from tests.support_records import RECORDS, field_types, filled, is_optional, is_structure, reachable
from virialpb.store.v1 import joins_pb2
from virialpb.store.v1 import records_pb2 as pb

STRUCTURES = sorted({kind for record in RECORDS for kind in reachable(record)}, key=lambda kind: kind.__name__)
MESSAGES: dict[str, type[Message]] = {
    name: getattr(module, name) for module in (pb, joins_pb2) for name in module.DESCRIPTOR.message_types_by_name
}


@pytest.mark.parametrize("kind", STRUCTURES, ids=lambda kind: kind.__name__)
def test_every_field_of_the_model_has_its_place(kind: type) -> None:
    fields = MESSAGES[kind.__name__].DESCRIPTOR.fields_by_name
    assert set(fields) == set(field_types(kind))


@pytest.mark.parametrize("kind", STRUCTURES, ids=lambda kind: kind.__name__)
def test_whether_a_field_was_written_can_be_told_where_its_default_is_not_zero(kind: type) -> None:
    """Proto3 leaves zeros out: without `optional`, "written as 0" and "not yet there" would read the same."""
    if not dataclasses.is_dataclass(kind):
        return
    descriptor = MESSAGES[kind.__name__].DESCRIPTOR
    for field in dataclasses.fields(kind):
        stored = descriptor.fields_by_name[field.name]
        optional = is_optional(field_types(kind)[field.name])
        has_default = field.default is not dataclasses.MISSING and bool(field.default)
        text_of_closed_set = isinstance(field.default, StrEnum)  # these are never stored empty
        if optional or (has_default and not text_of_closed_set and not isinstance(field.default, tuple)):
            assert stored.has_presence, f"{kind.__name__}.{field.name} must be `optional` in records.proto"


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_no_field_is_forgotten(kind: type[Record]) -> None:
    record: Record = filled(kind)
    assert codec.decode(keys.of(record), codec.encode(record)) == record


@pytest.mark.row("H3", defect="forgotten_field")
@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_each_forgotten_field_would_be_seen(kind: type[Record]) -> None:
    """The test above can fail: clearing any stored field changes what is read, or makes it unreadable."""
    record: Record = filled(kind)
    message = MESSAGES[kind.__name__].FromString(codec.encode(record))
    for index, part in enumerate(parts_of(message)):
        for field, _ in part.ListFields():
            without = MESSAGES[kind.__name__]()
            without.CopyFrom(message)
            parts_of(without)[index].ClearField(field.name)
            assert not reads_as(record, without.SerializeToString()), f"{kind.__name__}: {field.full_name}"


def parts_of(message: Message) -> list[Message]:
    found = [message]
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            inner: list[Message] = list(value) if field.is_repeated else [value]
            found += [part for child in inner[:1] for part in parts_of(child)]
    return found


def reads_as(record: Record, data: bytes) -> bool:
    try:
        return codec.decode(keys.of(record), data) == record
    except RecordError:
        return False


def test_fields_that_a_newer_controller_wrote_are_passed_over() -> None:
    request = Request(request_id="r", fingerprint="f", subject="s", time_unix_ns=5)
    unknown = b"\xfa\x3f\x03new"  # field 1023, text
    assert codec.decode(keys.of(request), codec.encode(request) + unknown) == request


Path = tuple[str | int, ...]


def closed_sets(annotation: Any, path: Path = ()) -> list[tuple[Path, type[StrEnum]]]:
    """(path of fields, closed set) of every name in a record that a reader must know."""
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return [(path, annotation)]
    if is_structure(annotation):
        fields = field_types(cast("type", annotation))
        return [found for name, hint in fields.items() for found in closed_sets(hint, (*path, name))]
    arguments = get_args(annotation)
    if is_optional(annotation):
        return closed_sets(arguments[0], path)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return closed_sets(arguments[0], (*path, 0))
    return []


CLOSED_SETS = [
    pytest.param(kind, path, names, id=".".join([kind.__name__, *map(str, path)]))
    for kind in RECORDS
    for path, names in closed_sets(kind)
]


@pytest.mark.parametrize(("record_type", "path", "names"), CLOSED_SETS)
def test_an_unknown_name_is_refused_naming_the_key(record_type: type[Record], path: Path, names: type[StrEnum]) -> None:
    record: Record = filled(record_type)
    message = MESSAGES[record_type.__name__].FromString(codec.encode(record))
    holder: Any = message
    for step in path[:-1]:
        holder = holder[step] if isinstance(step, int) else getattr(holder, step)
    last = path[-1]
    if isinstance(last, int):
        holder[last] = "FROM_THE_FUTURE"
    else:
        setattr(holder, last, "FROM_THE_FUTURE")
    with pytest.raises(RecordError) as refused:
        codec.decode(keys.of(record), message.SerializeToString())
    words = str(refused.value)
    assert words.startswith(keys.of(record) + ":")
    assert "FROM_THE_FUTURE" in words
    assert names.__name__ in words


def test_every_closed_set_was_walked() -> None:
    assert len(CLOSED_SETS) >= 15


@pytest.mark.row("H3")
def test_what_was_not_yet_there_reads_as_the_default_of_the_model() -> None:
    spec = JobSpec(name="", gang=GangSpec(ranks=0), resources=Resources(0, 0), task=TaskSpec(command=()))
    assert codec.decode("jobs/a", pb.Job(id="a", state="PENDING", spec=pb.JobSpec()).SerializeToString()) == Job(
        id=JobId("a"), spec=spec, state=JobState.PENDING, create_time_unix_ns=0
    )
    generation = pb.Generation(job="a", number=1, phase="PREPARING")
    assert codec.decode("generations/a/00000001", generation.SerializeToString()) == Generation(
        job=JobId("a"), number=1, phase=Phase.PREPARING, members=()
    )
    assert codec.decode("cluster", b"") == Cluster(uid="")


@pytest.mark.parametrize(
    ("key", "message", "field"),
    [
        ("generations/a/00000001", pb.Generation(job="a", number=1), "phase"),
        ("generations/a/00000001", pb.Generation(job="a", number=1, phase="GO", members=[pb.Member()]), "lease"),
        ("checkpoints/a/c", pb.Checkpoint(job="a", id="c", tier="local"), "state"),
        ("jobs/a", pb.Job(id="a", spec=pb.JobSpec()), "state"),
        ("jobs/a", pb.Job(id="a", state="PENDING"), "spec"),
        ("nodes/n", pb.Node(uid="n"), "liveness"),
    ],
)
def test_what_decides_about_devices_and_data_is_never_guessed(key: str, message: Message, field: str) -> None:
    with pytest.raises(RecordError, match=f"{key}: .*{field}"):
        codec.decode(key, message.SerializeToString())


@pytest.mark.parametrize(
    "record",
    [
        Cluster(uid="c", job_counter=2**63),
        Event(kind="job.created", numbers=(("x", -(2**63) - 1),)),
        Request(request_id="r", fingerprint="\ud800", subject="", time_unix_ns=0),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(record: Record) -> None:
    with pytest.raises(RecordError, match=f"^{keys.of(record)}: cannot be stored: "):
        codec.encode(record)


def test_a_record_under_the_key_of_another_is_refused() -> None:
    request = Request(request_id="r1", fingerprint="", subject="", time_unix_ns=0)
    with pytest.raises(RecordError, match="requests/r2: holds the record of requests/r1"):
        codec.decode("requests/r2", codec.encode(request))


@pytest.mark.parametrize("key", ["", "queues/q", "jobsx/a"])
def test_a_key_of_an_unknown_kind_is_refused(key: str) -> None:
    with pytest.raises(RecordError, match="unknown kind of key"):
        codec.decode(key, b"")


def test_damaged_bytes_are_refused() -> None:
    with pytest.raises(RecordError, match="jobs/a: the stored bytes are damaged"):
        codec.decode("jobs/a", b"\x0a\xff")


def test_unknown_is_not_zero() -> None:
    """A link's current speed of None, a spare's missing rank, an attribute's kind: all kept apart from 0 and ""."""
    node: Node = filled(Node)
    link = dataclasses.replace(node.inventory.links[0], current_bytes_per_second=None, current_width_lanes=0)
    inventory = dataclasses.replace(
        node.inventory, links=(link,), attributes=(("a", 0), ("b", False), ("c", ""), ("d", True), ("e", 1), ("f", "1"))
    )
    stored = dataclasses.replace(node, inventory=inventory, incarnation=Incarnation(NodeUid(""), "", ""))
    read = codec.decode(keys.of(stored), codec.encode(stored))
    assert read == stored
    assert isinstance(read, Node)
    kinds = [type(value) for _, value in read.inventory.attributes]
    assert kinds == [int, bool, str, bool, int, str]  # equality alone would take True for 1
