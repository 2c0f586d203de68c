"""The command `virial`."""

from __future__ import annotations

import sys

_COMPLETE = "__complete"


def main() -> int:
    """Run the command line of this process; the exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] == [_COMPLETE]:
        # Before anything else is imported: this runs at every press of TAB.
        from virial.cli.complete import complete

        return complete(arguments[1:])
    from virial.cli.app import run

    return run(arguments)
