"""Job specification files: what they mean, and what each mistake is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from virial.models import (
    CheckpointPolicy,
    Constraint,
    DeviceRequest,
    Durability,
    Gang,
    JobSpec,
    Resources,
    RestartPolicy,
    TaskSpec,
    Writes,
)
from virial.spec import SpecError, apply_overrides, load_spec, parse_spec, read_spec
from virial.yamlfile import YamlError, load_document

ROOT = Path(__file__).resolve().parents[2]
SECOND_NS = 1_000_000_000
MINIMAL = {"name": "a", "resources": {"cpu": 1, "memory": "1GiB"}, "task": {"command": ["true"]}}


def with_field(path: str, value: object) -> object:
    return apply_overrides(MINIMAL, {path: value})


def problems(document: object) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_spec(document)
    return [str(error) for error in caught.value.errors]


def test_the_least_there_can_be_has_every_default() -> None:
    assert parse_spec(MINIMAL) == JobSpec(
        name="a",
        task=TaskSpec(command=("true",)),
        resources=Resources(1000, 1 << 30),
    )


EVERY_FIELD = b"""
name: llama
kind: training
gang: {ranks: 8, spares: 2, spread: none}
resources:
  cpu: 1500m
  memory: 80GiB
  devices:
    - {kind: accelerator, count: 4, constraints: [{attribute: memory_bytes, operator: ge, value: 80000000000}]}
    - {kind: nic, share: 0.25}
task:
  command: [python3, train.py, --steps, 7]
  env: {B: "2", A: "1", C: 3, D: ""}
  working_directory: /srv
  user: ml
  group: ml
  grace: 0s
  log_bytes_max: 1MiB
  log_files_max: 2
