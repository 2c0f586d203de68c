"""YAML (and so JSON) to plain values, strictly: what a spec or RDL file means must not depend on YAML's surprises.

Read as YAML 1.2 means it: only ``true``/``false`` are booleans (``no`` is a text, not Norway's), ``10:30`` and ``010``
are texts (YAML 1.1 makes them 630 and 8). Refused, with file and line: duplicate keys (the last silently wins
elsewhere), tags, merge keys, several documents, recursive aliases, more than MAX_BYTES, MAX_DEPTH or MAX_VALUES
(aliases count as often as they are used, so that a small file cannot unfold into a huge value).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import yaml

from virialpb.strict import FieldError, join, shown

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 64
MAX_VALUES: Final = 100_000

_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,39})")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+")
_WORDS: Final[Mapping[str, object]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
# libyaml's parser where PyYAML was built with it: 1 MiB takes tenths of a second instead of many.
_LOADER: Final = cast("Any", getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class YamlError(ValueError):
    """A file that cannot be read as one YAML document. The text is ``FILE:LINE: what is wrong``."""


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """``value``: mappings, lists, texts, numbers, booleans, None. ``lines``: field path -> line, counted from 1."""

    value: object
    source_name: str
    lines: Mapping[str, int]

    def describe(self, error: FieldError) -> str:
        """``FILE:LINE: path: message`` for a mistake found in ``value``. A missing field has its parent's line."""
        path = error.path
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return f"{self.source_name}:{self.lines.get(path, 1)}: {error}"


def load_yaml(content: str | bytes, source_name: str) -> object:
    """The plain value of one YAML document; None when it is empty. Raises YamlError."""
    return load_document(content, source_name).value


def load_document(content: str | bytes, source_name: str) -> YamlDocument:
    """As ``load_yaml``, with the line of each field. Raises YamlError."""
    builder = _Builder(source_name)
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    except UnicodeDecodeError as error:
        raise YamlError(f"{source_name}: not UTF-8: byte {error.start} is {content[error.start]!r}") from None
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise YamlError(f"{source_name}: larger than {MAX_BYTES} bytes")
    try:
        value = builder.document(iter(yaml.parse(text, Loader=_LOADER)))
    except yaml.MarkedYAMLError as error:
        mark = cast("Any", error.problem_mark or error.context_mark)
        line = mark.line + 1 if mark is not None else 1
        raise YamlError(f"{source_name}:{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise YamlError(f"{source_name}: {' '.join(str(error).split())}") from None
    return YamlDocument(value, source_name, builder.lines)


class _Builder:
    """Builds the value from parser events: nothing is constructed from what a file names, and depth is bounded."""

    def __init__(self, source_name: str) -> None:
        self.lines: dict[str, int] = {}
        self._source_name = source_name
        self._count = 0
        # An anchor's value and how many values it unfolds into; None while it is still being built.
        self._anchors: dict[str, tuple[object, int] | None] = {}
        self._events: Iterator[Any] = iter(())

    def document(self, events: Iterator[Any]) -> object:
        self._events = events
        value: object = None
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._error(event, "a second document; a file holds one")
                value = self._value(next(events), "", 0)
        return value

    def _error(self, event: Any, message: str) -> YamlError:
        return YamlError(f"{self._source_name}:{_line(event)}: {message}")

    def _value(self, event: Any, path: str, depth: int) -> object:
        self.lines.setdefault(path, _line(event))
        if depth > MAX_DEPTH:
            raise self._error(event, f"nested deeper than {MAX_DEPTH}")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        self._add(event, 1)
        before = self._count
        if event.tag is not None and event.tag != "!":
            raise self._error(event, f"the tag {shown(event.tag)} is not supported; write a plain value")
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        value: object
        if isinstance(event, yaml.MappingStartEvent):
            value = self._mapping(path, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._sequence(path, depth)
        else:
            value = _scalar(event.value) if event.implicit[0] and not event.style else event.value
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, self._count - before + 1)
        return value

    def _mapping(self, path: str, depth: int) -> dict[object, object]:
        found: dict[object, object] = {}
        first_lines: dict[object, int] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if not isinstance(event, (yaml.ScalarEvent, yaml.AliasEvent)):
                raise self._error(event, "a key must be a text, not a mapping or a list")
            key = self._value(event, f"{path}<key>", depth + 1)
            self.lines.pop(f"{path}<key>", None)
            if key == "<<" and not getattr(event, "style", None):
                raise self._error(event, "merge keys ('<<') are not supported; write the fields out")
            if isinstance(key, (dict, list)):
                raise self._error(event, "a key must be a text, not a mapping or a list")
            if key in found:
                raise self._error(event, f"the key '{shown(key)}' is already on line {first_lines[key]}")
            first_lines[key] = _line(event)
            child = join(path, key) if isinstance(key, str) else f"{path}<{shown(key)}>"
            self.lines[child] = first_lines[key]
            found[key] = self._value(next(self._events), child, depth + 1)
        return found

    def _sequence(self, path: str, depth: int) -> list[object]:
        found: list[object] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            found.append(self._value(event, f"{path}[{len(found)}]", depth + 1))
        return found

    def _alias(self, event: Any) -> object:
        if event.anchor not in self._anchors:
            raise self._error(event, f"the alias '*{shown(event.anchor)}' has no anchor before it")
        anchored = self._anchors[event.anchor]
        if anchored is None:
            raise self._error(event, f"the alias '*{shown(event.anchor)}' contains itself")
        value, size = anchored
        self._add(event, size)
        return value

    def _add(self, event: Any, count: int) -> None:
        self._count += count
        if self._count > MAX_VALUES:
            raise self._error(event, f"more than {MAX_VALUES} values, aliases unfolded")


def _line(event: Any) -> int:
    return event.start_mark.line + 1


def _scalar(text: str) -> object:
    """A plain scalar by the YAML 1.2 core schema, decimal numbers only."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else text
    return text
