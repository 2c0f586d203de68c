"""Whether the shard that a rank is to start from is there and is what was saved. Blocking: runs in a worker thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from noded.core.messages import Restore, Tier
from virialpb.reasons import PrepareFailure
from virialpb.shardfile import Problem, ShardCorrupt, verify_shard

READ_BYTES_PER_SECOND_MIN: Final = 20_000_000
"""A shared file system under the load of a whole gang's restore; a slower one counts as out of reach from here."""
BASE_SECONDS: Final = 10.0


def deadline_seconds(size_bytes: int) -> float:
    """How long reading a shard may take before the rank is reported as not able to start from it."""
    return BASE_SECONDS + size_bytes / READ_BYTES_PER_SECOND_MIN


def check_shard(
    directory: str, restore: Restore, told: Callable[[int], None] | None = None
) -> tuple[PrepareFailure, str] | None:
    """None when every stripe is right and the whole is what the registry recorded; else why not.

    `told` is `verify_shard`'s.

    SHARD_MISSING and SHARD_CORRUPT condemn the checkpoint, for every node and for good. So they are said only of a
    directory that could be looked into: a shared file system that is not mounted here, or does not answer, says
    nothing of what was saved (else one bad mount would cost a job all its checkpoints, one after the other).
    """
    rank = int(restore.file[len("rank-") : -len(".shard")])
    try:
        manifest = verify_shard(directory, rank, digest=restore.digest or None, told=told)
    except ShardCorrupt as problem:
        if problem.problem is not Problem.MISSING:
            return PrepareFailure.SHARD_CORRUPT, str(problem)
        if restore.tier is Tier.SHARED and not os.path.isdir(directory):
            return PrepareFailure.CHECKPOINT_DIRECTORY, f"{directory}: no such directory on this node"
        return PrepareFailure.SHARD_MISSING, str(problem)
    except OSError as error:
        # Of the local tier this disk has the only copy: what cannot be read here is lost.
        shared = restore.tier is Tier.SHARED
        failure = PrepareFailure.CHECKPOINT_DIRECTORY if shared else PrepareFailure.SHARD_MISSING
        return failure, f"{error.filename or directory}: {error.strerror}"
    identity = manifest.identity
    if identity.checkpoint_id != restore.checkpoint or identity.step != restore.step:
        found = f"checkpoint {identity.checkpoint_id[:80]!r}, step {identity.step}"
        wanted = f"checkpoint {restore.checkpoint!r}, step {restore.step}"
        return PrepareFailure.SHARD_CORRUPT, f"{directory}/{restore.file}: {found}, not {wanted}"
    return None
