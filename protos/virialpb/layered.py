"""Layered settings: defaults < TOML file < environment < flags, into one frozen dataclass tree. Standard library only.

The tree is a dataclass whose fields are leaves or further dataclasses. A leaf is ``str``, ``int``, ``float``, ``bool``,
a ``StrEnum``, ``tuple[str, ...]``, ``tuple[tuple[str, str], ...]`` (a table of texts), or one of these ``| None``.
Field metadata that is understood::

    {"unit": "duration_ns" | "bytes" | "cpu_millis"}   the value is written as a quantity ("60s", "80GiB", "1.5")
    {"allow_zero": True}                               zero has a meaning here
    {"minimum": 1, "maximum": 64}                      bounds, in the field's own unit
    {"choices": ("auto", "weak")}                      a closed set of texts
    {"secret": True}                                   `describe` hides the value

The name of a setting is its field's name; the unit at its end is left out where the value carries one: the field
``fence_after_ns`` is written ``fence_after = "60s"``, ``VIRIAL_NODED__FENCE_AFTER=60s`` and ``--fence-after 60s``.
Everything comes in as an argument: this module reads no file, no environment and no command line. All mistakes are
reported at once, each naming where it was made and the nearest right name.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from virialpb.strict import FieldProblem, boolean, integer, kind_of, one_of, shown, text
from virialpb.suggest import did_you_mean, nearest
from virialpb.units import (
    QuantityError,
    format_bytes,
    format_cpu_millis,
    format_duration_ns,
    parse_bytes,
    parse_cpu_millis,
    parse_duration_ns,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

DEFAULT_ORIGIN: Final = "default"
SEPARATOR: Final = "__"
_WHOLE = re.compile(r"-?[0-9]{1,19}")
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}
_MISSING: Final = object()


@dataclasses.dataclass(frozen=True, slots=True)
class _Unit:
    suffix: str
    parse: Callable[..., int]
    show: Callable[[int], str]


_UNITS: Final[Mapping[str, _Unit]] = {
    "duration_ns": _Unit("_ns", parse_duration_ns, format_duration_ns),
    "bytes": _Unit("_bytes", parse_bytes, format_bytes),
    "cpu_millis": _Unit("_millis", parse_cpu_millis, format_cpu_millis),
}


class ConfigError(ValueError):
    """Settings with mistakes: ``errors`` has one line for each."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """``origins``: for each setting, by its dotted name, ``default``, the file's name, the variable or the flag."""

    value: T
    origins: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    """One setting: where it lies in the tree, and how its value is read."""

    path: tuple[str, ...]  # field names
    name: str  # dotted, as users write it
    hint: Any
    optional: bool
    metadata: Mapping[str, Any]
    default: object

    @property
    def unit(self) -> _Unit | None:
        return _UNITS[self.metadata["unit"]] if "unit" in self.metadata else None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace(".", "-").replace("_", "-")

    def variable(self, prefix: str) -> str:
        return SEPARATOR.join((prefix, *(part.upper() for part in self.name.split("."))))


