"""`controld`: read the settings, run, and say in one line what went wrong."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from controld.config import DEFAULT_FILE, Config, load_config
from virialpb.layered import ConfigError, Loaded, describe, load

CONFIG_VARIABLE = "VIRIAL_CONTROLD_CONFIG"
EXIT_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] == "member":
        from controld.member import main as member_main

        return member_main(words[1:])
    options = _parser().parse_args(words)
    try:
        loaded = _load(options)
    except ConfigError as error:
        for line in error.errors:
            print(f"controld: {line}", file=sys.stderr)
        return EXIT_CONFIG
    if options.print_config:
        width = max(len(name) for name, _, _ in describe(loaded))
        for name, value, origin in describe(loaded):
            print(f"{name:<{width}}  {value or '(none)'}  ({origin})")
    if options.check_config or options.print_config:
        return 0
    return _run(loaded.value)


def _run(config: Config) -> int:
    # Late: --help and --check-config shall not wait for gRPC to load.
    from controld.app import App, StartError
    from controld.service.telemetry import make_log

    log = make_log(level=config.log.level, format_=config.log.format)
    try:
        return asyncio.run(App(config, log=log).run())
    except StartError as error:
        print(f"controld: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130


def _load(options: argparse.Namespace) -> Loaded[Config]:
    """Raises ConfigError."""
    given: str | None = options.config or os.environ.get(CONFIG_VARIABLE)
    path = Path(given or DEFAULT_FILE)
    text: str | None = None
    if given is not None or path.exists():
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError([f"cannot read the configuration file {path}: {reason}"]) from error
    flags = {name: getattr(options, _destination(name)) for name in _settings()}
    return load_config(toml_text=text, toml_name=str(path), environ=os.environ, flags=flags)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="controld",
        description="The controller of a Virial cluster. Settings: defaults < file < VIRIAL_CONTROLD__... < flags.",
        epilog="`controld member` runs the etcd member beside a controller. "
        "exit status: 1 failed or lost the leadership, 2 settings, 3 address in use, 4 data directory",
    )
    parser.add_argument("--config", metavar="FILE", help=f"TOML file (default: {DEFAULT_FILE} where it exists)")
    parser.add_argument("--check-config", action="store_true", help="check the settings and exit")
    parser.add_argument("--print-config", action="store_true", help="print each setting, where it came from, and exit")
    group = parser.add_argument_group("settings")
    for name, default in _settings().items():
        flag = "--" + name.replace(".", "-").replace("_", "-")
        if default in ("true", "false"):
            group.add_argument(flag, dest=_destination(name), nargs="?", const="true", metavar="BOOL")
        else:
            group.add_argument(flag, dest=_destination(name), metavar="VALUE", help=f"default: {default or 'none'}")
    return parser


def _settings() -> dict[str, str]:
    """Every setting by its dotted name, with its default as it would be written."""
    defaults = load(Config, toml_text=None, toml_name="", environ={}, prefix="", flags={})
    return {name: value for name, value, _ in describe(defaults)}


def _destination(name: str) -> str:
    return "set_" + name.replace(".", "__")


if __name__ == "__main__":
    sys.exit(main())
