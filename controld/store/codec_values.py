"""What the codecs share: closed sets of names, pairs, attributes, incarnations."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from controld.core.ids import Incarnation, NodeUid
from controld.core.model import AttributeValue
from virialpb.store.v1 import records_pb2 as pb

E = TypeVar("E", bound=StrEnum)


class FieldError(ValueError):
    """What is wrong with one field; `codec` puts the key before it."""


def name_of(kind: type[E], text: str, field: str, *, default: E | None = None) -> E:
    """The member stored as `text`; `default` where nothing was stored. Raises FieldError."""
    if not text and default is not None:
        return default
    try:
        return kind(text)
    except ValueError:
        known = ", ".join(kind)
        raise FieldError(f"{field}: unknown {kind.__name__} {text!r} (known: {known})") from None


def texts(pairs: Iterable[tuple[str, str]]) -> list[pb.Text]:
    return [pb.Text(name=name, value=value) for name, value in pairs]


def from_texts(pairs: Iterable[pb.Text]) -> tuple[tuple[str, str], ...]:
    return tuple((pair.name, pair.value) for pair in pairs)


def numbers(pairs: Iterable[tuple[str, int]]) -> list[pb.Number]:
    return [pb.Number(name=name, value=value) for name, value in pairs]


def from_numbers(pairs: Iterable[pb.Number]) -> tuple[tuple[str, int], ...]:
    return tuple((pair.name, pair.value) for pair in pairs)


def attributes(pairs: Iterable[tuple[str, AttributeValue]]) -> list[pb.Attribute]:
    return [_attribute(name, value) for name, value in pairs]


def _attribute(name: str, value: AttributeValue) -> pb.Attribute:
    match value:
        case bool():  # before int: True is an int too
            return pb.Attribute(name=name, flag=value)
        case int():
            return pb.Attribute(name=name, integer=value)
        case str():
            return pb.Attribute(name=name, text=value)


def from_attributes(pairs: Iterable[pb.Attribute]) -> tuple[tuple[str, AttributeValue], ...]:
    return tuple((pair.name, _from_attribute(pair)) for pair in pairs)


def _from_attribute(pair: pb.Attribute) -> AttributeValue:
    match pair.WhichOneof("value"):
        case "flag":
            return pair.flag
        case "integer":
            return pair.integer
        case "text":
            return pair.text
        case _:
            raise FieldError(f"attributes[{pair.name!r}]: a kind of value that is not known here")


def incarnation(value: Incarnation) -> pb.Incarnation:
    return pb.Incarnation(node_uid=value.node_uid, boot_id=value.boot_id, guardian_nonce=value.guardian_nonce)


def from_incarnation(value: pb.Incarnation) -> Incarnation:
    return Incarnation(NodeUid(value.node_uid), value.boot_id, value.guardian_nonce)
