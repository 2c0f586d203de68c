"""Checked access to JSON that came from outside: the wrong type raises BadMessage, which names the field."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Final, TypeVar, cast

JsonObject = dict[str, Any]
_Member = TypeVar("_Member", bound=StrEnum)

SLOT_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")
"""A slot id is also a directory name, so nothing that could leave the directory fits."""
INT_MAX: Final = (1 << 63) - 1
METRIC_NAME_BYTES_MAX: Final = 256
"""What the 64 characters that virial.task lets through may take."""


class BadMessage(ValueError):
    """A message that does not follow the protocol; the text names the field and what was expected."""


def as_object(value: object, where: str) -> JsonObject:
    if not isinstance(value, dict):
        raise BadMessage(f"{where} must be an object")
    return cast("JsonObject", value)


def get_object(message: JsonObject, key: str) -> JsonObject:
    return as_object(message.get(key), key)


def get_text(message: JsonObject, key: str) -> str:
    value: object = message.get(key)
    if not isinstance(value, str) or "\0" in value:
        raise BadMessage(f"{key} must be a string")
    return value


def get_text_or_none(message: JsonObject, key: str) -> str | None:
    return None if message.get(key) is None else get_text(message, key)


def get_int(message: JsonObject, key: str, low: int = 0) -> int:
    value: object = message.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= INT_MAX:
        raise BadMessage(f"{key} must be an integer >= {low} of at most 63 bits")
    return value


def get_int_or_none(message: JsonObject, key: str, low: int = 0) -> int | None:
    return None if message.get(key) is None else get_int(message, key, low)


def get_bool(message: JsonObject, key: str) -> bool:
    value: object = message.get(key, False)
    if not isinstance(value, bool):
        raise BadMessage(f"{key} must be true or false")
    return value


def get_texts(message: JsonObject, key: str) -> tuple[str, ...]:
    value: object = message.get(key, [])
    if not isinstance(value, list):
        raise BadMessage(f"{key} must be a list of strings")
    items = cast("list[object]", value)
    if not all(isinstance(item, str) and "\0" not in item for item in items):
        raise BadMessage(f"{key} must be a list of strings")
    return tuple(cast("list[str]", items))


def get_env(message: JsonObject, key: str) -> dict[str, str]:
    values = as_object(message.get(key, {}), key)
    for name, value in values.items():
        if not isinstance(value, str) or "\0" in value or not name or "=" in name or "\0" in name:
            raise BadMessage(f"{key}: {name!r} must be a variable name with a string value")
    return values


def get_metrics(message: JsonObject, key: str) -> dict[str, float]:
    values = as_object(message.get(key, {}), key)
    if len(values) > 256 or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()
    ):
        raise BadMessage(f"{key} must be an object of at most 256 numbers")
    if any(len(name.encode()) > METRIC_NAME_BYTES_MAX for name in values):
        raise BadMessage(f"{key}: a name may have at most {METRIC_NAME_BYTES_MAX} bytes")
    try:
        return {name: float(value) for name, value in values.items()}
    except OverflowError:
        raise BadMessage(f"{key} must be numbers that fit a double") from None


def get_slot(message: JsonObject) -> str:
    slot = get_text(message, "slot")
    if not SLOT_PATTERN.fullmatch(slot):
        raise BadMessage(f"slot {slot[:80]!r} must match {SLOT_PATTERN.pattern}")
    return slot


def get_member(kind: type[_Member], value: JsonObject, key: str) -> _Member:
    try:
        return kind(value.get(key))
    except ValueError:
        raise BadMessage(f"{key} {value.get(key)!r} must be one of {', '.join(kind)}") from None
