"""`virial status` and `virial version`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from virial.cli.frame import Session, command
from virial.cli.human import UNKNOWN, plural

if TYPE_CHECKING:
    from virial import SyncClient

AFTERWARDS_S: Final = 5.0
SHARED: Final = "etcd"


@command("status", "virial status", "virial status -o json")
def status(session: Session) -> None:
    """Show whether the cluster is well, and what is wrong."""
    from virial.errors import UnavailableError

    printer = session.printer
    with session.client() as client:
        try:
            found = client.get_status()
        except UnavailableError:
            without_leader(session)
            raise
        together = all_together(client) if found.store_kind == SHARED and printer.for_people else []
    if not printer.for_people:
        printer.value(found)
        return
    silent = [(found.nodes_suspect, "silent"), (found.nodes_expired, "lost")]
    nodes = f"{found.nodes_live} live" + "".join(f", {count} {word}" for count, word in silent if count)
    jobs = ", ".join(f"{count} {state}" for state, count in found.jobs_by_state if count)
    printer.pairs(
        [
            ("cluster", found.cluster_uid),
            *(together or [("leader", found.leader or UNKNOWN)]),
            ("leader epoch", ".".join(str(part) for part in found.leader_epoch)),
            ("revision", str(found.cursor.revision)),
            ("store", found.store_kind),
            ("version", found.version or UNKNOWN),
            ("nodes", nodes),
            ("jobs", jobs or "none"),
            ("problems", plural(len(found.problems), "problem") if found.problems else "none"),
        ]
    )
    for problem in found.problems:
        printer.pairs([("  -", problem)])


def all_together(client: SyncClient) -> list[tuple[str, str]]:
    """Of several controllers each, and each member of their store; nothing where only an admin may ask."""
    from virial.cli.together import rows
    from virial.errors import VirialError

    with suppress(VirialError):
        return rows(client.list_controllers())
    return []


def without_leader(session: Session) -> None:
    """Nobody leads, or the leader does not answer: what any controller can say of the others and of their store."""
    from virial.errors import VirialError

    try:
        with replace(session, timeout_s=AFTERWARDS_S).client() as client:
            found = client.list_controllers()
    except VirialError:
        return  # not one of them answers: the first error says it
    if session.printer.for_people:
        for problem in found.problems:
            session.printer.note(f"virial: {problem}")
    else:
        session.printer.value(found)


@command("version", "virial version", "virial version -o json")
def version(session: Session) -> None:
    """Show the versions of this program and of the cluster."""
    from virial.cli.exits import CliError
    from virial.errors import VirialError
    from virialpb.version import own_version

    try:
        # A version is asked for to see what is installed: a cluster that is away should not hold that up.
        with replace(session, timeout_s=session.timeout_s or 1.0).client() as client:
            cluster = client.get_status().version
    except (VirialError, CliError):
        cluster = ""
    if session.printer.for_people:
        session.printer.pairs([("virial", own_version()), ("cluster", cluster or "not reached")])
    else:
        session.printer.value({"client": own_version(), "cluster": cluster or None})
