"""Strict reading of plain mappings: every mistake of a document is reported, each with the full path of its field.

Used by the RDL and by the job-spec parser. Standard library only. The input is what a YAML or JSON loader gives. Use::

    errors = ErrorList()
    with Fields(data, "", errors) as fields:
        name = fields.required("name", name_text, on_error="")
        timeout_ns = fields.optional("timeout", parse_duration_ns, default=0)
        with fields.child("network") as network:
            ...
    errors.raise_if_any(RdlError)

Leaving the ``with`` block reports every key that was not asked for, with the nearest one that was. After an error a
reader goes on with ``on_error``; whatever was built of it is thrown away by ``raise_if_any``. A key whose value is
null counts as absent, as an empty YAML value should.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar, cast

from virialpb.suggest import did_you_mean, nearest
from virialpb.units import MAX_VALUE, QuantityError

T = TypeVar("T")

# A document that is wrong everywhere is one mistake; its first hundred symptoms are more than anybody reads.
MAX_ERRORS: Final = 100
MAX_LIST_ITEMS: Final = 100_000
MAX_TEXT_LENGTH: Final = 4_096
_SHOWN_LENGTH: Final = 60

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_NAME_RULE = "a name is at most 253 lower-case letters, digits, '-' and '.', and starts and ends with a letter or digit"


@dataclass(frozen=True, slots=True)
class FieldError:
    """One mistake: where (``devices[2].interconnect.max_latency``), what, and the nearest right thing, if any."""

    path: str
    message: str
    nearest: str | None = None

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{where}{self.message}{did_you_mean(self.nearest)}"


class StrictError(ValueError):
    """A document with mistakes: ``errors`` holds all of them (at most MAX_ERRORS), in the order they were met."""

    def __init__(self, errors: tuple[FieldError, ...]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = errors


class FieldProblem(ValueError):
    """What a value parser raises: the message without the path, and the nearest right value."""

    def __init__(self, message: str, nearest: str | None = None) -> None:
        super().__init__(message + did_you_mean(nearest))
        self.message = message
        self.nearest = nearest


class ErrorList:
    """Collects the mistakes of one document."""

    def __init__(self) -> None:
        self._errors: list[FieldError] = []

    def __len__(self) -> int:
        return len(self._errors)

    def add(self, path: str, message: str, suggestion: str | None = None) -> None:
        if len(self._errors) < MAX_ERRORS:
            self._errors.append(FieldError(path, message, suggestion))

    def read(self, path: str, value: object, parse: Callable[[object], T], on_error: T) -> T:
        """``parse(value)``; when it raises QuantityError or FieldProblem, that is noted and ``on_error`` returned."""
        try:
            return parse(value)
        except (QuantityError, FieldProblem) as problem:
            self.add(path, problem.message, problem.nearest)
            return on_error

    def raise_if_any(self, error: type[StrictError]) -> None:
        if self._errors:
            raise error(tuple(self._errors))


class Fields:
    """One mapping of a document, read field by field; see the module docstring for its use."""

    def __init__(self, value: object, path: str, errors: ErrorList, *, what: str = "a mapping") -> None:
        self.path = path
        self.errors = errors
        self._values: dict[str, object] = {}
        self._asked: dict[str, None] = {}  # an ordered set: ties between suggestions go to the field asked for first
        self._usable = isinstance(value, Mapping)
        if not isinstance(value, Mapping):
            errors.add(path, f"expected {what}, got {kind_of(value)}")
            return
        for key, content in cast("Mapping[object, object]", value).items():
            if isinstance(key, str):
                self._values[key] = content
            else:
                errors.add(path, f"the key {shown(key)} is {kind_of(key)}, not a text; put it in quotes")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._report_unknown()

    def has(self, name: str) -> bool:
        """Whether the field is there and not null. Does not make it known."""
        return self._values.get(name) is not None

    def names(self) -> tuple[str, ...]:
        """Every key that is there, in the order of the document."""
        return tuple(self._values)

    def error(self, name: str, message: str, suggestion: str | None = None) -> None:
        """Note a mistake at a field; ``name`` "" means the mapping itself."""
        self.errors.add(join(self.path, name) if name else self.path, message, suggestion)

    def required(self, name: str, parse: Callable[[object], T], *, on_error: T) -> T:
        self._asked[name] = None
        if not self.has(name):
            if self._usable:
                self.error(name, "required field is missing")
            return on_error
        return self.errors.read(join(self.path, name), self._values[name], parse, on_error)

    def optional(self, name: str, parse: Callable[[object], T], *, default: T) -> T:
        self._asked[name] = None
        if not self.has(name):
            return default
        return self.errors.read(join(self.path, name), self._values[name], parse, default)

    def child(self, name: str) -> Fields:
        """The mapping under ``name``; an absent one reads as empty. Use ``has`` first where absence means something."""
        self._asked[name] = None
        empty: dict[str, object] = {}
        value: object = self._values[name] if self.has(name) else empty
        return Fields(value, join(self.path, name), self.errors)

    def items(self, name: str) -> list[tuple[str, object]]:
        """(path, value) of each item of the list under ``name``; an absent list is empty."""
        self._asked[name] = None
        if not self.has(name):
            return []
        value = self._values[name]
        path = join(self.path, name)
        if not isinstance(value, list):
            self.errors.add(path, f"expected a list, got {kind_of(value)}")
            return []
        entries = cast("list[object]", value)
        if len(entries) > MAX_LIST_ITEMS:
            self.errors.add(path, f"{len(entries)} items are too many: the most is {MAX_LIST_ITEMS}")
            return []
        return [(f"{path}[{index}]", item) for index, item in enumerate(entries)]

    def children(self, name: str) -> list[Fields]:
        """A reader for each mapping of the list under ``name``."""
        return [Fields(item, path, self.errors) for path, item in self.items(name)]

    def values(self, name: str, parse: Callable[[object], T]) -> tuple[T, ...]:
        """Each item of the list under ``name``, parsed; an item in error is left out."""
        parsed = [self.errors.read(path, item, _boxed(parse), None) for path, item in self.items(name)]
        return tuple(box[0] for box in parsed if box is not None)

    def entries(self, name: str) -> list[tuple[str, str, object]]:
        """(key, path, value) of each entry of the open mapping under ``name``, whose keys the caller checks."""
        child = self.child(name)
        return [(key, join(child.path, key), child._values[key]) for key in child.names()]

    def _report_unknown(self) -> None:
        free = [name for name in self._asked if name not in self._values]
        for key in self._values:
            if key not in self._asked:
                # A field that is already there is not what was meant, unless nothing else comes near.
                self.error(key, "unknown field", nearest(key, free) or nearest(key, self._asked))


def _boxed(parse: Callable[[object], T]) -> Callable[[object], tuple[T] | None]:
    return lambda value: (parse(value),)


def join(path: str, key: str) -> str:
    """The path of a key. A key that is no plain word is quoted, so that a path has one reading."""
    if not _PLAIN_KEY.fullmatch(key):
        return f'{path}["{shown(key)}"]'
    return f"{path}.{key}" if path else key


def kind_of(value: object) -> str:
    """How to speak of a value's type in a message."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"the number {shown(value)}"
    if isinstance(value, str):
        return f"the text '{shown(value)}'"
    return "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def shown(value: object) -> str:
    """A value as quoted in a message, shortened. Huge integers have no cheap text, and say so."""
    if isinstance(value, int) and abs(value) > MAX_VALUE:
        return "beyond 64 bits"
    content = str(value)
    return content if len(content) <= _SHOWN_LENGTH else content[:_SHOWN_LENGTH] + "..."


