"""`controld member`: the etcd member beside a controller, configured, started, watched, and started again.

A process of its own, so that a crash of the controller does not take the member along, nor the other way round.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from controld.service.telemetry import LogName, StructLog, make_log
from controld.store import member_config
from controld.store.member import (
    MemberError,
    MemberInUseError,
    MemberMissingError,
    MemberProcess,
    MemberQuarantinedError,
    supervise,
)
from controld.store.member_config import MemberConfig, MemberConfigError, PeerTls
from controld.store.member_policy import Damaged, Ended, MemberEvent, Started
from virialpb.units import QuantityError, parse_bytes

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_DATA_DIRECTORY = 4

EPILOG = """\
exit status: 0 stopped, 1 it does not come up, 2 settings or no etcd, 4 its directory or its data

examples (on c1; every member is given all peers):
  controld member --name c1 --directory /var/lib/virial/member --peer c1=http://127.0.0.1:2380
  controld member --name c1 --directory /var/lib/virial/member \\
      --peer c1=https://10.0.0.1:2380 --peer c2=https://10.0.0.2:2380 --peer c3=https://10.0.0.3:2380 \\
      --peer-ca members-ca.pem --peer-certificate member.pem --peer-key member-key.pem
"""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    try:
        config = _config(options)
        if options.print_config:
            sys.stdout.write(member_config.render(config))
            return 0
        return asyncio.run(_run(MemberProcess(config), make_log(format_=options.log_format)))
    except (MemberConfigError, MemberMissingError) as error:
        return _fail(error, EXIT_CONFIG)
    except (MemberInUseError, MemberQuarantinedError, OSError) as error:
        return _fail(getattr(error, "strerror", None) or error, EXIT_DATA_DIRECTORY)
    except MemberError as error:
        return _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return 130


async def _run(member: MemberProcess, log: StructLog) -> int:
    """Until a signal. Raises MemberError, OSError."""
    running = asyncio.ensure_future(supervise(member, lambda event: _tell(log, member.config.name, event)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    with suppress(asyncio.CancelledError):
        await running
    log(LogName.MEMBER_STOPPED, name=member.config.name)
    return 0


def _tell(log: StructLog, name: str, event: MemberEvent) -> None:
    match event:
        case Started():
            log(LogName.MEMBER_STARTED, name=name, pid=event.pid)
        case Ended():
            log(
                LogName.MEMBER_ENDED,
                name=name,
                status=event.status,
                said=event.said,
                restart_delay_seconds=event.delay_seconds,
            )
        case Damaged():
            log(LogName.MEMBER_DAMAGED, name=name, why=event.why)


def _config(options: argparse.Namespace) -> MemberConfig:
    """Raises MemberConfigError."""
    peers: dict[str, str] = {}
    for text in options.peer:
        name, equals, url = text.partition("=")
        if not equals:
            raise MemberConfigError(f"--peer {text}: write NAME=URL, such as c1=https://10.0.0.1:2380")
        peers[name] = url
    files = [options.peer_ca, options.peer_certificate, options.peer_key]
    if None in files and any(files):
        raise MemberConfigError("--peer-ca, --peer-certificate and --peer-key come together")
    for file in filter(None, files):
        if not Path(file).is_file():
            raise MemberConfigError(f"{file} is not a file")
    try:
        size_bytes_max = parse_bytes(options.size_max)
    except QuantityError as error:
        raise MemberConfigError(f"--size-max: {error.message}") from error
    config = MemberConfig(
        name=options.name,
        directory=Path(options.directory).absolute(),
        peers=peers,
        cluster_name=options.cluster_name,
        joins=options.joins,
        size_bytes_max=size_bytes_max,
        listen=options.listen_peer,
        tls=None if None in files else PeerTls(*(Path(file).absolute() for file in files)),
    )
    member_config.check(config)
    return config


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="controld member",
        description="Run the etcd member beside a controller; controld finds it by --store-member-dir.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", required=True, help="of this member; one of the peers")
    parser.add_argument("--directory", required=True, metavar="DIR", help="made with mode 0700")
    parser.add_argument(
        "--peer", required=True, action="append", metavar="NAME=URL", help="each member, this one too: 1, 3 or 5"
    )
    parser.add_argument(
        "--listen-peer", default="", metavar="URL", help="listen there for the others (default: at its own --peer URL)"
    )
    parser.add_argument("--joins", action="store_true", help="the others run already and have added this one")
    parser.add_argument("--cluster-name", default="virial", help="members of another name are refused")
    parser.add_argument("--size-max", default="8GiB", help="as controld's store.size_max (default: 8GiB)")
    parser.add_argument("--peer-ca", metavar="FILE", help="PEM: who signed the peers' certificates")
    parser.add_argument("--peer-certificate", metavar="FILE")
    parser.add_argument("--peer-key", metavar="FILE")
    parser.add_argument("--log-format", choices=("auto", "json", "text", "console"), default="auto")
    parser.add_argument("--print-config", action="store_true", help="print etcd's configuration file and exit")
    return parser


def _fail(error: Exception | str, status: int) -> int:
    sys.stderr.write(f"controld member: {error}\n")
    return status
