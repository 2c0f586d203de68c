"""`virial logs`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from virial.cli.frame import JobArgument, Session, command
from virial.cli.printer import Output


@command(
    "logs",
    "virial logs train-7",
    "virial logs train-7 -f --rank 2",
    "virial logs train-7 --stderr --generation 1 --tail 4096",
)
def logs(
    session: Session,
    job: JobArgument,
    rank: Annotated[int, typer.Option("--rank", metavar="N", min=0, help="Which rank's.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the task ends.")] = False,
    generation: Annotated[
        int, typer.Option("--generation", "-g", metavar="N", min=0, help="Which generation's; 0: the newest that ran.")
    ] = 0,
    stderr: Annotated[
        bool, typer.Option("--stderr", help="Its standard error instead of its standard output.")
    ] = False,
    tail: Annotated[int, typer.Option("--tail", metavar="BYTES", min=0, help="Only the last so many bytes.")] = 0,
) -> None:
    """Print what a rank wrote, byte for byte.

    With -o json, one object a line: data (text), generation, rank, next_offset.
    """
    out = sys.stdout.buffer
    with session.client() as client:
        chunks = client.read_logs(
            job,
            rank,
            generation=generation,
            stream="stderr" if stderr else "stdout",
            follow=follow,
            tail_bytes=tail,
        )
        for chunk in chunks:
            if session.printer.output is Output.TABLE:
                out.write(chunk.data)
                out.flush()
            else:
                text = chunk.data.decode(errors="replace")
                session.printer.item(
                    {"data": text, "generation": chunk.generation, "rank": chunk.rank, "next_offset": chunk.next_offset}
                )
