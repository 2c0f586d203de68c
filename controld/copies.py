"""`controld backup FILE` and `controld restore FILE`: a copy of the SQLite store, and back."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from controld.config import Config
from controld.store.port import StoreError
from controld.store.sqlite import SqliteStore

EXIT_DATA = 4


def main(words: Sequence[str]) -> int:
    options = _parser(words[0]).parse_args(words[1:])
    directory = Path(options.data_dir)
    store = SqliteStore(directory)
    try:
        if words[0] == "backup":
            asyncio.run(store.copy_to(options.file))
            sys.stdout.write(f"wrote {options.file}\n")
        else:
            asyncio.run(store.restore(options.file))
            sys.stdout.write(f"restored {directory} from {options.file}; what was there stays as *.replaced\n")
    except (StoreError, OSError) as error:
        sys.stderr.write(f"controld {words[0]}: {error}\n")
        return EXIT_DATA
    return 0


def _parser(word: str) -> argparse.ArgumentParser:
    about = {
        "backup": "Copy the store of a controller, running or not, to FILE: whole and checked.",
        "restore": "Put a backup in the place of a stopped controller's store. The history counter is raised, so agents"
        " stop what they run for the state that is given up, and confirm it, before anything is granted again.",
    }
    parser = argparse.ArgumentParser(
        prog=f"controld {word}",
        description=about[word],
        epilog=f"example: controld {word} /backup/virial.db --data-dir {Config().data_dir}",
    )
    parser.add_argument("file", metavar="FILE", help="the backup")
    parser.add_argument("--data-dir", metavar="DIR", default=Config().data_dir, help="[default: %(default)s]")
    return parser
