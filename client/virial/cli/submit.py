"""`virial submit` and `virial cancel`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from virial.cli.exits import CliError, ExitCode
from virial.cli.frame import JobArgument, Session, command

if TYPE_CHECKING:
    from virial.models import Job, JobSpec


@command(
    "submit",
    "virial submit train.yaml",
    "virial submit train.yaml --id train-7 --wait",
    "virial submit train.yaml --set gang.ranks=8 --set resources.memory=2GiB",
    "virial submit train.yaml --dry-run -o yaml",
)
def submit(
    session: Session,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Job specification, YAML or JSON; - reads it from stdin.")
    ],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Replace one field of the file; repeatable."),
    ] = None,
    job_id: Annotated[
        str, typer.Option("--id", metavar="JOB", help="The job's id. [default: made from its name]")
    ] = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay until the job has ended; exit 1 unless it succeeded.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Have everything checked; submit nothing.")] = False,
) -> None:
    """Submit a job.

    Prints the new job's id, so that a script can keep it.
    """
    if wait and dry_run:
        raise CliError("--wait and --dry-run exclude each other: a dry run starts nothing to wait for")
    spec = _spec(file, sets or [])
    with session.client() as client:
        job = client.submit_job(spec, job_id=job_id, validate_only=dry_run)
        if dry_run:
            _show(session, job, f"{'standard input' if file == '-' else file}: valid; nothing was submitted")
            return
        if not wait:
            _show(session, job, job.id)
            return
        _wait(session, job.id, announce=True)


@command("cancel", "virial cancel train-7", "virial cancel train-7 --wait")
def cancel(
    session: Session,
    job: JobArgument,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until every rank is gone.")] = False,
) -> None:
    """Cancel a job.

    It is CANCELLED once every rank is proven gone; what it saved stays.
    """
    with session.client() as client:
        found = client.cancel_job(job)
    if wait and not found.state.ended:
        _wait(session, job, cancelled=True)
        return
    _show(session, found, f"{found.id} {found.state}")


def _show(session: Session, job: Job, text: str) -> None:
    if session.printer.for_people:
        session.printer.line(text)
    else:
        session.printer.value(job)


def _wait(session: Session, job_id: str, *, announce: bool = False, cancelled: bool = False) -> None:
    from virial.cli.waiting import wait_for_end
    from virial.models import JobState

    printer = session.printer
    if announce and printer.for_people:
        printer.line(job_id)
    try:
        job = wait_for_end(session, job_id, since="job.cancelling" if cancelled else "")
    except KeyboardInterrupt:
        printer.note(f"virial: stopped waiting; the job goes on (end it with: virial cancel {job_id})")
        raise
    if printer.for_people:
        printer.line(f"{job.id} {job.state}")
    else:
        printer.value(job)
    if job.state is not (JobState.CANCELLED if cancelled else JobState.SUCCEEDED):
        if job.first_error is not None:
            from virial.cli.words import error_line

            printer.note(f"virial: first error: {error_line(job.first_error)}")
        raise typer.Exit(ExitCode.FAILED)


def _spec(file: str, sets: list[str]) -> JobSpec:
    from virial.spec import SPEC_BYTES_MAX, load_spec, read_spec

    overrides = dict(_override(text) for text in sets)
    if file == "-":
        return read_spec(sys.stdin.buffer.read(SPEC_BYTES_MAX + 1), "standard input", overrides)
    try:
        return load_spec(file, overrides)
    except FileNotFoundError:
        raise CliError(f"{file}: there is no such file; give the path of a job specification") from None
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}") from None


def _override(text: str) -> tuple[str, object]:
    """The field and the value of --set: a value as in the YAML file."""
    from virial.yamlfile import load_yaml

    field, equals, value = text.partition("=")
    if not equals or not field:
        raise CliError(f"--set {text}: expected FIELD=VALUE, such as gang.ranks=4")
    return field.strip(), load_yaml(value, f"--set {field}")
