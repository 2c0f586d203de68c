"""All commands together, and how the process ends."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Final

from virial.cli.exits import ExitCode
from virial.cli.frame import app, silence

# Each adds its commands to `app` when it is imported; --help lists them in this order.
_MODULES: Final = ("up", "submit", "jobs", "logs", "nodes", "events", "top", "status", "admin", "completion")
for _module in _MODULES:
    importlib.import_module(f"virial.cli.{_module}")

__all__ = ["app", "run"]


def run(arguments: Sequence[str]) -> int:
    """The exit code of one command line. Only what was left in the buffers is still to be written then."""
    code: int = ExitCode.OK
    try:
        try:
            app(list(arguments), prog_name="virial")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else ExitCode.OK if end.code is None else ExitCode.FAILED
        sys.stdout.flush()
    except BrokenPipeError:
        silence()
        return ExitCode.PIPE_CLOSED
    except OSError as error:
        silence()
        print(f"virial: cannot write the output: {error.strerror}", file=sys.stderr)
        return code or ExitCode.FAILED
    return code
