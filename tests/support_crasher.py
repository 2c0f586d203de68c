"""A controller's leader over the real SQLite store, killed at each step of its event loop in turn, and looked at again.

    python -m tests.support_crasher DIRECTORY [--first-step N] [--answer-first]

Each life is a forked child with a directory of its own: at its k-th step it sends itself SIGKILL, so nothing is
flushed, closed or answered, whatever its threads were doing. What a client was told until then went out through a pipe.
A second child opens the directory, checks it and asks everything again. The last line on standard output is JSON:
`kills`, `partly` (some requests were answered and some not), `lost` (what the first failed check said).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import selectors
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from contextvars import Context
from pathlib import Path
from typing import Any

from controld.core.commands import CancelJob, SubmitJob
from controld.core.ids import JobId
from controld.core.invariants import check
from controld.core.model import JobState
from controld.matching.engine import plan
from controld.replica.leader import Leader
from controld.replica.planner import InlinePlanner
from controld.replica.settings import LeaderSettings
from controld.replica.writer import Writer
from controld.store.sqlite import SqliteStore
from tests.support_core import spec
from tests.support_replica import LogBook, LoopClock

JOBS = 6
ANSWERS = JOBS + JOBS // 2


class MortalLoop(asyncio.SelectorEventLoop):
    """Real time, real threads; dies at its `kill_at`th step."""

    def __init__(self, kill_at: int | None) -> None:
        super().__init__(selectors.SelectSelector())
        self._kill_at = kill_at
        self._steps = 0

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        def step(*given: Any) -> None:
            self._steps += 1
            if self._steps == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            callback(*given)

        return super().call_soon(step, *args, context=context)


async def start(directory: Path) -> tuple[SqliteStore, Leader]:
    store = SqliteStore(directory)
    await store.open()
    leader = Leader(
        store=store,
        clock=LoopClock(),
        rng=random.Random(7),
        planner=InlinePlanner(plan),
        settings=LeaderSettings(),
        identity="c0",
        log=LogBook(),
    )
    await leader.start()
    return store, leader


async def work(directory: Path, pipe: int) -> None:
    """Submits jobs and cancels the even ones, several at a time; says what was acknowledged."""
    store, leader = await start(directory)

    async def one(n: int) -> None:
        await asyncio.sleep(0.0007 * n)
        await leader.submit(SubmitJob(f"submit-{n}", spec(), f"job-{n}"))
        os.write(pipe, f"job-{n}\n".encode())
        if n % 2 == 0:
            await leader.submit(CancelJob(f"cancel-{n}", JobId(f"job-{n}")))
            os.write(pipe, f"cancelled job-{n}\n".encode())

    await asyncio.gather(*(one(n) for n in range(JOBS)))
    await leader.stop()
    await store.close()


async def inspect(directory: Path, acknowledged: list[str]) -> None:
    store, leader = await start(directory)
    state = leader.state
    assert check(state) == ()
    for told in acknowledged:
        cancelled, _, job = told.rpartition(" ")
        assert JobId(job) in state.jobs, f"lost: {told}"
        if cancelled:
            assert state.jobs[JobId(job)].state is JobState.CANCELLED, f"lost: {told}"
    # Whatever was under way: asking again with the same request id does it once.
    for n in range(JOBS):
        await leader.submit(SubmitJob(f"submit-{n}", spec(), f"job-{n}"))
        if n % 2 == 0:
            await leader.submit(CancelJob(f"cancel-{n}", JobId(f"job-{n}")))
    assert len(state.jobs) == JOBS
    assert sum(e.kind == "job.submitted" for e in state.events.values()) == JOBS
    assert sorted(state.events) == list(range(1, len(state.events) + 1))
    await leader.stop()
    await store.close()


def in_child(main: Callable[[int], Coroutine[Any, Any, None]], kill_at: int | None = None) -> tuple[int, list[str]]:
    """(wait status, the lines it said)."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reads)
            loop = MortalLoop(kill_at)
            loop.run_until_complete(main(writes))
            loop.close()
            status = 0
        except BaseException:
            os.write(writes, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(writes)
    with open(reads) as pipe:
        said = pipe.read().splitlines()
    return os.waitpid(pid, 0)[1], said


def kill_at_every_step(base: Path, first_step: int, *, defect: bool) -> dict[str, object]:
    kills, partly, kill_at = 0, 0, first_step
    while True:
        directory = base / str(kill_at)

        async def live(pipe: int, where: Path = directory) -> None:
            if defect:
                answer_first()
            await work(where, pipe)

        status, told = in_child(live, kill_at)
        if not os.WIFSIGNALED(status):
            assert status == 0, told
            assert len(told) == ANSWERS, told
            return {"kills": kills, "partly": partly, "lost": ""}
        kills += 1
        partly += 0 < len(told) < ANSWERS
        status, said = in_child(lambda _, where=directory, told=told: inspect(where, told))
        if status != 0:
            return {"kills": kills, "partly": partly, "lost": f"at step {kill_at}: {said[-1]}"}
        shutil.rmtree(directory)
        kill_at += 1


def answer_first() -> None:
    """In this process a batch is answered, and then committed."""
    finish = Writer._finish

    async def hasty(self: Writer, batch: Any) -> None:
        self._answer(batch)
        await finish(self, batch)

    Writer._finish = hasty


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--first-step", type=int, default=1)
    parser.add_argument("--answer-first", action="store_true", help="seed a defect: answers come before commits")
    options = parser.parse_args()
    result = kill_at_every_step(options.directory, options.first_step, defect=options.answer_first)
    print(json.dumps(result))
    return 1 if result["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
