"""`virial admin members` and `virial admin move-leader`: the controllers and the members of their store."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from virial.cli.admin import admin
from virial.cli.exits import CliError, ExitCode
from virial.cli.frame import Session, command, group
from virial.cli.human import UNKNOWN, size
from virial.cli.printer import Printer, Table

if TYPE_CHECKING:
    from virial import SyncClient
    from virial.models import Controllers, MembersChange, StoreMember

POLL_S: Final = 0.5
# A member that joins loads everything from the leader first.
WAIT_S: Final = 600.0
# Right after another change etcd refuses the next one for some seconds, and the controller asks it again.
CHANGE_TIMEOUT_S: Final = 60.0

members = group("members", "Show and change the members of the store beneath the controllers.", under=admin)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The member's name.")]
UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="How the others reach it: https://HOST:PORT.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the new member has its vote.")]


@command("list", "virial admin members list", "virial admin members list -o json", to=members)
def list_(session: Session) -> None:
    """List the controllers and the members of their store, and what is wrong with them.

    Any controller answers, also while nobody leads.
    """
    with session.client() as client:
        found = client.list_controllers()
    if session.printer.for_people:
        show(session.printer, found)
    else:
        session.printer.value(found)


def show(printer: Printer, found: Controllers) -> None:
    printer.table(
        Table(
            ("CONTROLLER", "ADDRESS", "ROLE", "VERSION"),
            [(c.identity or UNKNOWN, c.address, c.role, c.version or UNKNOWN) for c in found.controllers],
        )
    )
    if found.members:
        printer.line("")
        printer.table(
            Table(
                ("MEMBER", "ID", "PEER URL", "ROLE", "LAG", "SIZE", "ETCD"),
                [
                    (m.name or "(not started)", m.id, m.peer_url, m.role, *_state(m), m.version or UNKNOWN)
                    for m in found.members
                ],
                frozenset({"LAG", "SIZE"}),
            )
        )
    for problem in found.problems:
        printer.pairs([("  -", problem)])


def _state(member: StoreMember) -> tuple[str, str]:
    return (UNKNOWN, UNKNOWN) if member.role == "SILENT" else (str(member.lag_entries), size(member.size_bytes))


@command("add", "virial admin members add c4 https://10.0.0.4:2380", to=members)
def add(session: Session, name: NameArgument, url: UrlArgument, wait: Wait = True) -> None:
    """Add a member, and say how to start it on its host.

    It has no vote until it has caught up; the leader then gives it one.
    """
    with session.client(CHANGE_TIMEOUT_S) as client:
        change = client.add_member(name, url)
        _added(session.printer, client, change, name, wait=wait)


@command("remove", "virial admin members remove c4", "virial admin members remove https://10.0.0.4:2380", to=members)
def remove(
    session: Session, member: Annotated[str, typer.Argument(metavar="MEMBER", help="Its name, its id or its URL.")]
) -> None:
    """Remove a member for good: it cannot come back with the data it has.

    One that was added and has not started has no name yet: give its URL. Refused where the members that are left would
    have no majority in step.
    """
    with session.client(CHANGE_TIMEOUT_S) as client:
        change = client.remove_member(member)
    if session.printer.for_people:
        session.printer.line(f"{member} is a member no more; stop `controld member` there and remove its directory")
    else:
        session.printer.value(change)


@command(
    "replace",
    "virial admin members replace c2",
    "virial admin members replace c2 --url https://10.0.0.9:2380 --name c9",
    to=members,
)
def replace(
    session: Session,
    member: Annotated[str, typer.Argument(metavar="MEMBER", help="The dead one: its name, or its id.")],
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="Where the new one is reached. [default: as the dead one]")
    ] = "",
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Of the new one. [default: as the dead one]")
    ] = "",
    wait: Wait = True,
) -> None:
    """Put a new member in the place of a dead one, and say how to start it.

    Refused while the old one answers and is in step, and where the others have no majority. Run it again when it was
    interrupted: what is done already is not done twice.
    """
    with session.client(CHANGE_TIMEOUT_S) as client:
        found = client.list_controllers().members
        dead = next((m for m in found if member in (m.name, m.id)), None)
        if dead is None:
            # Removed by an attempt that was interrupted: the new one is there, or has still to be added.
            if not url:
                names = ", ".join(m.name or m.peer_url for m in found) or "none"
                raise CliError(
                    f"no member is called {member} (there are: {names}); if it was removed already, add the new one: "
                    f"virial admin members add {name or member} URL",
                    ExitCode.NOT_FOUND,
                )
            change = client.add_member(name or member, url)
        else:
            change = client.replace_member(dead.id, name or dead.name, url or dead.peer_url)
        _added(session.printer, client, change, name or member, wait=wait)


def _added(printer: Printer, client: SyncClient, change: MembersChange, name: str, *, wait: bool) -> None:
    peers = " ".join(f"--peer {shlex.quote(peer)}" for peer in change.peers)
    start = f"controld member --joins --name {shlex.quote(name)} {peers} --directory DIR"
    if printer.for_people:
        printer.line(
            f"added {name}; start it on its host in an empty directory, with --peer-* files as the others have:"
        )
        printer.line(f"  {start}")
    elif not wait:
        printer.value(change)
    if wait:
        printer.note("waiting until it has started and has its vote (Ctrl-C stops the waiting, not the adding)")
        _wait_for_vote(client, change.added_id)
        if printer.for_people:
            printer.line(f"{name} votes")
        else:
            printer.value(client.list_controllers())


def _wait_for_vote(client: SyncClient, id_: str) -> None:
    """Raises VirialError."""
    from virial.errors import VirialError

    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        found = next((m for m in client.list_controllers().members if m.id == id_), None)
        if found is None:
            raise VirialError(f"the member {id_} was removed meanwhile")
        if found.role in ("VOTES", "LEADS"):
            return
        time.sleep(POLL_S)
    raise VirialError(f"the member {id_} has no vote after {WAIT_S:g} s; see its log (etcd.log in its directory)")


@command("move-leader", "virial admin move-leader c2", to=admin)
def move_leader(
    session: Session,
    controller: Annotated[str, typer.Argument(metavar="CONTROLLER", help="Who shall lead: its name or HOST:PORT.")],
) -> None:
    """Hand the leadership over to another controller, before work on the host that leads now.

    Calls wait for some tens of milliseconds; nothing is lost, and no task notices.
    """
    with session.client() as client:
        leader = client.move_leader(controller)
    if session.printer.for_people:
        session.printer.line(f"{controller} leads ({leader})" if leader != controller else f"{leader} leads")
    else:
        session.printer.value({"leader": leader})
