"""What commands print. JSON is an interface: its keys and types are golden, in tests/golden/cli/schema.json.

A change there that is wanted: VIRIAL_REWRITE_GOLDEN=1 pytest tests/unit/test_cli_output.py, and a line in CHANGELOG.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from virial.cli import events, jobs, logs, nodes, status, submit, top
from virial.cli.frame import Session
from virial.cli.printer import MAPPINGS, Output, Printer, document
from virial.errors import NotFoundError
from virial.models import CheckpointPolicy, Durability, Gang, JobSpec, Reading, Resources, TaskSpec, Writes
from virial.testing import FakeClient, FakeCluster

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "cli" / "schema.json"


@dataclass(frozen=True)
class FakeSession(Session):
    fake: FakeClient = field(kw_only=True)

    def client(self, timeout_s: float = 0) -> FakeClient:
        return self.fake


def story() -> FakeCluster:
    """A job that was restarted and saved, one that waits; a lost node, a held one."""
    cluster = FakeCluster()
    cluster.add_nodes(5, devices={"accelerator": 1, "nic": 1}, labels={"rack": "r1"})
    client = cluster.client()

    def spec(name: str, ranks: int, spares: int = 0) -> JobSpec:
        return JobSpec(
            name=name,
            gang=Gang(ranks, spares),
            task=TaskSpec(command=("train",), env=(("A", "1"),)),
            resources=Resources(1000, 1 << 30),
            writes=Writes.TOKEN,
            checkpoint=CheckpointPolicy(Durability.SHARED, "/checkpoints"),
        )

    train = client.submit_job(spec("train", 3, 1)).id
    cluster.run(3)
    cluster.checkpoint(train, 20)
    cluster.progress(train, 25)
    cluster.fail(train, 0, code=7, stderr="Traceback\n\x1b[31mboom\x1b[0m\n")
    cluster.run(10)
    cluster.progress(train, 30)
    cluster.write_log(train, "step 30\n")
    client.submit_job(spec("big", 9))
    client.place_hold("node-4", "me", "new fan", expire_after_ms=7_200_000)
    cluster.lose_node("node-2")
    cluster.run(12)
    cluster.progress(train, 35)
    cluster.run(1)
    return cluster


READING: dict[str, Callable[[Session], None]] = {
    "jobs": jobs.jobs,
    "job": lambda s: jobs.job(s, "train-1"),
    "explain": lambda s: jobs.explain(s, "big-2"),
    "nodes": nodes.nodes,
    "node": lambda s: nodes.node(s, "node-0"),
    "events": events.events,
    "status": status.status,
    "version": status.version,
    "top": lambda s: top.top(s, once=True),
    "hold": lambda s: nodes.hold(s, "node-0", "why", "someone"),
    "release": lambda s: nodes.release(s, "node-4", "me"),
    "drain": lambda s: nodes.drain(s, "node-0", "firmware"),
    "cancel": lambda s: submit.cancel(s, "train-1"),
}


@pytest.fixture
def cluster() -> FakeCluster:
    return story()


def run(cluster: FakeCluster, output: Output, command: Callable[[Session], None]) -> None:
    command(FakeSession(printer=Printer(output), fake=cluster.client()))


def schema(value: Any) -> Any:
    """The shape of a JSON value: names and types. Lists have the union of their items' shapes."""
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        return {key: mapping(item) if key in MAPPINGS else schema(item) for key, item in found.items()}
    if isinstance(value, list):
        shape: Any = None
        for item in cast("list[Any]", value):
            shape = merge(shape, schema(item))
        return [] if shape is None else [shape]
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "text" if isinstance(value, str) else "integer" if isinstance(value, int) else "number"


def mapping(value: dict[str, Any]) -> str:
    """A mapping with any keys, such as labels."""
    return "mapping to " + " or ".join(sorted({str(schema(item)) for item in value.values()}))


def merge(left: Any, right: Any) -> Any:
    sides = [left, right]
    if left is None or left == right:
        return right
    if all(isinstance(side, dict) for side in sides):
        a, b = cast("list[dict[str, Any]]", sides)
        return {key: merge(a.get(key), b[key]) if key in b else a[key] for key in {**a, **b}}
    if all(isinstance(side, list) for side in sides):
        a_items, b_items = cast("list[list[Any]]", sides)
        return [merge(a_items[0], b_items[0])] if a_items and b_items else a_items or b_items
    if "null" in sides:
        known = next(side for side in sides if side != "null")
        return f"{known} or null" if isinstance(known, str) and "null" not in known else known
    return max(map(str, sides), key=len)


