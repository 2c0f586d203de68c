"""`noded`: the node agent. Exit status: 0 after a stop, 1 when it cannot start or go on, 2 for wrong settings."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Final

from noded.app import CannotStart, Options, run
from noded.config import CONFIG_VARIABLE, DEFAULT_FILE, NodedConfig, load_config
from noded.files import DataDirProblem
from noded.flags import parser
from noded.logs import setup_log
from virialpb.layered import ConfigError, describe, settings

CONFIG_BYTES_MAX: Final = 1 << 20
BAD_CONFIG: Final = 2
FAILED: Final = 1


def main(argv: list[str] | None = None) -> int:
    options = vars(parser().parse_args(argv))
    # gRPC reads these when its first channel is made. Its fork handlers only complain here: children exec at once.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        text, name = _file(options["config"] or os.environ.get(CONFIG_VARIABLE))
        loaded = load_config(text, name, os.environ, {s.name: options[s.name] for s in settings(NodedConfig)})
    except ConfigError as error:
        return _say(error.errors, BAD_CONFIG)
    if options["print_config"]:
        for name, value, origin in describe(loaded):
            print(f"{name} = {value}  # {origin}")
    if options["check_config"] or options["print_config"]:
        return 0
    config = loaded.value
    log = setup_log(config.log_format, config.log_level, config.name)
    try:
        asyncio.run(run(config, Options(kill_tasks=options["kill_tasks_on_exit"]), log))
    except ConfigError as error:
        return _say(error.errors, BAD_CONFIG)
    except DataDirProblem as problem:
        return _say([str(problem)], BAD_CONFIG)
    except CannotStart as problem:
        return _say([str(problem)], FAILED)
    return 0


def _file(given: Path | str | None) -> tuple[str | None, str]:
    """(text, name) of the settings file; the one in its usual place need not be there. Raises ConfigError."""
    path = Path(given or DEFAULT_FILE)
    where = "" if given is None else "--config: "
    if given is None and not path.exists():
        return None, str(path)
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES_MAX + 1)
        if len(data) > CONFIG_BYTES_MAX:
            raise ConfigError([f"{where}{path} is larger than {CONFIG_BYTES_MAX} bytes"])
        return data.decode(), str(path)
    except OSError as error:
        raise ConfigError([f"{where}cannot read {path}: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{where}{path} is not UTF-8 text"]) from None


def _say(messages: list[str], status: int) -> int:
    for message in messages:
        print(f"noded: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
