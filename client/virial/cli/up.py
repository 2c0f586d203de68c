"""`virial up`."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer

from virial.cli.frame import Session, command
from virial.cli.human import plural
from virial.cli.printer import console, terminal

SUPERVISE_S: Final = 0.5


@command("up", "virial up", "virial up --nodes 4", "virial up --nodes 2 --directory ~/my-cluster")
def up(
    session: Session,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=64, help="How many nodes; each gets an equal share.")] = 4,
    directory: Annotated[
        str,
        typer.Option("--directory", metavar="DIR", help="Keep state there. [default: a new one, removed at the end]"),
    ] = "",
) -> None:
    """Run a cluster on this machine until Ctrl-C.

    It is a controller and some node agents, all on loopback. Other commands of the same user find it by themselves.
    """
    from virial.local import LocalCluster, publish_address, withdraw_address

    signal.signal(signal.SIGTERM, _interrupt)
    with ExitStack() as stack:
        place = Path(directory).expanduser() if directory else Path(stack.enter_context(_scratch()))
        cluster = LocalCluster(place, nodes=nodes)
        stack.callback(cluster.stop)
        _start(session, cluster.start, nodes)
        publish_address(cluster.address)
        stack.callback(withdraw_address, cluster.address)
        printer = session.printer
        if printer.for_people:
            printer.line(f"cluster with {plural(nodes, 'node')} at {cluster.address}, state and logs in {place}")
            printer.line("try: virial nodes; virial submit examples/train.yaml --wait    (Ctrl-C ends the cluster)")
        else:
            printer.item({"address": cluster.address, "directory": str(place), "nodes": nodes})
        while True:
            time.sleep(SUPERVISE_S)
            for name in cluster.restart_dead():
                printer.note(f"virial: {name} had ended and was started again; its log is {place / name}.log")


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="virial-", ignore_cleanup_errors=True)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _start(session: Session, start: Callable[[], None], nodes: int) -> None:
    if not (session.printer.for_people and terminal(sys.stderr)):
        start()
        return
    with console(sys.stderr).status(f"starting a controller and {plural(nodes, 'node')}"):
        start()
