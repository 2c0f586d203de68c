"""`virial up`."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from virial.cli.frame import Session, command
from virial.cli.human import plural
from virial.cli.printer import Printer, console, terminal

if TYPE_CHECKING:
    from rich.progress import Progress

    from virial.local import LocalCluster

SUPERVISE_S: Final = 0.5
READY_TIMEOUT_S: Final = 60.0
READY_POLL_S: Final = 0.1


def _controllers(number: int) -> int:
    if number not in (1, 3, 5):
        raise typer.BadParameter(f"{number} is not 1, 3 or 5: an even number survives no more losses")
    return number


@command("up", "virial up", "virial up --controllers 3 --nodes 6", "virial up --nodes 2 --directory ~/my-cluster")
def up(
    session: Session,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, max=64, help="How many nodes; each gets an equal share.")
    ] = 4,
    controllers: Annotated[
        int,
        typer.Option(
            "--controllers",
            metavar="N",
            callback=_controllers,
            help="1, or 3 or 5 that stand in for each other (needs etcd-server).",
        ),
    ] = 1,
    directory: Annotated[
        str,
        typer.Option("--directory", metavar="DIR", help="Keep state there. [default: a new one, removed at the end]"),
    ] = "",
) -> None:
    """Run a cluster on this machine until Ctrl-C.

    It is a controller (or several, each with its etcd member) and some node agents, all on loopback. Other commands of
    the same user find it by themselves.
    """
    from virial.local import LocalCluster, Supervision, scratch_directory

    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # the terminal was closed; under nohup it is ignored
        signal.signal(signal.SIGHUP, _interrupt)
    with ExitStack() as stack:
        place = Path(directory).expanduser() if directory else stack.enter_context(scratch_directory())
        cluster = LocalCluster(place, nodes=nodes, controllers=controllers)
        stack.callback(cluster.stop)
        with _Progress(session, nodes) as progress:
            cluster.start()
            _wait_for_nodes(session, cluster, progress)
        printer = session.printer
        stack.enter_context(_published(cluster.address, printer))
        if printer.for_people:
            what = plural(nodes, "node") + (f", {controllers} controllers" if controllers > 1 else "")
            printer.line(f"cluster with {what} at {cluster.address}, state and logs in {place}")
            printer.line("try: virial nodes; virial submit examples/train.yaml --wait    (Ctrl-C ends the cluster)")
        else:
            found = {"address": cluster.address, "directory": str(place), "nodes": nodes, "controllers": controllers}
            printer.item(found)
        supervision = Supervision(cluster, time.monotonic())
        while True:
            time.sleep(SUPERVISE_S)
            for sentence in supervision.step(time.monotonic()):
                printer.note(f"virial: {sentence}")


@contextmanager
def _published(address: str, printer: Printer) -> Generator[None]:
    """Other commands find the cluster meanwhile."""
    from virial._published import publish_address, withdraw_address

    try:
        other = publish_address(address)
    except OSError as error:
        printer.note(
            f"virial: other commands cannot find this cluster by themselves ({error.filename}: {error.strerror}): "
            f"give them --address {address} or set VIRIAL_ADDRESS"
        )
        yield
        return
    if other is not None:
        printer.note(f"virial: your cluster at {other} runs on; commands find this one until it ends")
    try:
        yield
    finally:
        withdraw_address(address)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _wait_for_nodes(session: Session, cluster: LocalCluster, progress: _Progress) -> None:
    """Until every node takes work: whoever submits a job next should see it start. Raises VirialError."""
    from virial.errors import VirialError

    deadline_s = time.monotonic() + READY_TIMEOUT_S
    with replace(session, address=cluster.address, ca=None, cert=None, key=None).client() as client:
        while True:
            ready = sum(1 for node in client.list_nodes(brief=True) if node.schedulable)
            progress.show(ready)
            if ready >= cluster.nodes:
                return
            if time.monotonic() > deadline_s:
                missing = plural(cluster.nodes - ready, "node")
                raise VirialError(
                    f"{missing} did not join in {READY_TIMEOUT_S:g} s; see the logs in {cluster.directory}"
                )
            time.sleep(READY_POLL_S)


class _Progress:
    """How many nodes are ready: a bar on a terminal, nothing elsewhere."""

    def __init__(self, session: Session, nodes: int) -> None:
        self._progress: Progress | None = None
        if session.printer.for_people and terminal(sys.stderr):
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as NewProgress

            columns = (TextColumn("starting nodes"), BarColumn(bar_width=20), MofNCompleteColumn())
            self._progress = NewProgress(*columns, console=console(sys.stderr), transient=True)
            self._task = self._progress.add_task("", total=nodes)

    def __enter__(self) -> _Progress:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, ready: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=ready)
