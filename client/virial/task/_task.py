"""The task: who am I, where do I start, how far am I, save now."""

from __future__ import annotations

import atexit
import math
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import SupportsFloat, SupportsIndex

from virial.task._channel import Channel, Fields
from virial.task._checkpoint import Deadlines, Shard
from virial.task._environment import Environment, parse_environment
from virial.task._registry import GangRegistry, LocalRegistry, Registry
from virial.task._restore import Restored
from virialpb.shardfile import ShardIdentity

METRICS_MAX = 64
METRIC_NAME_CHARACTERS_MAX = 64


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Virial asks for a checkpoint at `step`, or as soon as possible when it is None.

    All ranks must save the same step. Those that exchange data anyway send `due(step)` along and save when any of them
    says so: a request may reach one rank a step earlier than another.
    """

    step: int | None
    reason: str

    def due(self, step: int) -> bool:
        """Whether a rank that has finished `step` should save now."""
        return self.step is None or step >= self.step


class Task:
    """One rank of one generation. Get it with `virial.task.current()`.

    Safe in threads and over fork (a forked child has a connection of its own). Not for signal handlers: set a flag
    there and look at it between steps, or let `save_requested` tell.
    """

    def __init__(self, environment: Environment, directory: str | os.PathLike[str] = "") -> None:
        self._environment = environment
        self._save_request: SaveRequest | None = None
        self._channel: Channel | None = None
        self._registry: Registry
        if environment.socket:
            self._channel = Channel(environment.socket, self._handle_push)
            self._registry = self._gang = GangRegistry(self._channel)
            self._restore = environment.restore
            self._channel.connect()
        else:
            local = LocalRegistry(os.fspath(directory), environment.world_size)
            self._registry = local
            self._restore = local.newest()

    @property
    def managed(self) -> bool:
        """Whether this process runs under Virial; False when the script was started by hand."""
        return self._channel is not None

    @property
    def job(self) -> str:
        """The job's id; empty stand-alone."""
        return self._environment.job

    @property
    def generation(self) -> int:
        """This incarnation of the gang; only grows. 0 stand-alone."""
        return self._environment.generation

    @property
    def epoch(self) -> str:
        """The fencing token of this generation's leases, as text; empty stand-alone."""
        return self._environment.epoch

    @property
    def rank(self) -> int:
        """This process's index in the gang."""
        return self._environment.rank

    @property
    def world_size(self) -> int:
        """How many ranks the gang has."""
        return self._environment.world_size

    @property
    def master_addr(self) -> str:
        """Address where rank 0 listens for the others."""
        return self._environment.master_addr

    @property
    def master_port(self) -> int:
        """Port where rank 0 listens; new in every generation, held for this gang. 0 when none was given."""
        return self._environment.master_port

    def progress(self, step: int | SupportsIndex, **metrics: SupportsFloat) -> None:
        """Report a finished step, with at most 64 metrics. Cheap (microseconds) and never waits.

        Never raises because Virial is away. Values that float() refuses or that are not finite are left out. Under
        load the newest report replaces those not yet sent. Raises TypeError for a step that is no whole number.
        """
        step = operator.index(step)
        if self._channel is not None:
            self._channel.progress({"step": step, "metrics": _clean(metrics)})

    def checkpoint(
        self,
        step: int | SupportsIndex,
        *,
        wait: bool = False,
        strict: bool = False,
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
    ) -> Shard:
        """Save this rank's part of the checkpoint of `step`: `with task.checkpoint(step) as shard: shard.write(...)`.

        Every rank calls it for the same step. Leaving the block makes the shard durable and reports it; with `wait` it
        then waits until all ranks' are (COMMITTED) or the checkpoint is given up. A failed save (full disk, given up,
        deadline passed) raises nothing: `shard.state` and `shard.error` tell, older checkpoints are untouched and
        training goes on. With `strict` it raises CheckpointError. What the block itself raises is always passed on.
        """
        identity = ShardIdentity(
            checkpoint_id="",  # named by the registry when the block is entered
            step=operator.index(step),
            rank=self.rank,
            world_size=self.world_size,
            job=self.job,
            generation=self.generation,
        )
        return Shard(self._registry, identity, wait=wait, strict=strict, deadlines=deadlines)

    def restore(self) -> Restored | None:
        """The checkpoint to start from, or None to start from zero.

        Under Virial all ranks get the same one, which was committed; stand-alone the newest complete one in the
        directory. Raises ShardCorrupt when this rank's manifest is missing, damaged or another checkpoint's: a restore
        never turns silently into a start from zero. Raises OSError for a failing disk.
        """
        return Restored(self._restore, self.rank) if self._restore is not None else None

    def save_requested(self) -> SaveRequest | None:
        """The newest request to save that was not cleared. Cheap: look after every step."""
        if self._channel is not None:
            self._channel.connect()
        return self._save_request

    def clear_save_request(self, request: SaveRequest | None = None) -> None:
        """Forget the request after saving. Given the one that was acted on, a newer one stays."""
        if request is None or request is self._save_request:
            self._save_request = None

    def close(self) -> None:
        """Hand over the last progress report and close the connection. Done at exit, too."""
        if self._channel is not None:
            self._channel.close()

    def _handle_push(self, push: Fields) -> None:
        kind, step, reason = push.get("push"), push.get("step"), push.get("reason")
        if kind == "save_now":
            self._save_request = SaveRequest(step if isinstance(step, int) else None, str(reason or ""))
        elif kind == "checkpoint":
            self._gang.handle_push(push)


_current: dict[str, Task] = {}


def current(directory: str | os.PathLike[str] = "") -> Task:
    """The task that this process is; the same object each time.

    Outside Virial (VIRIAL_SOCK not set) it is a stand-alone task, so that the same script runs by hand: progress goes
    nowhere and checkpoints go to `directory`. Under Virial `directory` is not used: the controller names it.
    Raises TaskEnvironmentError naming a malformed variable.
    """
    key = "" if os.environ.get("VIRIAL_SOCK") or not directory else os.path.abspath(directory)
    if not directory and _current:
        return next(iter(_current.values()))  # a library asks without knowing what its script said
    if key not in _current:
        task = Task(parse_environment(os.environ), directory)
        atexit.register(task.close)
        _current[key] = task
    return _current[key]


def _clean(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    clean: dict[str, float] = {}
    for name, value in list(metrics.items())[:METRICS_MAX]:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(number):
            clean[name[:METRIC_NAME_CHARACTERS_MAX].encode("utf-8", "replace").decode()] = number
    return clean
