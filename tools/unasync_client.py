"""Generate `virial._sync.client` from `virial._async.client`, so that the two never differ."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "client" / "virial" / "_async" / "client.py"
TARGET = ROOT / "client" / "virial" / "_sync" / "client.py"
HEADER = "# Generated from virial/_async/client.py by tools/unasync_client.py: change that one.\n"
WORDS = {
    "Client": "SyncClient",
    "_async": "_sync",
    "Awaitable": "Reply",
    "AsyncIterator": "Iterator",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
}


def generate() -> str:
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "_async" / "client.py"
        source.parent.mkdir()
        text = SOURCE.read_text(encoding="utf-8")
        # An awaitable of a message is, without waiting, the message.
        text = text.replace("Callable[[Connection, float], Awaitable[M]]", "Callable[[Connection, float], M]")
        text = text.replace("AsyncIterator, Awaitable, Callable", "AsyncIterator, Callable")
        source.write_text(text, encoding="utf-8")
        target = Path(scratch) / "_sync"
        rule = unasync.Rule(fromdir="/_async/", todir="/_sync/", additional_replacements=WORDS)
        unasync.unasync_files([str(source)], [rule])  # pyright: ignore[reportUnknownMemberType] - untyped library
        made = target / "client.py"
        made.write_text(HEADER + made.read_text(encoding="utf-8"), encoding="utf-8")
        config = ["--quiet", "--config", str(ROOT / "pyproject.toml"), str(made)]
        for command in (["check", "--fix", "--unsafe-fixes", "--select", "I,UP028", *config], ["format", *config]):
            subprocess.run([sys.executable, "-m", "ruff", *command], check=True)
        return made.read_text(encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the file is not up to date")
    arguments = parser.parse_args()
    text = generate()
    if arguments.check:
        if TARGET.read_text(encoding="utf-8") != text:
            print(f"{TARGET.relative_to(ROOT)} is out of date: run python tools/unasync_client.py", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
