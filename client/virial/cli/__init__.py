"""The command `virial`."""

from __future__ import annotations

import os
import sys

_COMPLETE = "__complete"


def main() -> int:
    """Run the command line of this process; the exit code."""
    arguments = sys.argv[1:]
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (>&-): nobody wants to read it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends
    if arguments[:1] == [_COMPLETE]:
        # Before anything else is imported: this runs at every press of TAB.
        from virial.cli.complete import complete

        return complete(arguments[1:])
    try:
        from virial.cli.app import run

        return run(arguments)
    except KeyboardInterrupt:  # before a command began, or after it
        return 130
