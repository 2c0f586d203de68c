"""Stores for tests: how each kind is made, and short words for changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from controld.store.memory import MemoryDisk, MemoryStore
from controld.store.port import Commit, SharedStore, Store, StoredChange
from controld.store.sqlite import SqliteStore
from tests import support_etcd

KIB = 1 << 10


@dataclass
class Kind:
    """How one kind of store is made. `make` gives another handle on the same contents each time it is called."""

    name: str
    make: Callable[[], Store]
    make_small: Callable[[], Store]
    """An empty store of about a megabyte."""
    restores_revisions: bool = True
    """A restore brings back the revisions too; else it goes on counting, and each record is written anew."""
    stack: ExitStack = field(default_factory=ExitStack)
    """What is to be undone when the kind is not needed any more."""


def memory_kind(_: Path) -> Kind:
    disk = MemoryDisk()
    return Kind("memory", lambda: MemoryStore(disk), lambda: MemoryStore(MemoryDisk(capacity_bytes=1024 * KIB)))


def sqlite_kind(directory: Path) -> Kind:
    return Kind(
        "sqlite",
        lambda: SqliteStore(directory / "data"),
        lambda: SqliteStore(directory / "small", size_bytes_max=1024 * KIB),
    )


def etcd_kind(_: Path) -> Kind:
    stack = ExitStack()
    makers = support_etcd.makers(stack)
    return Kind("etcd", makers["make"], makers["make_small"], restores_revisions=False, stack=stack)


@dataclass
class SharedKind:
    """As `Kind`, of a store that several controllers share."""

    name: str
    make: Callable[[], SharedStore]


def shared_memory_kind(_: Path) -> SharedKind:
    disk = MemoryDisk()
    return SharedKind("memory", lambda: MemoryStore(disk))


def shared_etcd_kind(_: Path) -> SharedKind:
    return SharedKind("etcd", support_etcd.makers(ExitStack())["make"])


def put(key: str, value: bytes = b"v") -> StoredChange:
    return StoredChange(key, value)


def delete(key: str) -> StoredChange:
    return StoredChange(key, None)


async def contents(store: Store) -> dict[str, bytes]:
    return {record.key: record.value for record in (await store.load()).records}


async def created(store: Store, key: str) -> tuple[int, int]:
    record = next(record for record in (await store.load()).records if record.key == key)
    return record.create_revision, record.modify_revision


async def take(watch: AsyncIterator[Commit], count: int) -> list[Commit]:
    return [await anext(watch) for _ in range(count)]


KINDS: dict[str, Callable[[Path], Kind]] = {"memory": memory_kind, "sqlite": sqlite_kind, "etcd": etcd_kind}
SHARED: dict[str, Callable[[Path], SharedKind]] = {"memory": shared_memory_kind, "etcd": shared_etcd_kind}
