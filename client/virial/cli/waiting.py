"""Waiting for the end of a job: on a terminal a bar with the latest step, elsewhere one plain line an event."""

from __future__ import annotations

import queue
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from virial.cli.printer import console, terminal
from virial.cli.words import event_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from virial.cli.frame import Session
    from virial.models import Event, Job

# The step is not part of the event log (it lives in heartbeats), so it is asked for at this pace.
POLL_S: Final = 0.5
# Events that arrive faster than they are printed wait here; the reader of the stream then waits too.
_BACKLOG: Final = 1000
_END_KINDS: Final = frozenset({"job.succeeded", "job.failed", "job.cancelled"})
# Noise to somebody who waits.
_QUIET_KINDS: Final = frozenset({"checkpoint.begun", "checkpoint.dropped", "lease.released"})


def wait_for_end(session: Session, job_id: str, *, since: str = "") -> Job:
    """The job once it has ended. Prints on standard error what happens meanwhile, unless the output is for a program.

    What lies before the first event of kind `since` is left out: a job that is cancelled may have run for weeks.
    Raises VirialError when the cluster is away longer than every retry.
    """
    events: queue.Queue[Event] = queue.Queue(_BACKLOG)
    follower = threading.Thread(target=_follow, args=(session, job_id, events, since), daemon=True)
    if session.printer.for_people:
        follower.start()
    with session.client() as client, ExitStack() as stack:
        bar = stack.enter_context(_Bar()) if session.printer.for_people and terminal(sys.stderr) else None
        while True:
            job = client.get_job(job_id)
            _tell(events, session, bar)
            if bar is not None:
                bar.show(job)
            if not job.state.ended:
                _pause(events, session, bar)
                continue
            # The last events may be on their way still.
            if session.printer.for_people:
                follower.join(POLL_S)
            _tell(events, session, bar)
            return job


def _follow(session: Session, job_id: str, events: queue.Queue[Event], since: str) -> None:
    """Runs in a thread with its own client. What goes wrong here is met by the main thread's own calls as well."""
    from virial.errors import VirialError

    try:
        with session.client() as client:
            begun = not since
            for event in client.watch_events(job_id=job_id):
                begun = begun or event.kind == since or event.kind in _END_KINDS
                if begun:
                    events.put(event)
                if event.kind in _END_KINDS:
                    return
    except VirialError:
        return


def _pause(events: queue.Queue[Event], session: Session, bar: _Bar | None) -> None:
    """Wait for the next event, at most POLL_S."""
    try:
        event = events.get(timeout=POLL_S)
    except queue.Empty:
        return
    _print(event, session, bar)


def _tell(events: queue.Queue[Event], session: Session, bar: _Bar | None) -> None:
    while True:
        try:
            _print(events.get_nowait(), session, bar)
        except queue.Empty:
            return


def _print(event: Event, session: Session, bar: _Bar | None) -> None:
    if event.kind in _QUIET_KINDS:
        return
    if bar is not None:
        bar.line(event_line(event))
    else:
        session.printer.note(event_line(event))


class _Bar:
    """A moving bar: how far a job has to go is known to nobody but the job."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[where]}"),
            TimeElapsedColumn(),
            console=console(sys.stderr),
            transient=True,
        )
        self._task: TaskID = self._progress.add_task("waiting", total=None, where="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, job: Job) -> None:
        where = f"generation {job.generation}" if job.generation else ""
        if job.progress_step is not None:
            where += f", step {job.progress_step}"
        self._progress.update(self._task, description=f"{job.id} {job.state}", where=where)

    def line(self, text: str) -> None:
        self._progress.console.print(text, soft_wrap=True)
