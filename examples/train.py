"""Data-parallel training of a small character model, as a task of Virial or by hand.

By hand, three ranks on one machine, each in its own terminal (or with &):

    RANK=0 WORLD_SIZE=3 MASTER_PORT=29400 python examples/train.py --directory /tmp/train
    RANK=1 WORLD_SIZE=3 MASTER_PORT=29400 python examples/train.py --directory /tmp/train
    RANK=2 WORLD_SIZE=3 MASTER_PORT=29400 python examples/train.py --directory /tmp/train

Stopped at any moment and started again, it goes on from the newest complete checkpoint and ends with the same bits.
Exit status: 0 done, 2 wrong use or no access to a file, 3 another rank is lost, 4 no start from the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Threads inside BLAS would split sums differently from run to run; it reads these when numpy is imported.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

try:
    import numpy as np
    from exchange import Exchange, Floats, Hello, PeerLost, join
    from model import SIZE, Corpus, State, loss_and_gradient

    from virial import task
except ImportError as error:
    sys.exit(f"train: {error}; run it with the Python of Virial's environment (.venv/bin/python)")

EXIT_USAGE = 2
EXIT_PEER_LOST = 3
EXIT_RESTORE = 4


class RestoreFailed(Exception):
    """The checkpoint is not of this run, or damaged."""


def main() -> int:
    """Parse, train, report."""
    options = parse_options()
    try:
        me = task.current(options.directory)
    except (task.TaskEnvironmentError, OSError) as error:
        return fail("?", str(error), EXIT_USAGE)
    try:
        corpus = Corpus.load()
        state = restore(me, options.seed, corpus)
        print(f"rank {me.rank}: {len(corpus.symbols)} characters of {', '.join(corpus.names)}; {SIZE} parameters")
        print(
            f"rank {me.rank} of {me.world_size}, generation {me.generation}: starts after step {state.step}", flush=True
        )
        hello = Hello(me.job, me.generation, me.world_size, state.step, state.digest(), me.rank)
        exchange = join(hello, me.master_addr, me.master_port, options.peer_timeout_s)
        try:
            train(me, options, corpus, state, exchange)
        finally:
            exchange.close()
        print(f"rank {me.rank}: parameters after step {state.step} have sha256 {state.digest()}", flush=True)
        if me.rank == 0 and options.result:
            write_result(options.result, state.digest())
    except PeerLost as error:
        return fail(me.rank, str(error), EXIT_PEER_LOST)
    except (task.ShardCorrupt, RestoreFailed) as error:
        return fail(me.rank, f"cannot start from the checkpoint: {error}", EXIT_RESTORE)
    except OSError as error:
        return fail(me.rank, str(error), EXIT_USAGE)
    return 0


def train(me: task.Task, options: argparse.Namespace, corpus: Corpus, state: State, exchange: Exchange) -> None:
    """Run the steps that are left. Raises PeerLost."""
    while state.step < options.steps:
        started = time.monotonic()
        step = state.step + 1
        contexts, targets = corpus.batch(options.seed, step, me.rank)
        loss, gradient = loss_and_gradient(state.params, contexts, targets)
        if options.corrupt_gradient == (me.rank, step):
            corrupt(gradient)
        request = me.save_requested()
        wanted = request is not None and request.due(step)
        reduced = exchange.reduce(step, gradient, loss, save_wanted=wanted)
        state.update(reduced.gradient)
        me.progress(step, loss=reduced.loss)
        if me.rank == 0 and (step % options.log_every == 0 or step == options.steps):
            print(f"step {step}: loss {reduced.loss:.4f}", flush=True)
        # Every rank takes the same decision: it depends on the step and on what all of them exchanged.
        if reduced.save_wanted or (options.checkpoint_every and step % options.checkpoint_every == 0):
            save(me, options.seed, corpus, state)
            if wanted:
                me.clear_save_request(request)
        rest_s = options.step_ms_min / 1000 - (time.monotonic() - started)
        if rest_s > 0:
            time.sleep(rest_s)


def save(me: task.Task, seed: int, corpus: Corpus, state: State) -> None:
    """Save this rank's shard; a failed save is told, and training goes on."""
    about = json.dumps({"step": state.step, "seed": seed, "corpus": corpus.digest}).encode()
    with me.checkpoint(state.step) as shard:
        np.savez(
            shard,
            about=np.frombuffer(about, dtype=np.uint8),
            params=state.params,
            first_moment=state.first_moment,
            second_moment=state.second_moment,
        )
    outcome = shard.state if shard.error is None else f"{shard.state}: {shard.error}"
    print(f"rank {me.rank}: checkpoint of step {state.step}: {outcome}", flush=True)