def text(value: object) -> str:
    """A non-empty text of at most MAX_TEXT_LENGTH printable characters."""
    if not isinstance(value, str):
        hint = f'"{shown(value)}"' if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        raise FieldProblem(f"expected a text, got {kind_of(value)}", hint)
    if not value:
        raise FieldProblem("is empty")
    if len(value) > MAX_TEXT_LENGTH:
        raise FieldProblem(f"is longer than {MAX_TEXT_LENGTH} characters")
    if not value.isprintable():
        raise FieldProblem("contains a control character")
    return value


def name_text(value: object) -> str:
    """A name of a node, device, domain: what a DNS name may hold, so that it can stand in paths and addresses."""
    content = text(value)
    if not _NAME.fullmatch(content):
        lowered = re.sub(r"[^a-z0-9.-]+", "-", content.lower()).strip("-.")[:253].rstrip("-.")
        raise FieldProblem(f"'{shown(content)}' is not a name: {_NAME_RULE}", lowered or None)
    return content


def boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise FieldProblem(f"expected true or false, got {kind_of(value)}")
    return value


def integer(minimum: int = -MAX_VALUE - 1, maximum: int = MAX_VALUE) -> Callable[[object], int]:
    """A parser of whole numbers (not texts) from ``minimum`` to ``maximum``."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise FieldProblem(f"expected a whole number, got {kind_of(value)}")
        if not minimum <= value <= maximum:
            raise FieldProblem(f"{shown(value)} is outside {minimum} to {maximum}")
        return value

    return parse


def one_of(choices: Collection[str]) -> Callable[[object], str]:
    """A parser of one of a closed set of texts."""

    def parse(value: object) -> str:
        content = text(value)
        if content in choices:
            return content
        suggestion = nearest(content, choices)
        known = "" if suggestion is not None else f"; known are {', '.join(choices)}"
        raise FieldProblem(f"unknown value '{shown(content)}'{known}", suggestion)

    return parse
