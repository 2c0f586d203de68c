"""Which version of the distribution runs. Standard library only."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata


def own_version() -> str:
    """Of the installed distribution; "unknown" when it runs from a bare source tree."""
    try:
        return metadata.version("virial")
    except metadata.PackageNotFoundError:
        return "unknown"


class Version(argparse.Action):
    """`--version`: print the program's name and version, and exit. Looked up only when asked for: it reads files."""

    def __init__(self, option_strings: list[str], dest: str, **_: object) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"{parser.prog.partition(' ')[0]} {own_version()}\n")
        parser.exit()