def load(
    cls: type[T],
    *,
    toml_text: str | None,
    toml_name: str,
    environ: Mapping[str, str],
    prefix: str,
    flags: Mapping[str, object],
) -> Loaded[T]:
    """The settings after all layers. Raises ConfigError with every mistake.

    ``flags``: values by dotted name; None means that the flag was not given. ``prefix``: ``VIRIAL_NODED`` for
    ``VIRIAL_NODED__COLLECT__PERIOD``. An empty variable counts as not set, as tools that always pass one need.
    """
    leaves = {leaf.name: leaf for leaf in _leaves(cls)}
    errors: list[str] = []
    values: dict[str, object] = {}
    origins = dict.fromkeys(leaves, DEFAULT_ORIGIN)

    def take(leaf: _Leaf, where: str, origin: str, value: object, *, written: bool) -> None:
        try:
            values[leaf.name] = _read(leaf, value, written=written)
        except (QuantityError, FieldProblem) as problem:
            errors.append(f"{where}: {problem.message}{did_you_mean(problem.nearest)}")
        origins[leaf.name] = origin

    for name, value in _toml(toml_text, toml_name, leaves, errors):
        take(leaves[name], f"{toml_name}: {name}", toml_name, value, written=False)
    variables = {leaf.variable(prefix): leaf for leaf in leaves.values()}
    for variable in sorted(environ):
        if not variable.startswith(prefix + SEPARATOR) or not environ[variable]:
            continue
        if variable in variables:
            take(variables[variable], variable, variable, environ[variable], written=True)
        else:
            errors.append(f"{variable}: unknown setting{did_you_mean(nearest(variable, variables))}")
    # One underscore where two belong would be ignored in silence. What is like no setting is left alone: container
    # platforms set variables such as VIRIAL_CONTROLD_SERVICE_HOST by themselves.
    single = {variable.replace(SEPARATOR, "_"): variable for variable in variables}
    for variable in sorted(environ):
        meant = single.get(variable.replace(SEPARATOR, "_"))
        if meant is not None and variable not in variables and not variable.startswith(prefix + SEPARATOR):
            errors.append(f"{variable}: unknown setting; write {meant}, with two underscores")
    for name, value in flags.items():
        if value is not None:
            leaf = leaves[name]
            take(leaf, leaf.flag, leaf.flag, value, written=isinstance(value, str))
    for leaf in leaves.values():
        if leaf.default is _MISSING and leaf.name not in values and not errors:
            variable = leaf.variable(prefix)
            errors.append(f"{leaf.name}: required; set it in {toml_name}, by {variable} or {leaf.flag}")
    if errors:
        raise ConfigError(errors)
    found = {leaf.path: values.get(leaf.name, leaf.default) for leaf in leaves.values()}
    return Loaded(_build(cls, found, ()), origins)


def describe(loaded: Loaded[Any]) -> list[tuple[str, str, str]]:
    """(name, value as it would be written, origin) of every setting, in the order of the tree."""
    rows: list[tuple[str, str, str]] = []
    root: object = loaded.value
    for leaf in _leaves(cast("type[DataclassInstance]", type(root))):
        value = root
        for part in leaf.path:
            value = getattr(value, part)
        rows.append((leaf.name, _show(leaf, value), loaded.origins[leaf.name]))
    return rows


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """For building a command line. `switch`: a boolean, whose flag may stand alone."""

    name: str
    flag: str
    switch: bool


def settings(cls: type[DataclassInstance]) -> list[Setting]:
    """Every setting of the tree, in its order."""
    return [Setting(leaf.name, leaf.flag, leaf.hint is bool) for leaf in _leaves(cls)]


