"""`controld`: read the settings, run, and say in one line what went wrong."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from controld.config import Config
from controld.options import add_settings, load_settings
from virialpb.layered import ConfigError, describe
from virialpb.version import Version

EXIT_CONFIG = 2

EPILOG = """\
`controld member` runs the etcd member beside a controller; `controld backup FILE` and `controld restore FILE` copy the
store and put it back; `controld import` takes a SQLite store into etcd. Each has a --help of its own.

exit status: 0 stopped, 1 failed or lost the leadership, 2 settings, 3 address in use, 4 data directory

examples:
  controld --listen 10.0.0.1:7700 --tls-certificate certificate.pem --tls-key key.pem --tls-client-ca ca.pem
  controld --data-dir ~/controld                               # without root, for this machine only
  controld --config /etc/virial/controld.toml --check-config
"""


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] == "member":
        from controld.member import main as member_main

        return member_main(words[1:])
    if words and words[0] in ("backup", "restore", "import"):
        from controld.copies import main as copies_main

        return copies_main(words)
    options = _parser().parse_args(words)
    try:
        loaded = load_settings(options)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="controld",
        description="The controller of a Virial cluster. Settings: defaults < file < VIRIAL_CONTROLD__... < flags.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=Version)
    parser.add_argument("--check-config", action="store_true", help="check the settings and exit")
    parser.add_argument("--print-config", action="store_true", help="print each setting, where it came from, and exit")
    add_settings(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
