"""The YAML loader: plain values with YAML 1.2's meaning; every trap refused with file and line."""

from __future__ import annotations

import json

import pytest

from virial.yamlfile import MAX_BYTES, MAX_DEPTH, YamlError, load_document, load_yaml
from virialpb.rdl import RdlError, parse_document


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: [x, 2.5, ~, true]\n", {"a": 1, "b": ["x", 2.5, None, True]}),
        (
            "country: no\ntime: 10:30\nmode: 010\nhex: 0x10\n",
            {"country": "no", "time": "10:30", "mode": "010", "hex": "0x10"},
        ),
        ("a: \"1\"\nb: 'true'\n", {"a": "1", "b": "true"}),
        ("a: |\n  two\n  lines\n", {"a": "two\nlines\n"}),
        ("base: &b {x: 1}\nuse: *b\n", {"base": {"x": 1}, "use": {"x": 1}}),
        ("a: 1e400", {"a": "1e400"}),
        ("", None),
        ("# only a comment\n", None),
        ("\ufeffa: 1", {"a": 1}),
    ],
)
def test_plain_values(text: str, expected: object) -> None:
    assert load_yaml(text.encode(), "f.yaml") == expected


def test_json_is_yaml() -> None:
    data = {"a": [1, {"b": None}], "c": "1.2TB/s", "d": True}
    assert load_yaml(json.dumps(data, indent=1), "f.json") == data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: the key 'a' is already on line 1"),
        ("x:\n  - {a: 1, a: 2}\n", "f.yaml:2: the key 'a' is already on line 2"),
        (
            "a: !!python/object/apply:os.system [ls]\n",
            "f.yaml:1: the tag tag:yaml.org,2002:python/object/apply:os.system",
        ),
        ("a: &x {y: *x}\n", "f.yaml:1: the alias '*x' contains itself"),
        ("a: *nope\n", "f.yaml:1: the alias '*nope' has no anchor before it"),
        ("b: &b {x: 1}\na:\n  <<: *b\n", "f.yaml:3: merge keys ('<<') are not supported"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: a second document; a file holds one"),
        ("a: [1,\nb: 2\n", "f.yaml:"),
        ("{[1]: 2}", "f.yaml:1: a key must be a text"),
        ("[" * (MAX_DEPTH + 2), f"f.yaml:1: nested deeper than {MAX_DEPTH}"),
        ("[" * 500_000, "f.yaml:1: "),
        ("a" * (MAX_BYTES + 1), f"f.yaml: larger than {MAX_BYTES} bytes"),
        ("a: \x00", "f.yaml"),
    ],
)
def test_traps_are_refused(text: str, message: str) -> None:
    with pytest.raises(YamlError) as caught:
        load_yaml(text, "f.yaml")
    assert str(caught.value).startswith(message)


def test_an_alias_bomb_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    with pytest.raises(YamlError, match="more than 100000 values, aliases unfolded"):
        load_yaml("\n".join(lines), "bomb.yaml")


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(YamlError, match=r"f\.yaml: not UTF-8: byte 3"):
        load_yaml(b"a: \xff\n", "f.yaml")


def test_a_field_error_is_shown_with_file_and_line() -> None:
    document = load_document(
        "nodes:\n  - name: a\n    devices:\n      - resource_type: accelerator\n        memory: 80Gi\n  - domain: x\n",
        "rack.yaml",
    )
    with pytest.raises(RdlError) as caught:
        parse_document(document.value)
    assert [document.describe(error) for error in caught.value.errors] == [
        "rack.yaml:5: nodes[0].devices[0].memory: unknown unit 'Gi' in '80Gi': did you mean 'GiB'?",
        "rack.yaml:6: nodes[1].name: required field is missing",
    ]
