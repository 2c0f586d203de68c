"""Many seeds over a few worker processes: each takes one at a time and answers with one line of JSON."""

from __future__ import annotations

import gc
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, cast

from tests.sim.mutations import BY_NAME
from tests.sim.patches import simulated_machine
from tests.sim.several import SEVERAL, SeveralWorld
from tests.sim.world import Result, Shape, World

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Errand:
    """`several`: in the world of three controllers; a mutation has its own."""

    seed: int
    mutation: str = ""
    several: bool = False


def run(errand: Errand, *, shape: Shape | None = None, keep_log: bool = False) -> Result:
    """In this process. `shape`: the mutation's own where there is one, else the usual.

    Garbage collection is put off: it would end forgotten coroutines at moments that no seed decides.
    """
    mutation = BY_NAME[errand.mutation] if errand.mutation else None
    if shape is None:
        shape = _usual(errand.several) if mutation is None else mutation.shape
    world = SeveralWorld if shape.several else World
    gc.collect()
    gc.disable()
    try:
        with simulated_machine(), mutation.applied() if mutation is not None else nullcontext():
            return world(errand.seed, shape, keep_log=keep_log).run()
    finally:
        gc.enable()


def _usual(several: bool) -> Shape:
    return SEVERAL if several else Shape()


def serve(given: IO[str], answers: IO[str]) -> None:
    """A worker's life: an errand a line in, a result a line out."""
    for line in given:
        errand = Errand(**json.loads(line))
        result = run(errand)
        print(json.dumps({"mutation": errand.mutation, **asdict(result), "lines": []}), file=answers, flush=True)


def results(errands: Iterable[Errand], jobs: int) -> Iterator[tuple[Errand, Result]]:
    """Results as they come; their order is not that of the errands."""
    waiting: queue.Queue[Errand] = queue.Queue()
    count = 0
    for errand in errands:
        waiting.put(errand)
        count += 1
    done: queue.Queue[tuple[Errand, Result]] = queue.Queue()
    threads = [threading.Thread(target=_employ, args=(waiting, done.put), daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for _ in range(count):
        yield done.get()


def _employ(waiting: queue.Queue[Errand], answer: Callable[[tuple[Errand, Result]], None]) -> None:
    command = [sys.executable, "-m", "tests.sim", "--worker"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        while True:
            try:
                errand = waiting.get_nowait()
            except queue.Empty:
                worker.stdin.close()
                return
            line = ""
            try:
                worker.stdin.write(json.dumps(asdict(errand)) + "\n")
                worker.stdin.flush()
                line = worker.stdout.readline()
            except BrokenPipeError:
                pass
            answer((errand, _parse(errand, line)))


def _parse(errand: Errand, line: str) -> Result:
    if not line:
        return Result(errand.seed, (("unexpected", "the worker process died"),), "", 0, 0, 0.0)
    fields = cast("dict[str, object]", json.loads(line))
    del fields["mutation"]
    violations = cast("list[tuple[str, str]]", fields.pop("violations"))
    return Result(violations=tuple((checker, text) for checker, text in violations), **fields)  # type: ignore[arg-type]
