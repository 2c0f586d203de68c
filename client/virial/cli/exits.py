"""Exit codes, and what went wrong as one message and one of them. Documented in `virial --help`: never renumber."""

from __future__ import annotations

import errno
from enum import IntEnum
from typing import Final


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    CONFLICT = 5
    INTERRUPTED = 130
    # What a shell reports of a program whose reader went away (SIGPIPE).
    PIPE_CLOSED = 141


# Only writing fails so, and the only file written without a name is where the output goes.
_OUTPUT_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

EXIT_CODES_HELP: Final = """\b
Exit codes:
  0    done; with --wait, the job succeeded
  1    the job failed, or another error
  2    wrong usage or an invalid job specification
  3    no such job, node, hold or member
  4    no controller, or not the node asked for, could be reached
  5    conflict: it already exists, has changed meanwhile, or cannot be done as things are
  130  interrupted (Ctrl-C)"""


class CliError(Exception):
    """A mistake or a refusal that this program found itself. The message says what to do."""

    def __init__(self, message: str, code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.code = code


def failure_of(error: BaseException) -> tuple[str, ExitCode] | None:
    """The message and exit code for an expected error; None for one that is a defect of this program."""
    if isinstance(error, CliError):
        return str(error), error.code
    from virial import errors
    from virial.yamlfile import YamlError
    from virialpb.strict import StrictError

    if isinstance(error, (StrictError, YamlError)):
        return str(error), ExitCode.USAGE
    if isinstance(error, errors.VirialError):
        return _message(error), _code(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", ExitCode.FAILED
    if isinstance(error, OSError) and error.errno in _OUTPUT_ERRORS:
        return f"cannot write the output: {error.strerror}", ExitCode.FAILED
    return None


def _message(error: BaseException) -> str:
    """The controller's sentence names the first wrong field; the others follow, one a line."""
    from virial.errors import VirialError

    lines = [str(error)]
    if isinstance(error, VirialError):
        lines += [f"  {v.field}: {v.description}" if v.field else f"  {v.description}" for v in error.violations[1:]]
    return "\n".join(lines)


def _code(error: BaseException) -> ExitCode:
    from virial import errors

    match error:
        case errors.InvalidRequestError():
            return ExitCode.USAGE
        case errors.NotFoundError():
            return ExitCode.NOT_FOUND
        case errors.UnavailableError():
            return ExitCode.UNREACHABLE
        case errors.AlreadyExistsError() | errors.ConflictError():
            return ExitCode.CONFLICT
        case _:
            return ExitCode.FAILED