def restore(me: task.Task, seed: int, corpus: Corpus) -> State:
    """The state to start from. Raises ShardCorrupt, RestoreFailed."""
    restored = me.restore()
    if restored is None:
        return State.initial(seed)
    try:
        with restored.open() as file, np.load(file, allow_pickle=False) as saved:
            about = json.loads(saved["about"].tobytes())
            arrays: list[Floats] = [saved[name] for name in ("params", "first_moment", "second_moment")]
    except (OSError, ValueError, KeyError) as error:
        raise RestoreFailed(f"{restored.directory}: {error}") from None
    expected = {"step": restored.step, "seed": seed, "corpus": corpus.digest}
    if about != expected:
        raise RestoreFailed(f"{restored.directory} is of {about}, this run needs {expected}")
    if any(array.shape != (SIZE,) or array.dtype != np.float32 for array in arrays):
        raise RestoreFailed(f"{restored.directory} is of another model")
    return State(restored.step, *arrays)


def corrupt(gradient: Floats) -> None:
    """Flip the highest bit of the mantissa of the largest element: what a bad memory cell or link could do."""
    bits = gradient.view(np.uint32)
    bits[np.argmax(np.abs(gradient))] ^= np.uint32(1 << 22)


def write_result(path: Path, digest: str) -> None:
    """Write the digest and a line end, so that a reader sees all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="ascii") as file:
        file.write(f"{digest}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def fail(rank: int | str, message: str, status: int) -> int:
    """Say one clear line and give the exit status."""
    print(f"train: rank {rank}: {message}", file=sys.stderr, flush=True)
    return status


def parse_options() -> argparse.Namespace:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    whole = at_least(0)
    parser.add_argument("--steps", type=at_least(1), default=200, help="steps in total, restored ones included")
    parser.add_argument("--checkpoint-every", type=whole, default=20, metavar="STEPS", help="0: only when asked")
    parser.add_argument("--step-ms-min", type=whole, default=0, metavar="MS", help="a step takes at least this long")
    parser.add_argument("--seed", type=whole, default=1)
    parser.add_argument("--log-every", type=at_least(1), default=10, metavar="STEPS")
    parser.add_argument("--peer-timeout-s", type=at_least(1), default=60, metavar="S", help="a silent rank is lost")
    parser.add_argument("--corrupt-gradient", type=rank_and_step, metavar="RANK:STEP", help="flip one bit (for tests)")
    parser.add_argument("--directory", default="", help="checkpoints of a run by hand; Virial names its own")
    parser.add_argument("--result", type=Path, metavar="FILE", help="rank 0 writes the final digest here")
    return parser.parse_args()


def at_least(least: int) -> Callable[[str], int]:
    """A parser of whole numbers not below `least`."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {least}")
        return int(text)

    return parse


def rank_and_step(text: str) -> tuple[int, int]:
    """Parse RANK:STEP."""
    rank, _, step = text.partition(":")
    if not (rank.isdigit() and step.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not RANK:STEP, two whole numbers")
    return int(rank), int(step)


if __name__ == "__main__":
    sys.exit(main())
