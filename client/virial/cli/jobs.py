"""`virial jobs`, `virial job` and `virial explain`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from virial.cli.frame import JobArgument, Session, command
from virial.cli.human import UNKNOWN, age, clean, cpu, duration, moment, plural, size
from virial.cli.printer import Printer, Table

if TYPE_CHECKING:
    from virial.models import Explanation, Job, Member

# While a lease holds, its task is somewhere; before and after it there is none.
_HOLDS = frozenset({"GRANTED", "ACTIVE", "REVOKING"})


@command("jobs", "virial jobs", "virial jobs --state RUNNING --state PENDING", "virial jobs -o json")
def jobs(
    session: Session,
    state: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="Only jobs in this state; repeatable.")
    ] = None,
) -> None:
    """List jobs."""
    from virial.models import JobState
    from virialpb.strict import one_of

    known = one_of([s.value for s in JobState])
    states = [JobState(_state(known, text)) for text in state or []]
    with session.client() as client:
        found = client.list_jobs(states)
    if session.printer.for_people:
        session.printer.table(jobs_table(found, time.time_ns()))
    else:
        session.printer.value(found)


def _state(known: Callable[[object], str], text: str) -> str:
    from virial.cli.exits import CliError
    from virialpb.strict import FieldProblem

    try:
        return known(text.upper())
    except FieldProblem as problem:
        raise CliError(f"--state: {problem}") from None


def jobs_table(found: list[Job], now_unix_ns: int) -> Table:
    rows = [
        (
            job.id,
            str(job.state),
            str(job.spec.gang.ranks),
            str(job.generation),
            str(job.restarts),
            "-" if job.progress_step is None else str(job.progress_step),
            age(job.create_time_unix_ns, now_unix_ns),
        )
        for job in found
    ]
    right = frozenset({"RANKS", "GENERATION", "RESTARTS", "STEP", "AGE"})
    return Table(("JOB", "STATE", "RANKS", "GENERATION", "RESTARTS", "STEP", "AGE"), rows, right)


@command("job", "virial job train-7", "virial job train-7 -o json")
def job(session: Session, job: JobArgument) -> None:
    """Show one job: its ranks, checkpoints and first error."""
    with session.client() as client:
        found = client.get_job(job)
    if session.printer.for_people:
        show(session.printer, found)
    else:
        session.printer.value(found)


def _restarts(job: Job) -> str:
    """Not "5 of 3": not every restart counts towards the limit (a drain does not), and those of long ago do not."""
    limit = job.spec.restart
    return f"{job.restarts} (limit: {limit.max} in {duration(limit.window_ns)})"


def show(printer: Printer, job: Job) -> None:
    """One job for people."""
    from virial.cli.words import error_line, stop_words

    spec = job.spec
    spares = f" and {plural(spec.gang.spares, 'spare')}" if spec.gang.spares else ""
    devices = "".join(f", {d.count} {d.kind}" for d in spec.resources.devices)
    current = job.current
    restored = ""
    if current is not None and current.restored_checkpoint:
        restored = f"{current.restored_checkpoint} (step {current.restored_step})"
    printer.pairs(
        [
            ("job", job.id),
            ("state", str(job.state)),
            ("gang", f"{plural(spec.gang.ranks, 'rank')}{spares}"),
            ("each rank", f"{cpu(spec.resources.cpu_millis)} CPU, {size(spec.resources.memory_bytes)}{devices}"),
            ("generation", f"{job.generation} {current.phase}" if current is not None else "none yet"),
            ("restarts", _restarts(job)),
            ("restored from", restored),
            ("stopped because", stop_words(current.stop_reason) if current is not None and current.stop_reason else ""),
            ("spares", _spares(job)),
            ("saves", _saves(job)),
            ("step", UNKNOWN if job.progress_step is None else str(job.progress_step)),
            ("submitted", moment(job.create_time_unix_ns)),
            ("ended", moment(job.end_time_unix_ns) if job.end_time_unix_ns else ""),
            ("first error", error_line(job.first_error) if job.first_error is not None else ""),
        ]
    )
    if job.first_error is not None and job.first_error.exit is not None and job.first_error.exit.stderr_tail:
        printer.line("\nlast words of the rank that failed first:")
        for line in job.first_error.exit.stderr_tail.splitlines()[-20:]:
            printer.line(f"  | {clean(line)}")
    if current is not None:
        printer.line("")
        printer.table(_members(current.members))
    if job.checkpoints:
        printer.line("")
        printer.table(
            Table(
                ("CHECKPOINT", "STATE", "STEP", "PARTS", "SIZE", "TIER"),
                [
                    (c.id, c.state, str(c.step), f"{c.parts}/{c.world_size}", size(c.size_bytes), c.tier)
                    for c in job.checkpoints
                ],
                frozenset({"STEP", "PARTS", "SIZE"}),
            )
        )


def _spares(job: Job) -> str:
    """Empty unless the running generation lacks some."""
    current = job.current
    if current is None or current.phase not in ("PREPARING", "GO", "ACTIVE"):
        return ""
    held = sum(m.rank is None and m.lease in _HOLDS for m in current.members)
    wanted = job.spec.gang.spares
    return f"{held} of {wanted} held: no node had room for the others" if held < wanted else ""


def _saves(job: Job) -> str:
    """Empty unless checkpoints fail: a job that saves nothing loses all its work with its next fault."""
    from virial.cli.words import abort_words

    if not job.aborted_saves:
        return ""
    why = f": {abort_words(job.last_abort_reason)}" if job.last_abort_reason else ""
    return f"{plural(job.aborted_saves, 'checkpoint')} failed since one was last complete{why}"


def _members(members: tuple[Member, ...]) -> Table:
    from virial.cli.words import exit_words

    rows = [
        (
            "spare" if m.rank is None else str(m.rank),
            m.node or m.node_uid,
            m.lease,
            m.task_state or (UNKNOWN if m.rank is not None and m.lease in _HOLDS else "-"),
            "-" if m.progress_step is None else str(m.progress_step),
            exit_words(m.exit) if m.exit is not None else "-",
        )
        for m in members
    ]
    return Table(("RANK", "NODE", "LEASE", "TASK", "STEP", "EXIT"), rows, frozenset({"RANK", "STEP"}))


@command("explain", "virial explain train-7", "virial explain train-7 -o json")
def explain(session: Session, job: JobArgument) -> None:
    """Say why a job is not running.

    Every reason is given, with the number of nodes it holds for.
    """
    with session.client() as client:
        found = client.explain_job(job)
    if session.printer.for_people:
        _explain(session.printer, found)
    else:
        session.printer.value(found)


def _explain(printer: Printer, found: Explanation) -> None:
    from virial.cli.words import relaxation_line, unfit_line

    if not found.reasons:
        ended = {"SUCCEEDED": "it is done", "FAILED": f"`virial job {found.job}` shows its first error"}
        printer.line(f"{found.job} is {found.state}; {ended.get(found.state, 'nothing holds it back')}")
        return
    looked = f"; {plural(found.nodes_considered, 'node')} considered" if found.nodes_considered else ""
    printer.line(f"{found.job} is {found.state}{looked}:")
    for count in found.reasons:
        printer.line(f"  - {unfit_line(count)}")
    relaxed = relaxation_line(found)
    if relaxed:
        printer.line(relaxed)
