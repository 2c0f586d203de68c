"""How one commit is kept in the log: for each change the lengths of key and value (-1: deleted), then both."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from controld.store.port import StoredChange

_LENGTHS = struct.Struct("<Hq")
_DELETED = -1


def pack(changes: Sequence[StoredChange]) -> bytes:
    parts: list[bytes] = []
    for change in changes:
        key, value = change.key.encode(), change.value
        parts.append(_LENGTHS.pack(len(key), _DELETED if value is None else len(value)))
        parts.append(key)
        if value is not None:
            parts.append(value)
    return b"".join(parts)


def unpack(packed: bytes) -> tuple[StoredChange, ...]:
    """Inverse of `pack`; the caller has verified the checksum."""
    changes: list[StoredChange] = []
    position = 0
    while position < len(packed):
        key_length, value_length = _LENGTHS.unpack_from(packed, position)
        key_end = position + _LENGTHS.size + key_length
        key = packed[position + _LENGTHS.size : key_end].decode()
        position = key_end if value_length == _DELETED else key_end + value_length
        changes.append(StoredChange(key, None if value_length == _DELETED else packed[key_end:position]))
    return tuple(changes)
