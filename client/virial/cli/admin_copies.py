"""`virial admin backup`, `restore` and `grow`: copies of the state, and one machine that becomes three."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from virial.cli.admin import admin
from virial.cli.exits import CliError, ExitCode
from virial.cli.frame import Session, command
from virial.cli.human import size

if TYPE_CHECKING:
    from virial import SyncClient

PEER_PORT: Final = 2380
PORT: Final = 7700
DIRECTORY: Final = "/var/lib/virial"
CERTS: Final = "/etc/virial/certs"
SIZES: Final = (3, 5)

DataDir = Annotated[
    str, typer.Option("--data-dir", metavar="DIR", help="The controller's. [default: as its configuration says]")
]
MemberDir = Annotated[
    str,
    typer.Option("--member-dir", metavar="DIR", help="Of the etcd member beside it. [default: as configured]"),
]
ConfigFile = Annotated[str, typer.Option("--config", metavar="FILE", help="The controller's configuration file.")]


@command("backup", "virial admin backup virial-$(date +%F).db", to=admin)
def backup(
    session: Session,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where to write it; must not be there yet.")],
) -> None:
    """Copy the whole state of a running cluster into a file, as of one moment. Nothing is held up.

    It is checked, is the same whatever the store is, and is brought back by `virial admin restore`. It holds what
    jobs have in their environment: keep it as you keep the cluster.
    """
    target = Path(file)
    if target.exists():
        raise CliError(f"{file}: exists already; a backup replaces nothing", ExitCode.CONFLICT)
    partial = target.with_name(target.name + ".partial")
    try:
        with session.client() as client:
            _write(client, partial)
        partial.replace(target)
        _sync(target.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    size_bytes = target.stat().st_size
    if session.printer.for_people:
        session.printer.line(f"wrote {file} ({size(size_bytes)}); bring it back with: virial admin restore {file}")
    else:
        session.printer.value({"file": file, "size_bytes": size_bytes})


def _write(client: SyncClient, path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as out:
        for part in client.backup():
            out.write(part)
        out.flush()
        os.fsync(descriptor)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@command(
    "restore",
    "virial admin restore virial-2026-11-30.db",
    "virial admin restore virial-2026-11-30.db --config /etc/virial/controld.toml",
    to=admin,
    connects=False,
)
def restore(
    session: Session,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A backup.")],
    config: ConfigFile = "",
    data_dir: DataDir = "",
    member_dir: MemberDir = "",
) -> None:
    """Put a backup in the place of the state. Run it on the host of a controller; all controllers must be stopped.

    With SQLite that is the one controller. With etcd it is any of them, once, while the members run. Agents then stop
    what they run for the state that is given up, and confirm it, before anything is granted again.
    """
    _controld(session, ["restore", str(Path(file).absolute()), *_settings(config, data_dir, member_dir)])


@command(
    "grow",
    "virial admin grow c1=10.0.0.1 c2=10.0.0.2 c3=10.0.0.3",
    "virial admin grow --import --config /etc/virial/controld.toml",
    "virial admin grow --import --data-dir /var/lib/virial/controld --member-dir /var/lib/virial/member",
    to=admin,
    connects=False,
)
def grow(
    session: Session,
    hosts: Annotated[
        list[str] | None, typer.Argument(metavar="NAME=HOST...", help="The controllers to be: 3 or 5.")
    ] = None,
    take: Annotated[
        bool, typer.Option("--import", help="Take this host's SQLite store into etcd; its controller is stopped.")
    ] = False,
    config: ConfigFile = "",
    data_dir: DataDir = "",
    member_dir: MemberDir = "",
) -> None:
    """Turn one controller with SQLite into three on an etcd of their own.

    With NAME=HOST arguments, say what to run on each host, in order. With --import, do the step that moves the state:
    every job, node, lease and request id. What runs is stopped, and goes on from its checkpoints.
    """
    if take == bool(hosts):
        raise CliError("give the controllers to be (c1=10.0.0.1 c2=... c3=...), or --import on the first one's host")
    if take:
        _controld(session, ["import", *_settings(config, data_dir, member_dir)])
        return
    steps = _steps(_pairs(hosts or []))
    if session.printer.for_people:
        for number, (where, what, commands) in enumerate(steps, 1):
            session.printer.line(f"{number}. {where}: {what}")
            for line in commands:
                session.printer.line(f"     {line}")
    else:
        session.printer.value([{"host": w, "what": t, "commands": list(c)} for w, t, c in steps])


def _pairs(hosts: list[str]) -> list[tuple[str, str]]:
    """(name, host) of each. Raises CliError."""
    pairs: list[tuple[str, str]] = []
    for text in hosts:
        name, equals, host = text.partition("=")
        if not equals or not name or not host or ":" in host.strip("[]").replace("::", ""):
            raise CliError(f"{text}: write NAME=HOST, such as c1=10.0.0.1")
        pairs.append((name, host))
    names, addresses = {name for name, _ in pairs}, {host for _, host in pairs}
    if len(pairs) not in SIZES or len(names) < len(pairs) or len(addresses) < len(pairs):
        raise CliError(f"give 3 or 5 controllers, each with a name and a host of its own; there are {len(pairs)}")
    return pairs


def _steps(pairs: list[tuple[str, str]]) -> list[tuple[str, str, tuple[str, ...]]]:
    """(where, what, commands), in order."""
    peers = " ".join(f"--peer {name}=https://{host}:{PEER_PORT}" for name, host in pairs)
    addresses = ",".join(f"{host}:{PORT}" for _, host in pairs)
    first, host = pairs[0]
    tls = f"--tls-certificate {CERTS}/certificate.pem --tls-key {CERTS}/key.pem --tls-client-ca {CERTS}/ca.pem"
    files = f"--peer-ca {CERTS}/members-ca.pem --peer-certificate {CERTS}/member.pem --peer-key {CERTS}/member-key.pem"
    settings = f"--store-kind etcd --store-member-dir {DIRECTORY}/member --data-dir {DIRECTORY}/controld"
    steps: list[tuple[str, str, tuple[str, ...]]] = [
        (
            "where your certificates are made",
            f"one for each controller, copied to {CERTS} there",
            tuple(f"virial admin certs issue controller {name} --host {name} --host {host}" for name, host in pairs),
        )
    ]
    steps += [
        (
            f"{h} ({name})",
            "start the member of the store, and leave it running",
            (f"controld member --name {name} {peers} {files} --directory {DIRECTORY}/member",),
        )
        for name, h in pairs
    ]
    steps.append(
        (
            f"{host} ({first})",
            "keep a copy of the state, stop the controller, move the state (tasks run on until their leases end)",
            (
                "virial admin backup before-growing.db",
                "systemctl stop controld",
                f"virial admin grow --import --data-dir {DIRECTORY}/controld --member-dir {DIRECTORY}/member",
            ),
        )
    )
    for name, h in pairs:
        start = f"controld --identity {name} --listen {h}:{PORT} --peers {addresses} {settings} {tls}"
        steps.append((f"{h} ({name})", "start the controller, with these settings", (start,)))
    steps.append(
        (
            "every node",
            "give the agent all controllers, and look",
            (f"noded --controllers {addresses}", "virial status"),
        )
    )
    return steps


def _settings(config: str, data_dir: str, member_dir: str) -> list[str]:
    flags = ["--config", str(Path(config).absolute())] if config else []
    flags += ["--data-dir", data_dir] if data_dir else []
    return flags + (["--store-kind", "etcd", "--store-member-dir", member_dir] if member_dir else [])


def _controld(session: Session, words: list[str]) -> None:
    """What is done on a controller's own files its program does; what it says is passed on."""
    ended = subprocess.run([sys.executable, "-m", "controld", *words], check=False, text=True, capture_output=True)
    if ended.returncode:
        said = ended.stderr.strip() or f"controld {shlex.join(words)} ended with status {ended.returncode}"
        if "No module named" in said:
            said = "the controller is not installed here: run this on the host of a controller"
        raise CliError(said, ExitCode.USAGE if ended.returncode == ExitCode.USAGE else ExitCode.FAILED)
    if session.printer.for_people:
        session.printer.line(ended.stdout.strip())
    else:
        session.printer.value({"done": ended.stdout.strip()})
