"""Settings from four layers: the last one that says something wins, and every mistake names where it was made."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import pytest

from virialpb.layered import ConfigError, Loaded, describe, load


class Format(StrEnum):
    JSON = "json"
    TEXT = "text"


@dataclass(frozen=True)
class Store:
    kind: str = field(default="sqlite", metadata={"choices": ("memory", "sqlite", "etcd")})
    endpoints: tuple[str, ...] = ()
    password: str = field(default="", metadata={"secret": True})


@dataclass(frozen=True)
class Settings:
    name: str = "n1"
    fence_after_ns: int = field(default=60_000_000_000, metadata={"unit": "duration_ns", "minimum": 1_000_000_000})
    memory_bytes: int | None = field(default=None, metadata={"unit": "bytes"})
    cpu_millis: int = field(default=1000, metadata={"unit": "cpu_millis"})
    retries: int = field(default=3, metadata={"minimum": 0, "maximum": 9})
    weak: bool = False
    phi: float = 8.0
    log_format: Format = Format.JSON
    labels: tuple[tuple[str, str], ...] = ()
    store: Store = field(default_factory=Store)


@dataclass(frozen=True)
class Needs:
    data_dir: str


def settings(
    toml: str | None = None, environ: dict[str, str] | None = None, flags: dict[str, object] | None = None
) -> Loaded[Settings]:
    return load(
        Settings, toml_text=toml, toml_name="node.toml", environ=environ or {}, prefix="VIRIAL_X", flags=flags or {}
    )


def errors(
    toml: str | None = None, environ: dict[str, str] | None = None, flags: dict[str, object] | None = None
) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        settings(toml, environ, flags)
    return caught.value.errors


def test_defaults_when_no_layer_speaks() -> None:
    loaded = settings()
    assert loaded.value == Settings()
    assert set(loaded.origins.values()) == {"default"}


def test_each_layer_beats_the_one_before_it() -> None:
    toml = 'name = "file"\nfence_after = "30s"\n[store]\nkind = "etcd"\nendpoints = ["a:1", "b:2"]'
    environ = {"VIRIAL_X__FENCE_AFTER": "20s", "VIRIAL_X__STORE__KIND": "memory", "OTHER": "x"}
    loaded = settings(toml, environ, {"store.kind": "sqlite", "name": None})
    assert loaded.value == Settings(
        name="file", fence_after_ns=20_000_000_000, store=Store(kind="sqlite", endpoints=("a:1", "b:2"))
    )
    assert loaded.origins["name"] == "node.toml"
    assert loaded.origins["fence_after"] == "VIRIAL_X__FENCE_AFTER"
    assert loaded.origins["store.kind"] == "--store-kind"
    assert loaded.origins["cpu"] == "default"


def test_every_kind_of_value_from_text() -> None:
    environ = {
        "VIRIAL_X__MEMORY": "80GiB",
        "VIRIAL_X__CPU": "1.5",
        "VIRIAL_X__RETRIES": "7",
        "VIRIAL_X__WEAK": "true",
        "VIRIAL_X__PHI": "9.5",
        "VIRIAL_X__LOG_FORMAT": "text",
        "VIRIAL_X__LABELS": "rack=r1,row=b",
        "VIRIAL_X__STORE__ENDPOINTS": "a:1, b:2",
        "VIRIAL_X__NAME": "",
    }
    assert settings(environ=environ).value == Settings(
        memory_bytes=80 << 30,
        cpu_millis=1500,
        retries=7,
        weak=True,
        phi=9.5,
        log_format=Format.TEXT,
        labels=(("rack", "r1"), ("row", "b")),
        store=Store(endpoints=("a:1", "b:2")),
    )


def test_a_table_of_texts_from_toml() -> None:
    assert settings('[labels]\nrow = "b"\nrack = "r1"').value.labels == (("rack", "r1"), ("row", "b"))


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('nmae = "x"', "node.toml: nmae: unknown setting: did you mean 'name'?"),
        ('[store]\nkid = "etcd"', "node.toml: store.kid: unknown setting: did you mean 'store.kind'?"),
        ('[store]\nkind = "etc"', "node.toml: store.kind: unknown value 'etc': did you mean 'etcd'?"),
        ("store = 3", "node.toml: store: expected a table, got the number 3"),
        ("fence_after = 60", "node.toml: fence_after: no unit in '60': did you mean '60s'?"),
        ('fence_after = "5ms"', "node.toml: fence_after: 5ms is less than 1s"),
        ("retries = 12", "node.toml: retries: 12 is more than 9"),
        ('retries = "3"', "node.toml: retries: expected a whole number, got the text '3'"),
        ('weak = "yes"', "node.toml: weak: expected true or false, got the text 'yes'"),
        ("labels = 3", "node.toml: labels: expected a table of texts, got the number 3"),
        ('[store]\nendpoints = "a"', "node.toml: store.endpoints: expected a list of texts, got the text 'a'"),
    ],
)
def test_a_mistake_in_the_file_names_the_setting(toml: str, message: str) -> None:
    assert errors(toml) == [message]


def test_a_broken_file_is_one_message_with_its_line() -> None:
    (message,) = errors("name = \nweak = true")
    assert message.startswith("node.toml: not TOML: ")
    assert "line 1" in message


def test_mistakes_of_all_layers_are_reported_at_once() -> None:
    found = errors("retries = 12", {"VIRIAL_X__STORE__KIDN": "etcd", "VIRIAL_X__WEAK": "maybe"}, {"cpu": "1x"})
    assert found == [
        "node.toml: retries: 12 is more than 9",
        "VIRIAL_X__STORE__KIDN: unknown setting: did you mean 'VIRIAL_X__STORE__KIND'?",
        "VIRIAL_X__WEAK: expected true or false, got the text 'maybe'",
        "--cpu: unknown unit 'x' in '1x'; known units are m",
    ]


def test_a_required_setting_says_all_ways_to_set_it() -> None:
    with pytest.raises(ConfigError) as caught:
        load(Needs, toml_text=None, toml_name="node.toml", environ={}, prefix="VIRIAL_X", flags={})
    assert caught.value.errors == ["data_dir: required; set it in node.toml, by VIRIAL_X__DATA_DIR or --data-dir"]


def test_describe_writes_values_as_they_are_typed_and_hides_secrets() -> None:
    loaded = settings('memory = "80GiB"\n[labels]\nrack = "r1"', {"VIRIAL_X__STORE__PASSWORD": "hunter2"})
    rows = {name: (value, origin) for name, value, origin in describe(loaded)}
    assert rows["memory"] == ("80GiB", "node.toml")
    assert rows["fence_after"] == ("1m", "default")
    assert rows["labels"] == ("rack=r1", "node.toml")
    assert rows["store.password"] == ("(hidden)", "VIRIAL_X__STORE__PASSWORD")
    assert rows["weak"] == ("false", "default")


def test_a_variable_with_one_underscore_is_not_ignored() -> None:
    assert errors(environ={"VIRIAL_X_NAME": "n2", "VIRIAL_X_STORE__KIND": "memory"}) == [
        "VIRIAL_X_NAME: unknown setting; write VIRIAL_X__NAME, with two underscores",
        "VIRIAL_X_STORE__KIND: unknown setting; write VIRIAL_X__STORE__KIND, with two underscores",
    ]


def test_variables_that_a_platform_sets_for_a_service_of_that_name_are_left_alone() -> None:
    environ = {"VIRIAL_X_SERVICE_HOST": "10.0.0.1", "VIRIAL_X_PORT": "tcp://10.0.0.1:7700", "VIRIAL_X_CONFIG": "/x"}
    assert settings(environ=environ).value == Settings()
