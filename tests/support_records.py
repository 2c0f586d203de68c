"""Stored records for tests, made by walking the fields of the model, so that a new field is never left out."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import StrEnum
from typing import Any, cast, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from controld.core.ids import Incarnation
from controld.core.model import Record

RECORDS: tuple[type[Record], ...] = get_args(Record)
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def field_types(kind: type) -> dict[str, Any]:
    """Name -> type of the fields of a dataclass or named tuple."""
    return get_type_hints(kind)


def is_structure(annotation: Any) -> bool:
    """Whether it has fields of its own."""
    return isinstance(annotation, type) and (
        dataclasses.is_dataclass(annotation) or issubclass(annotation, Incarnation)
    )


def is_optional(annotation: Any) -> bool:
    return types.NoneType in get_args(annotation)


def strategy(annotation: Any) -> st.SearchStrategy[Any]:
    """Every value a field of this type can hold and the store must keep; every field of a record, always."""
    if isinstance(annotation, typing.NewType):
        return strategy(annotation.__supertype__)
    if annotation is str:
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(INT64_MIN, INT64_MAX)
    if annotation is types.NoneType:
        return st.none()
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([strategy(argument) for argument in arguments])
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(strategy(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(strategy(argument) for argument in arguments))
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return st.sampled_from(list(annotation))
    if is_structure(annotation):
        kind = cast("type[Any]", annotation)
        return st.builds(kind, **{name: strategy(hint) for name, hint in field_types(kind).items()})
    raise TypeError(f"the stored format has no room for {annotation}: extend the codec, and this walk")


def reachable(kind: type) -> list[type]:
    """The dataclasses and named tuples in a record, itself first."""
    found: list[type] = []
    waiting: list[Any] = [kind]
    while waiting:
        annotation = waiting.pop()
        waiting += get_args(annotation)
        if is_structure(annotation):
            structure = cast("type", annotation)
            if structure not in found:
                found.append(structure)
                waiting += field_types(structure).values()
    return found


def filled(annotation: Any, seed: int = 1) -> Any:
    """One value in which no field, however deep, has its default, and no two neighbours are the same."""
    if isinstance(annotation, typing.NewType):
        return filled(annotation.__supertype__, seed)
    if annotation is str:
        return f"text-{seed}"
    if annotation is bool:
        return True
    if annotation is int:
        return 7_000_000 + seed
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return filled(arguments[0], seed)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return (filled(arguments[0], seed), filled(arguments[0], seed + 50))
    if origin is tuple:
        return tuple(filled(argument, seed + index) for index, argument in enumerate(arguments))
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return list(annotation)[-1]
    kind = cast("type[Any]", annotation)
    return kind(**{name: filled(hint, seed + index) for index, (name, hint) in enumerate(field_types(kind).items())})
