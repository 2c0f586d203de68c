"""`controld backup`, `restore` and `import`: a copy of the state, and back; one machine becomes three.

A backup has one form whatever the store, so it goes from either kind into either.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from controld.app import etcd_store
from controld.config import Config, StoreKind
from controld.core import keys
from controld.core.model import Cluster, Job, Node
from controld.options import add_settings, load_settings
from controld.store import codec, sqlite_backup, sqlite_db, sqlite_file
from controld.store.etcd import EtcdStore
from controld.store.port import EVIDENCE_SECONDS, Loaded, StoreCorruptError, StoreError, StoreRestoringError
from controld.store.sqlite import SqliteStore
from virialpb.layered import ConfigError

EXIT_CONFIG: Final = 2
EXIT_DATA: Final = 4
# So long a leader that was killed a moment ago may still seem to live.
LEADER_SECONDS: Final = EVIDENCE_SECONDS + 1.0
LOOK_SECONDS: Final = 0.25


def main(words: Sequence[str]) -> int:
    word = words[0]
    options = _parser(word).parse_args(words[1:])
    try:
        config = load_settings(options).value
    except ConfigError as error:
        for line in error.errors:
            sys.stderr.write(f"controld {word}: {line}\n")
        return EXIT_CONFIG
    if config.store.kind is StoreKind.MEMORY or (word == "import" and config.store.kind is not StoreKind.ETCD):
        needed = "etcd: that is where the state goes" if word == "import" else "sqlite or etcd"
        sys.stderr.write(f"controld {word}: store.kind is {config.store.kind}, and must be {needed}\n")
        return EXIT_CONFIG
    try:
        sys.stdout.write(f"{asyncio.run(_run(word, options, config))}\n")
    except (StoreError, OSError) as error:
        sys.stderr.write(f"controld {word}: {_reason(error)}\n")
        return EXIT_DATA
    except KeyboardInterrupt:
        return 130
    return 0


async def _run(word: str, options: argparse.Namespace, config: Config) -> str:
    """What was done. Raises StoreError, OSError."""
    directory = Path(config.data_dir)
    match word, config.store.kind:
        case "backup", StoreKind.SQLITE:
            await SqliteStore(directory).copy_to(options.file)
        case "backup", _:
            async with _Opened(etcd_store(config, beside=True)) as store:
                await store.backup(options.file)
        case "restore", StoreKind.SQLITE:
            await SqliteStore(directory).restore(options.file)
            return f"restored {directory} from {options.file}; what was there stays as *.replaced"
        case "restore", _:
            async with _Opened(etcd_store(config)) as store:
                await _require_no_leader(store)
                await store.restore(options.file)
                history = (await store.load()).history
            return f"restored the store in etcd from {options.file}; the history counter is {history}"
        case _:
            return await _import(Path(options.source or config.data_dir), config)
    return f"wrote {options.file}"


@dataclass
class _Opened:
    """A store that is closed whatever happens. One whose restore was cut short can be opened, and not loaded."""

    store: EtcdStore

    async def __aenter__(self) -> EtcdStore:
        await self.store.open()
        return self.store

    async def __aexit__(self, *_: object) -> None:
        await self.store.close()


async def _require_no_leader(store: EtcdStore) -> None:
    """The lock of this host says nothing of the others. Raises StoreError where one of several leads."""
    loop = asyncio.get_running_loop()
    end = loop.time() + LEADER_SECONDS
    while True:
        try:
            found = (await store.load()).incumbent
        except StoreCorruptError:
            return  # nobody can lead on it; to mend it is what a restore is for
        # One that has no peers names no address, and leaves no evidence of whether it lives.
        if found is None or not found.alive or not found.address:
            return
        if loop.time() > end:
            raise StoreError(
                f"{found.leadership.identity} ({found.address}) leads, and would lose what it has acknowledged; "
                "nothing was changed. Stop all controllers first"
            )
        await asyncio.sleep(LOOK_SECONDS)


async def _import(source: Path, config: Config) -> str:
    """All of a SQLite store, once: nothing is left from which a second cluster could begin."""
    path = source / sqlite_file.DATABASE
    with ExitStack() as stack:
        async with _Opened(etcd_store(config)) as store:
            if not _same(source, Path(config.data_dir)):
                lock = sqlite_file.DirectoryLock(source)
                lock.acquire()
                stack.callback(lock.release)
            began = not path.exists()  # staged by an attempt that was cut short
            there = await _there(store)
            if there is not None and not began:
                raise StoreError(
                    f"the store in etcd holds the cluster {there.uid} already; nothing was changed. Import into an "
                    "empty one: of new members, or under another store.prefix"
                )
            staged = await asyncio.to_thread(sqlite_backup.stage_import, path)
            taken = await asyncio.to_thread(sqlite_db.read, staged)
            cluster = _cluster(taken)
            if there is None:
                await store.restore(str(staged))
            elif cluster is None or there.uid != cluster.uid:
                raise StoreError(f"the store in etcd holds another cluster ({there.uid}); {staged} was not imported")
            history = (await store.load()).history
            kept = await asyncio.to_thread(sqlite_backup.end_import, path)
    jobs, nodes = _count(taken)
    return (
        f"imported cluster {'' if cluster is None else cluster.uid} with {jobs} job(s) and {nodes} node(s); the "
        f"history counter is {history}. {kept} is kept, and is read by nobody"
    )


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


async def _there(store: EtcdStore) -> Cluster | None:
    """The cluster that the store holds; None where it is empty, or an import of it was cut short."""
    try:
        return _cluster(await store.load())
    except StoreRestoringError:
        return None


def _cluster(loaded: Loaded) -> Cluster | None:
    for record in loaded.records:
        if record.key == keys.CLUSTER:
            found = codec.decode(record.key, record.value)
            return found if isinstance(found, Cluster) else None
    return None


def _count(loaded: Loaded) -> tuple[int, int]:
    """(jobs, nodes)"""
    kinds = [type(codec.decode(record.key, record.value)) for record in loaded.records]
    return kinds.count(Job), kinds.count(Node)


def _reason(error: StoreError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None and str(error.filename) not in (error.strerror or ""):
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _parser(word: str) -> argparse.ArgumentParser:
    about = {
        "backup": "Copy the store of a controller, running or not, to FILE: whole and checked.",
        "restore": "Put a backup in the place of the store of stopped controllers: of one with SQLite, or of all that "
        "share an etcd, whose members run. The history counter is raised, so agents stop what they run for the state "
        "that is given up, and confirm it, before anything is granted again.",
        "import": "Take the SQLite store of a stopped controller into etcd, whose members run: every job, node, lease "
        "and request id. The history counter is raised: what runs is stopped, and goes on from its checkpoints. The "
        "SQLite store is set aside. Run it again when it was cut short.",
    }
    parser = argparse.ArgumentParser(
        prog=f"controld {word}",
        description=about[word],
        epilog=f"example: controld {word} --store-kind etcd --store-member-dir /run/virial/member"
        if word == "import"
        else f"example: controld {word} /backup/virial.db --data-dir {Config().data_dir}",
    )
    if word == "import":
        parser.add_argument("--from", dest="source", metavar="DIR", help="its data directory [default: --data-dir]")
    else:
        parser.add_argument("file", metavar="FILE", help="the backup")
    add_settings(parser)
    return parser
