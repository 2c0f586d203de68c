"""`virial admin token`: let a new node join."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from virial.cli.admin import admin
from virial.cli.exits import CliError, ExitCode
from virial.cli.frame import Session, bare, command, group
from virial.cli.human import moment

MS_NS: Final = 1_000_000

token = group("token", "Let new nodes join the cluster.", under=admin)


@command(
    "create",
    "virial admin token create --node node-7 --file node-7.join",
    "virial admin token create --node node-7 --ttl 10m > node-7.join",
    to=token,
)
def create(
    session: Session,
    node: Annotated[str, typer.Option("--node", metavar="NAME", help="Its name.", callback=bare("nodes/"))],
    ttl: Annotated[str, typer.Option("--ttl", metavar="DURATION", help="How long it may take to join.")] = "1h",
    file: Annotated[str, typer.Option("--file", metavar="FILE", help="Write it there, for its owner only.")] = "",
) -> None:
    """Make a token that lets one new node join, once: bring it there and start noded with --join-token-file.

    Whoever has it can become that node, so treat it as a password until it was used.
    """
    target = Path(file) if file else None
    if target is not None and target.exists():
        raise CliError(f"{target} exists: name another --file, or remove it", ExitCode.CONFLICT)
    with session.client() as client:
        made = client.create_join_token(node, ttl_ms=_ttl_ms(ttl))
    if target is not None:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="ascii") as out:
            out.write(made.text)
    if not session.printer.for_people:
        session.printer.value(made)
    elif target is not None:
        session.printer.line(
            f"{target}: lets {made.node} join {made.cluster}, once, until {moment(made.expire_time_unix_ns)}"
        )
    else:
        session.printer.line(made.text.rstrip())


def _ttl_ms(text: str) -> int:
    from virialpb.units import QuantityError, parse_duration_ns

    try:
        return parse_duration_ns(text) // MS_NS
    except QuantityError as error:
        raise CliError(f"--ttl: {error}") from None
