"""A rank of the chaos jobs: counts steps, saves each fifth, and writes down what it was and what it was told.

    rank.py DIRECTORY [--escape] [--deaf] [--until FILE] [--steps N]

It appends to DIRECTORY/starts (job, generation, rank, pid) and DIRECTORY/saved (job, generation, rank, step, id) for
each checkpoint that it was told is committed.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

from virial import task

CHECKPOINT_EVERY = 5
STEP_S = 0.04


def append(path: Path, *words: object) -> None:
    """One write of one line: whole, also among several writers."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())
    os.close(descriptor)


def escape() -> None:
    """As a daemon leaves its parent: a session of its own, then a child of nobody, deaf to everything."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            os.execvp("sleep", ["sleep", "612"])
        os._exit(0)
    os.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--escape", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--until", default="")
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    me = task.current()
    if options.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    append(options.directory / "starts", me.job, me.generation, me.rank, os.getpid())
    if options.escape:
        escape()
    restored = me.restore()
    step = restored.step if restored is not None else 0
    while step < options.steps and not (options.until and Path(options.until).exists()):
        step += 1
        me.progress(step)
        if step % CHECKPOINT_EVERY == 0:
            with me.checkpoint(step, wait=True) as shard:
                shard.write(f"{me.job} {step} {me.rank}\n".encode() * 20)
            if shard.state == "COMMITTED":
                append(options.directory / "saved", me.job, me.generation, me.rank, step, shard.checkpoint_id)
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