def test_the_keys_and_types_of_json_are_golden(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    shapes: dict[str, Any] = {}
    for name, command in READING.items():
        run(cluster, Output.JSON, command)
        shapes[name] = schema(json.loads(capsys.readouterr().out))
    if os.environ.get("VIRIAL_REWRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(shapes, indent=1) + "\n")
    assert shapes == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("output", [Output.JSON, Output.YAML])
def test_no_text_is_an_order_to_the_terminal(output: Output, capsys: pytest.CaptureFixture[str]) -> None:
    """Among the characters beyond ASCII are orders too: U+009B begins one as ESC [ does, U+202E turns text around."""
    texts = {"orders": "\x1b[2J\x7f\x9b31m\u202e\u2028", "words": "Zürich 東京"}
    printer = Printer(output)
    printer.value(texts)
    printer.item(texts)
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.split("\n"))
    one, _, _ = out.partition("---" if output is Output.YAML else "\n{")
    assert yaml.safe_load(one) == texts
    printer.value({"words": texts["words"]})
    assert "東京" in capsys.readouterr().out


@pytest.mark.parametrize("name", READING)
def test_yaml_says_the_same_as_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(story(), Output.JSON, READING[name])
    as_json = json.loads(capsys.readouterr().out)
    run(story(), Output.YAML, READING[name])
    assert yaml.safe_load(capsys.readouterr().out) == as_json


@pytest.mark.parametrize("name", READING)
def test_tables_go_to_standard_output_plain_when_it_is_no_terminal(
    name: str, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    run(cluster, Output.TABLE, READING[name])
    printed = capsys.readouterr()
    assert printed.out.strip()
    assert printed.err == ""
    assert "\x1b" not in printed.out
    assert all(line == line.rstrip() for line in printed.out.splitlines())


def lines(cluster: FakeCluster, capsys: pytest.CaptureFixture[str], name: str) -> list[str]:
    run(cluster, Output.TABLE, READING[name])
    return capsys.readouterr().out.splitlines()


def test_the_nodes_table(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    shown = [line.split() for line in lines(cluster, capsys, "nodes")]
    assert shown[0][:3] == ["NODE", "LIVENESS", "USE"]
    assert [row[:3] for row in shown[1:]] == [
        ["node-0", "LIVE", "open"],
        ["node-1", "LIVE", "open"],
        ["node-2", "SUSPECT", "closed"],
        ["node-3", "LIVE", "open"],
        ["node-4", "LIVE", "held"],
    ]
    assert all("unknown" in row for row in shown[1:])  # the fake has no thermometer


def test_the_job_shows_its_first_error_and_what_it_was_restored_from(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n".join(lines(cluster, capsys, "job"))
    assert "first error" in text
    assert "generation 1, rank 0 on node-0: a rank failed: exited with code 7" in text
    assert "(step 20)" in text
    assert "(limit: 3 in 1h)" in text, "not all restarts count, so there may be more of them"
    assert r"\x1b[31mboom" in text


def test_explain_gives_every_reason_with_its_count(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    shown = lines(cluster, capsys, "explain")
    assert shown[0] == "big-2 is PENDING; 5 nodes considered:"
    assert "  - 1 node held from new work; `virial node` shows by whom" in shown
    assert any(line.startswith("  - 1 node not heard from") for line in shown)
    assert any("ranks needed 9" in line for line in shown)
    assert shown[-1] == "it would fit with gang.ranks: 3"


def test_logs_are_the_bytes_themselves_or_an_object_a_line(
    cluster: FakeCluster, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run(cluster, Output.TABLE, lambda s: logs.logs(s, "train-1", generation=2))
    assert capsysbinary.readouterr().out == b"step 30\n"
    run(cluster, Output.JSON, lambda s: logs.logs(s, "train-1", generation=2))
    found = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert found == [{"data": "step 30\n", "generation": 2, "rank": 0, "next_offset": 8}]


def test_submitting_prints_the_id_alone(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("{name: small, resources: {cpu: 1, memory: 1GiB}, task: {command: [x], working_directory: /}}")
    run(cluster, Output.TABLE, lambda s: submit.submit(s, str(file)))
    assert capsys.readouterr() == ("small-3\n", "")
    run(cluster, Output.TABLE, lambda s: submit.submit(s, str(file), ["gang.ranks=2"], job_id="mine"))
    assert capsys.readouterr() == ("mine\n", "")
    assert cluster.client().get_job("mine").spec.gang.ranks == 2
    run(cluster, Output.TABLE, lambda s: submit.submit(s, str(file), dry_run=True))
    assert capsys.readouterr() == (f"{file}: valid; nothing was submitted\n", "")
    assert len(cluster.client().list_jobs()) == 4


def test_followed_events_are_an_object_a_line(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    client = cluster.client()
    with pytest.raises(AssertionError, match="nothing changed"):  # the fake ends what a cluster would not
        events.events(FakeSession(printer=Printer(Output.JSON), fake=client), follow=True, job="big-2")
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["kind"] for event in found] == ["job.submitted"]


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(("filter_", "name"), [("job", "jobs/tarin-1"), ("node", "nodes/nod-1")])
def test_events_of_a_mistyped_name_are_no_empty_answer(
    cluster: FakeCluster, follow: bool, filter_: str, name: str
) -> None:
    session = FakeSession(printer=Printer(Output.TABLE), fake=cluster.client())
    with pytest.raises(NotFoundError, match=name):
        events.events(session, follow=follow, **{filter_: name.partition("/")[2]})  # pyright: ignore[reportArgumentType]


def test_what_is_unknown_is_null() -> None:
    assert document(Reading("temperature_max", None, "millidegrees_celsius", "absent", 0)) == {
        "name": "temperature_max",
        "value": None,
        "unit": "millidegrees_celsius",
        "quality": "absent",
        "age_ms": 0,
    }
