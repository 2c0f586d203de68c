"""The environment of a task, parsed once. Pure: takes the mapping, reads nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from virial.task._errors import TaskEnvironmentError


@dataclass(frozen=True, slots=True)
class CheckpointToRestore:
    """The committed checkpoint that every rank of this generation starts from."""

    checkpoint_id: str
    directory: str
    step: int


@dataclass(frozen=True, slots=True)
class Environment:
    """What a task was started with. `socket` is empty outside Virial."""

    socket: str
    job: str
    generation: int
    epoch: str
    rank: int
    world_size: int
    master_addr: str
    master_port: int
    restore: CheckpointToRestore | None


def parse_environment(environ: Mapping[str, str]) -> Environment:
    """Parse the VIRIAL_* variables and torchrun's. Raises TaskEnvironmentError naming the variable.

    VIRIAL_RANK wins over RANK: a value the user set is never overwritten by Virial, so RANK may be the user's own
    idea, while shards are named by the rank that the registry waits for.
    """

    def whole(name: str, default: int | None) -> int:
        text = environ.get(name, "")
        if not text:
            if default is None:
                raise TaskEnvironmentError(f"{name} is not set, but VIRIAL_SOCK is; start the task through Virial")
            return default
        if not (text.isascii() and text.isdigit()):
            raise TaskEnvironmentError(f"{name} is {text!r:.60}, not a whole number >= 0")
        return int(text)

    socket = environ.get("VIRIAL_SOCK", "")
    rank = whole("VIRIAL_RANK" if socket and environ.get("VIRIAL_RANK") else "RANK", None if socket else 0)
    world_size = whole("WORLD_SIZE", None if socket else 1)
    if rank >= world_size:
        raise TaskEnvironmentError(f"rank {rank} does not fit WORLD_SIZE {world_size}")
    restore = None
    directory = environ.get("VIRIAL_CHECKPOINT_DIR", "")
    if socket and directory:
        restore = CheckpointToRestore(
            checkpoint_id=environ.get("VIRIAL_CHECKPOINT_ID", ""),
            directory=directory,
            step=whole("VIRIAL_CHECKPOINT_STEP", None),
        )
    return Environment(
        socket=socket,
        job=environ.get("VIRIAL_JOB", ""),
        generation=whole("VIRIAL_GENERATION", 0),
        epoch=environ.get("VIRIAL_EPOCH", ""),
        rank=rank,
        world_size=world_size,
        master_addr=environ.get("MASTER_ADDR", "") or "127.0.0.1",
        master_port=whole("MASTER_PORT", 0),
        restore=restore,
    )