lease: {fence_after: 1m30s}
writes: token
checkpoint: {durability: shared, directory: /ckpt, keep: 3, timeout: 5m}
restart: {max: 0, window: 2h, allow: [spare, requeue]}
node_constraints: [{attribute: rack, operator: IN, values: [r1, r2]}, {attribute: ssd, operator: EXISTS}]
priority: -5
fencing: strong
start_timeout: 10m
"""


def test_every_field_is_read() -> None:
    assert read_spec(EVERY_FIELD, "f") == JobSpec(
        name="llama",
        kind="training",
        gang=Gang(8, 2, "none"),
        resources=Resources(
            1500,
            80 << 30,
            (
                DeviceRequest("accelerator", 4, 1000, (Constraint("memory_bytes", "GE", ("80000000000",)),)),
                DeviceRequest("nic", 1, 250),
            ),
        ),
        task=TaskSpec(
            command=("python3", "train.py", "--steps", "7"),
            env=(("A", "1"), ("B", "2"), ("C", "3"), ("D", "")),
            working_directory="/srv",
            user="ml",
            group="ml",
            grace_ns=0,
            log_bytes_max=1 << 20,
            log_files_max=2,
        ),
        fence_after_ns=90 * SECOND_NS,
        writes=Writes.TOKEN,
        checkpoint=CheckpointPolicy(Durability.SHARED, "/ckpt", 3, 300 * SECOND_NS),
        restart=RestartPolicy(0, 7200 * SECOND_NS, ("spare", "requeue")),
        node_constraints=(Constraint("rack", "IN", ("r1", "r2")), Constraint("ssd", "EXISTS")),
        priority=-5,
        fencing="strong",
        start_timeout_ns=600 * SECOND_NS,
    )


def test_the_example_is_valid_and_its_working_directory_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = load_spec("examples/train.yaml")
    assert (spec.gang.ranks, spec.gang.spares, spec.writes) == (3, 1, Writes.TOKEN)
    assert spec.task.working_directory == str(ROOT)
    assert spec.checkpoint.directory == str(Path.home() / "virial-train")


# What is wrong, where it is put, and the whole message: it names the field and, where there is one, the nearest right
# thing.
MISTAKES: dict[str, tuple[str, Any, str]] = {
    "unknown_field": ("resource", {}, "resource: unknown field: did you mean 'resources'?"),
    "unknown_nested_field": ("gang.rank", 2, "gang.rank: unknown field: did you mean 'ranks'?"),
    "field_in_another_case": ("Fencing", "any", "Fencing: unknown field: did you mean 'fencing'?"),
    "unit_without_prefix_B": ("resources.memory", "512Mi", "512Mi': did you mean 'MiB'?"),
    "unit_missing": ("resources.memory", "512", "resources.memory: no unit in '512': did you mean '512B'?"),
    "unit_of_another_kind": ("resources.memory", "1h", "resources.memory: unknown unit 'h' in '1h'"),
    "duration_as_a_clock": ("lease.fence_after", "10:30", "lease.fence_after: '10:30' could be hours"),
    "duration_without_a_unit": ("restart.window", 60, "restart.window: no unit in '60': did you mean '60s'?"),
    "duration_of_zero": ("checkpoint.timeout", "0s", "checkpoint.timeout: '0s' is zero"),
    "cpu_in_words": ("resources.cpu", "2 cores", "resources.cpu: a space in '2 cores': did you mean '2'?"),
    "cpu_negative": ("resources.cpu", -1, "resources.cpu: '-1' is negative"),
    "cpu_too_fine": ("resources.cpu", "0.0001", "resources.cpu: '0.0001' is 0.1 thousandths of a core"),
    "ranks_none": ("gang.ranks", 0, "gang.ranks: 0 is outside 1 to 4096"),
    "ranks_as_text": ("gang.ranks", "3", "gang.ranks: expected a whole number, got the text '3'"),
    "ranks_as_boolean": ("gang.ranks", True, "gang.ranks: expected a whole number, got true"),
    "ranks_as_fraction": ("gang.ranks", 1.5, "gang.ranks: expected a whole number, got the number 1.5"),
    "spread_misspelt": ("gang.spread", "nodes", "gang.spread: unknown value 'nodes': did you mean 'node'?"),
    "writes_misspelt": ("writes", "tokens", "writes: unknown value 'tokens': did you mean 'token'?"),
    "kind_unknown": ("kind", "web", "kind: unknown value 'web'; known are training, batch, latency"),
    "fencing_misspelt": ("fencing", "stron", "fencing: unknown value 'stron': did you mean 'strong'?"),
    "durability_misspelt": ("checkpoint.durability", "share", "checkpoint.durability: unknown value 'share': did you"),
    "restart_way_misspelt": ("restart.allow", ["spares"], "restart.allow[0]: unknown value 'spares': did you mean 'sp"),
    "restart_ways_empty": ("restart.allow", [], "restart.allow: is empty; name at least one way"),
    "runtime_not_built_yet": (
        "task.runtime",
        "container",
        "task.runtime: unknown value 'container'; known are process",
    ),
    "command_as_a_shell_line": ("task.command", "python3 x.py", "task.command: expected a list, got the text 'python3"),
    "command_empty": ("task.command", [], "task.command: required field is missing: a list of the program"),
    "command_with_a_fraction": ("task.command", ["sleep", 0.5], "task.command[1]: expected a text without NUL; put"),
    "command_with_nul": ("task.command", ["a\0b"], "task.command[0]: expected a text without NUL"),
    "env_as_a_list": ("task.env", ["A=1"], "task.env: expected a mapping, got a list"),
    "env_with_a_boolean": ("task.env", {"A": True}, "task.env.A: expected a text without NUL; put numbers with a"),
    "gang_as_a_number": ("gang", 3, "gang: expected a mapping, got the number 3"),
    "name_with_capitals": ("name", "Train_1", "name: 'Train_1' is not a name"),
    "name_empty": ("name", "", "name: is empty"),
    "priority_too_high": ("priority", 1001, "priority: 1001 is outside -1000 to 1000"),
    "keep_none": ("checkpoint.keep", 0, "checkpoint.keep: 0 is outside 1 to 10000"),
    "share_over_one": ("resources.devices", [{"kind": "nic", "share": 2}], "resources.devices[0].share: '2' is more"),
    "share_in_percent": (
        "resources.devices",
        [{"kind": "nic", "share": "25%"}],
        "resources.devices[0].share: unknown unit '%' in '25%': did you mean '0.25'?",
    ),
    "device_without_a_kind": (
        "resources.devices",
        [{"count": 1}],
        "resources.devices[0].kind: required field is missi",
    ),
    "device_as_a_text": ("resources.devices", ["gpu"], "resources.devices[0]: expected a mapping, got the text 'gpu'"),
    "constraint_operator": (
        "node_constraints",
        [{"attribute": "rack", "operator": "EQUALS", "value": "r1"}],
        "node_constraints[0].operator: unknown value 'EQUALS'",
    ),
    "constraint_without_a_value": (
        "node_constraints",
        [{"attribute": "rack"}],
        "node_constraints[0].value: required field is missing",
    ),
    "shared_checkpoints_without_a_directory": (
        "checkpoint",
        {"durability": "shared"},
        "checkpoint.directory: durability shared needs an absolute directory",
    ),
    "shared_checkpoints_in_a_relative_directory": (
        "checkpoint",
        {"durability": "shared", "directory": "ckpt"},
        "checkpoint.directory: durability shared needs an absolute directory",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_field_and_the_nearest_right_thing(mistake: str) -> None:
    path, value, message = MISTAKES[mistake]
    found = problems(with_field(path, value))
    assert len(found) == 1, found
    assert message in found[0]


@pytest.mark.parametrize("path", ["name", "resources.cpu", "resources.memory", "task.command"])
def test_a_required_field_that_is_missing_is_named(path: str) -> None:
    assert any(line.startswith(f"{path}: required field is missing") for line in problems(with_field(path, None)))


@pytest.mark.parametrize("document", [None, [], "train", 3])
def test_a_document_that_is_no_mapping_is_said_to_be_none(document: object) -> None:
    assert any("expected a job specification (a mapping)" in line for line in problems(document))


def test_every_mistake_is_told_at_once() -> None:
    document = apply_overrides(MINIMAL, {"gang.ranks": 0, "writes": "x", "resources.cpu": "x"})
    assert [line.split(":")[0] for line in problems(document)] == ["gang.ranks", "resources.cpu", "writes"]


def test_mistakes_in_a_file_are_told_with_its_name_and_line() -> None:
    text = b"name: a\nresources:\n  cpu: 1\n  memory: 5\ntask: {command: [x]}\n"
    with pytest.raises(SpecError) as caught:
        read_spec(text, "job.yaml")
    assert str(caught.value) == "job.yaml:4: resources.memory: no unit in '5': did you mean '5B'?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"name: a\nname: b\n", "f:2: the key 'name' is already on line 1"),
        (b"name: [a\n", "f:2: "),
        (b"a: 1\n---\nb: 2\n", "f:2: a second document"),
        (b"name: \xff\n", "f: not UTF-8"),
        (b"a: " + b"x" * (1 << 20), "f: larger than"),
        (b"a: !!python/object:os.system {}\n", "f:1: the tag"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(text: bytes, message: str) -> None:
    with pytest.raises(YamlError) as caught:
        read_spec(text, "f")
    assert str(caught.value).startswith(message)


def test_a_file_larger_than_is_allowed_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(YamlError, match="larger than"):
        load_spec(path)


def test_overrides_replace_and_make_fields() -> None:
    changed = apply_overrides(MINIMAL, {"gang.ranks": 4, "task.env.A": "1", "resources.memory": "2GiB"})
    spec = parse_spec(changed)
    assert (spec.gang.ranks, spec.task.env, spec.resources.memory_bytes) == (4, (("A", "1"),), 2 << 30)
    assert parse_spec(MINIMAL).gang.ranks == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("task.command.0", "task.command.0: cannot be set: task.command is a list, not a mapping"),
        ("name.x", "name.x: cannot be set: name is the text 'a', not a mapping"),
        ("gang..ranks", "gang..ranks: is not a dotted field such as gang.ranks"),
        ("", "is not a dotted field such as gang.ranks"),
    ],
)
def test_an_override_that_names_no_field_is_refused_and_not_ignored(path: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        apply_overrides(MINIMAL, {path: 1})
    assert message in str(caught.value)


def test_the_documented_specification_is_valid_and_names_every_field() -> None:
    text = (ROOT / "docs/job.md").read_text().partition("```yaml\n")[2].partition("```")[0].encode()
    read_spec(text, "docs/job.md")
    names = paths(load_document(text, "docs/job.md").value)
    assert names >= paths(load_document(EVERY_FIELD, "f").value) - {f"task.env.{name}" for name in "ABCD"}


def paths(value: object, path: str = "") -> set[str]:
    """Every key as a dotted path; the items of a list are one."""
    if isinstance(value, dict):
        mapping = cast("dict[str, object]", value)
        return {path, *(p for k, v in mapping.items() for p in paths(v, f"{path}.{k}".lstrip(".")))}
    if isinstance(value, list):
        return {path, *(p for item in cast("list[object]", value) for p in paths(item, path))}
    return {path}
