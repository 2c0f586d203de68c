"""`virial admin certs`: an authority of your own, and what it signs. Nothing here needs a cluster."""

from __future__ import annotations

import importlib.util
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from virial.cli.admin import admin
from virial.cli.exits import CliError, ExitCode
from virial.cli.frame import Session, command, group

DAYS: Final = 365
DAYS_MAX: Final = 3_650

certs = group("certs", "Make certificates for a cluster, and replace their authority.", under=admin)


class Kind(StrEnum):
    """What a certificate is for. `issuer` is for controllers that admit nodes by join tokens."""

    CONTROLLER = "controller"
    NODE = "node"
    USER = "user"
    ADMIN = "admin"
    ISSUER = "issuer"


class Step(StrEnum):
    BEGIN = "begin"
    SWITCH = "switch"
    FINISH = "finish"


Directory = Annotated[
    str, typer.Option("--directory", metavar="DIR", help="Where your authority is. Keep it away from the hosts.")
]
Days = Annotated[int, typer.Option("--days", metavar="DAYS", min=1, max=DAYS_MAX, help="How long it is valid.")]


@command("init", "virial admin certs init rack-7", to=certs, connects=False)
def init(
    session: Session,
    cluster: Annotated[str, typer.Argument(metavar="NAME", help="The cluster's name; in every certificate.")],
    directory: Directory = "virial-certs",
) -> None:
    """Make an authority for a cluster, in a new directory."""
    _check_installed()
    from virial.cli import _authority

    _authority.create(Path(directory), cluster, datetime.now(UTC))
    if session.printer.for_people:
        session.printer.line(f"the authority of {cluster} is in {directory}: its keys can make anyone an admin")
        session.printer.line("next: virial admin certs issue controller ctl-1 --host ctl-1 --host 10.0.0.1")
    else:
        session.printer.value({"cluster": cluster, "directory": directory, "ca": str(Path(directory) / "ca.pem")})


@command(
    "issue",
    "virial admin certs issue controller ctl-1 --host ctl-1 --host 10.0.0.1",
    "virial admin certs issue node node-1",
    "virial admin certs issue admin alice --days 90",
    "virial admin certs issue node node-1 --renew",
    to=certs,
    connects=False,
)
def issue(
    session: Session,
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="controller, node, user, admin or issuer.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is; a node's is the name it joins under.")],
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="HOST", help="A name or address a controller is reached by; may be repeated."),
    ] = None,
    days: Days = DAYS,
    renew: Annotated[bool, typer.Option("--renew", help="Replace the one that is there, with a new key.")] = False,
    directory: Directory = "virial-certs",
) -> None:
    """Make a key and a certificate, in a directory to be copied to its machine."""
    _check_installed()
    from virial.cli import _authority

    made = _authority.issue(Path(directory), kind.value, name, hosts or [], datetime.now(UTC), days, renew=renew)
    if session.printer.for_people:
        session.printer.line(f"{made.directory}: {made.role} {made.name}, valid until {made.not_after}")
    else:
        session.printer.value(made)


@command("list", "virial admin certs list", "virial admin certs list -o json", to=certs, connects=False)
def list_(session: Session, directory: Directory = "virial-certs") -> None:
    """Show what was issued, and until when it is valid."""
    _check_installed()
    from virial.cli import _authority

    found = _authority.issued(Path(directory))
    if not session.printer.for_people:
        session.printer.value(found)
        return
    from virial.cli.printer import Table

    rows = [(one.role, one.name, one.not_after, ", ".join(one.hosts)) for one in found]
    session.printer.table(Table(("KIND", "NAME", "VALID UNTIL", "HOSTS"), rows))


_THEN: Final = {
    Step.BEGIN: "copy ca.pem (and members-ca.pem) to every machine; then: rotate switch, a minute later "
    "(a day, where nodes joined by tokens)",
    Step.SWITCH: "copy each directory to its machine; then: rotate finish, a minute later "
    "(a day, where nodes joined by tokens)",
    Step.FINISH: "copy ca.pem (and members-ca.pem) to every machine: the old authority is trusted no more then",
}


@command(
    "rotate",
    "virial admin certs rotate begin",
    "virial admin certs rotate switch",
    "virial admin certs rotate finish",
    to=certs,
    connects=False,
)
def rotate(
    session: Session,
    step: Annotated[Step, typer.Argument(metavar="STEP", help="begin, switch, finish: in this order.")],
    days: Days = DAYS,
    directory: Directory = "virial-certs",
) -> None:
    """Replace the authority in three steps, without a moment in which anyone is not trusted."""
    _check_installed()
    from virial.cli import _authority

    where, now = Path(directory), datetime.now(UTC)
    renewed: list[_authority.Issued] = []
    match step:
        case Step.BEGIN:
            state = _authority.begin(where, now)
        case Step.SWITCH:
            state, renewed = _authority.switch(where, now, days)
        case Step.FINISH:
            state = _authority.finish(where)
    if session.printer.for_people:
        for one in renewed:
            session.printer.line(f"{one.directory}: {one.role} {one.name}, valid until {one.not_after}")
        session.printer.line(_THEN[step])
    else:
        session.printer.value({"cluster": state.cluster, "rotation": state.rotation, "renewed": renewed})


def _check_installed() -> None:
    """Only an operator's machine has it. Raises CliError."""
    if importlib.util.find_spec("cryptography") is None:
        raise CliError(
            "making certificates needs the package cryptography: pip install 'virial[admin]'", ExitCode.FAILED
        )
