"""`virial events`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from virial.cli.frame import Session, bare, command

if TYPE_CHECKING:
    from virial import SyncClient


@command("events", "virial events", "virial events -f --job train-7", "virial events --node node-3 -o json")
def events(
    session: Session,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with each as it is committed.")] = False,
    job: Annotated[
        str, typer.Option("--job", metavar="JOB", help="Only those about this job.", callback=bare("jobs/"))
    ] = "",
    node: Annotated[
        str, typer.Option("--node", metavar="NODE", help="Only those about this node.", callback=bare("nodes/"))
    ] = "",
) -> None:
    """Show what happened, oldest first, and why."""
    from virial.cli.words import event_line

    printer = session.printer
    with session.client() as client:
        _must_be_known(client, job, node)
        if follow:
            for event in client.watch_events(job_id=job, node=node):
                if printer.for_people:
                    printer.line(event_line(event, dated=True))
                else:
                    printer.item(event)
            return
        found = client.list_events(job_id=job, node=node)
    if not printer.for_people:
        printer.value(found)
        return
    for event in found:
        printer.line(event_line(event, dated=True))


def _must_be_known(client: SyncClient, job: str, node: str) -> None:
    """A name that is mistyped has no events, and silence would look like an answer. Raises NotFoundError.

    What is gone may have left some: then they are shown.
    """
    from virial.errors import NotFoundError

    for name, get in ((job, client.get_job), (node, client.get_node)):
        if name:
            try:
                get(name)
            except NotFoundError:
                if not client.list_events(job_id=job, node=node):
                    raise