def _leaves(cls: type[DataclassInstance], path: tuple[str, ...] = (), above: tuple[str, ...] = ()) -> list[_Leaf]:
    hints = typing.get_type_hints(cls)
    found: list[_Leaf] = []
    for field in dataclasses.fields(cls):
        hint: Any = hints[field.name]
        here = (*path, field.name)
        if dataclasses.is_dataclass(hint):
            found += _leaves(cast("type[DataclassInstance]", hint), here, (*above, field.name))
            continue
        optional = isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)
        if optional:
            (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
        suffix = _UNITS[field.metadata["unit"]].suffix if "unit" in field.metadata else ""
        name = ".".join((*above, field.name.removesuffix(suffix)))
        default: object = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif field.default is dataclasses.MISSING:
            default = _MISSING
        found.append(_Leaf(here, name, hint, optional, field.metadata, default))
    return found


def _toml(
    toml_text: str | None, toml_name: str, leaves: Mapping[str, _Leaf], errors: list[str]
) -> list[tuple[str, object]]:
    """(setting, value) of each that the file has; what is no setting goes to `errors`."""
    if toml_text is None:
        return []
    try:
        document = tomllib.loads(toml_text)
    except tomllib.TOMLDecodeError as error:
        errors.append(f"{toml_name}: not TOML: {error}")
        return []
    tables = {".".join(name.split(".")[:depth]) for name in leaves for depth in range(1, name.count(".") + 1)}
    found: list[tuple[str, object]] = []

    def walk(table: Mapping[str, object], above: str) -> None:
        for key, value in table.items():
            name = f"{above}{key}"
            if name in leaves:
                found.append((name, value))
            elif name in tables and isinstance(value, dict):
                walk(cast("dict[str, object]", value), f"{name}.")
            elif name in tables:
                errors.append(f"{toml_name}: {name}: expected a table, got {kind_of(value)}")
            else:
                close = nearest(name, [*leaves, *tables]) or nearest(key, [one.rpartition(".")[2] for one in leaves])
                errors.append(f"{toml_name}: {name}: unknown setting{did_you_mean(close)}")

    walk(document, "")
    return found


def _read(leaf: _Leaf, value: object, *, written: bool) -> object:
    """The value of a leaf. ``written``: it is text from a variable or flag. Raises FieldProblem, QuantityError."""
    if leaf.unit is not None:
        amount = leaf.unit.parse(value, allow_zero=bool(leaf.metadata.get("allow_zero")))
        return _bounded(leaf, amount)
    hint = leaf.hint
    if hint is bool:
        return _boolean(value) if written else boolean(value)
    if hint is int:
        if written and isinstance(value, str):
            if not _WHOLE.fullmatch(value):
                raise FieldProblem(f"expected a whole number, got '{shown(value)}'")
            value = int(value)
        return _bounded(leaf, integer()(value))
    if hint is float:
        return _bounded(leaf, _float(value, written=written))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(one_of([str(member) for member in hint])(value))
    if hint is str:
        choices = leaf.metadata.get("choices")
        return text(value) if choices is None else one_of(choices)(value)
    if typing.get_origin(hint) is tuple:
        pairs = typing.get_origin(typing.get_args(hint)[0]) is tuple
        return _pairs(value, written=written) if pairs else _texts(value, written=written)
    raise TypeError(f"{leaf.name}: a setting cannot be {hint}")


def _bounded(leaf: _Leaf, amount: Any) -> Any:
    minimum, maximum = leaf.metadata.get("minimum"), leaf.metadata.get("maximum")
    show = str if leaf.unit is None else leaf.unit.show
    if minimum is not None and amount < minimum:
        raise FieldProblem(f"{show(amount)} is less than {show(minimum)}")
    if maximum is not None and amount > maximum:
        raise FieldProblem(f"{show(amount)} is more than {show(maximum)}")
    return amount


def _boolean(value: object) -> bool:
    if isinstance(value, str) and value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    raise FieldProblem(f"expected true or false, got {kind_of(value)}")


def _float(value: object, *, written: bool) -> float:
    if isinstance(value, str) and written:
        try:
            value = float(value)
        except ValueError:
            raise FieldProblem(f"expected a number, got '{shown(value)}'") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise FieldProblem(f"expected a number, got {kind_of(value)}")
    return float(value)


def _texts(value: object, *, written: bool) -> tuple[str, ...]:
    if written and isinstance(value, str):
        return tuple(text(part.strip()) for part in value.split(","))
    if not isinstance(value, (list, tuple)):
        raise FieldProblem(f"expected a list of texts, got {kind_of(value)}")
    return tuple(map(text, cast("list[object]", value)))


def _pairs(value: object, *, written: bool) -> tuple[tuple[str, str], ...]:
    if written and isinstance(value, str):
        entries: dict[str, object] = {}
        for part in value.split(","):
            key, equals, content = part.strip().partition("=")
            if not equals:
                raise FieldProblem(f"expected NAME=VALUE,..., got '{shown(part)}'")
            entries[key] = content
        value = entries
    if not isinstance(value, Mapping):
        raise FieldProblem(f"expected a table of texts, got {kind_of(value)}")
    items = cast("Mapping[object, object]", value)
    return tuple(sorted((text(key), text(content)) for key, content in items.items()))


def _build(cls: type[T], values: Mapping[tuple[str, ...], object], path: tuple[str, ...]) -> T:
    hints = typing.get_type_hints(cls)
    arguments: dict[str, object] = {}
    for field in dataclasses.fields(cls):
        here = (*path, field.name)
        hint: Any = hints[field.name]
        if dataclasses.is_dataclass(hint):
            arguments[field.name] = _build(cast("type[DataclassInstance]", hint), values, here)
        else:
            arguments[field.name] = values[here]
    return cls(**arguments)


def _show(leaf: _Leaf, value: object) -> str:
    if leaf.metadata.get("secret") and value:
        return "(hidden)"
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if leaf.unit is not None:
        return leaf.unit.show(cast("int", value))
    if isinstance(value, tuple):
        parts = cast("tuple[object, ...]", value)
        return ",".join(
            "=".join(cast("tuple[str, str]", part)) if isinstance(part, tuple) else str(part) for part in parts
        )
    return str(value)
