"""`virial top`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from virial.cli.frame import Session, command
from virial.cli.human import UNKNOWN, clean, clock, plural
from virial.cli.jobs import jobs_table
from virial.cli.nodes import nodes_table
from virial.cli.printer import Printer, console, document, rich_table, terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from virial import SyncClient
    from virial.models import Event, Job, Node, Status

EVENTS_SHOWN: Final = 8


@command("top", "virial top", "virial top --interval 5", "virial top --once -o json")
def top(
    session: Session,
    once: Annotated[bool, typer.Option("--once", help="Print one view and end.")] = False,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", min=0.2, help="Between two views.")] = 1.0,
) -> None:
    """Watch nodes, jobs and events. Ends with Ctrl-C."""
    printer = session.printer
    with session.client() as client:
        if not printer.for_people:
            while True:
                view = dict(zip(("status", "nodes", "jobs", "events"), map(document, _look(client)), strict=True))
                if once:
                    printer.value(view)
                    return
                printer.item(view)
                time.sleep(interval)
        if not once and terminal(sys.stdout):
            _live(client, interval)
            return
        while True:
            _print(printer, *_look(client))
            if once:
                return
            time.sleep(interval)


def _print(printer: Printer, status: Status, nodes: list[Node], jobs: list[Job], events: list[Event]) -> None:
    """One view after the other, for a file or a pipe."""
    from virial.cli.words import event_line

    now_unix_ns = time.time_ns()
    printer.line(_head(status, now_unix_ns))
    for problem in status.problems:
        printer.line(clean(problem))
    for table in (nodes_table(nodes), jobs_table(jobs, now_unix_ns)):
        printer.line("")
        printer.table(table)
    printer.line("")
    for event in events:
        printer.line(event_line(event))


def _head(status: Status, now_unix_ns: int) -> str:
    leader = status.leader or UNKNOWN
    return clean(f"{clock(now_unix_ns)}  {plural(status.nodes_live, 'node')} live, leader {leader}")


def _live(client: SyncClient, interval_s: float) -> None:
    from rich.live import Live

    with Live(_view(*_look(client)), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(_view(*_look(client)), refresh=True)


def _look(client: SyncClient) -> tuple[Status, list[Node], list[Job], list[Event]]:
    jobs = client.list_jobs()
    live = [job for job in jobs if not job.state.ended]
    ended = [job for job in jobs if job.state.ended]
    return client.get_status(), client.list_nodes(), live + ended[-5:], client.list_events()[-EVENTS_SHOWN:]


def _view(status: Status, nodes: list[Node], jobs: list[Job], events: list[Event]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from virial.cli.words import event_line

    now_unix_ns = time.time_ns()
    parts: list[RenderableType] = [Text(_head(status, now_unix_ns), style="bold")]
    parts += [Text(clean(problem), style="yellow") for problem in status.problems]
    for table in (nodes_table(nodes), jobs_table(jobs, now_unix_ns)):
        parts += [Text(""), rich_table(table, [[clean(cell) for cell in row] for row in table.rows])]
    parts += [Text(""), *(Text(event_line(event), overflow="ellipsis", no_wrap=True) for event in events)]
    return Group(*parts)
