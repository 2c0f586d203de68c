"""What a controller remembers of a shared store, in its own data directory: how far it has seen it.

Whoever brings back a snapshot of etcd with etcd's own tools moves its revisions back and leaves the history counter as
it was: epochs would be handed out a second time. A controller that has seen more than the store holds raises it.
"""

from __future__ import annotations

from pathlib import Path

from controld.store import sqlite_file
from controld.store.port import StoreCorruptError
from virialpb.ids import Epoch, parse_epoch

_NAME = "seen"


def read(directory: Path) -> Epoch:
    """(history counter, revision); zeros where nothing was seen. Blocking. Raises StoreCorruptError, OSError."""
    file = directory / _NAME
    try:
        text = file.read_text("ascii", "replace").strip()
    except FileNotFoundError:
        return Epoch(0, 0)
    try:
        return parse_epoch(text)
    except ValueError as error:
        raise StoreCorruptError(f"{file}: not HISTORY.REVISION; write what `virial status` shows") from error


def write(directory: Path, seen: Epoch) -> None:
    """Durable, and never less than before. Blocking. Raises StoreCorruptError, OSError."""
    if seen > read(directory):
        with sqlite_file.new_file(directory / _NAME) as partial:
            partial.write_text(f"{seen}\n", "ascii")
