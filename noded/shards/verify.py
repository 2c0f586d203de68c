"""Whether the shard that a rank is to start from is there and is what was saved. Blocking: runs in a worker thread."""

from __future__ import annotations

from typing import Final

from noded.core.messages import Restore
from virialpb.reasons import PrepareFailure
from virialpb.shardfile import Problem, ShardCorrupt, verify_shard

READ_BYTES_PER_SECOND_MIN: Final = 20_000_000
"""A shared file system under the load of a whole gang's restore; slower than this counts as not there."""
BASE_SECONDS: Final = 10.0


def deadline_seconds(size_bytes: int) -> float:
    """How long reading a shard may take before the rank is reported as not able to start from it."""
    return BASE_SECONDS + size_bytes / READ_BYTES_PER_SECOND_MIN


def check_shard(directory: str, restore: Restore) -> tuple[PrepareFailure, str] | None:
    """None when every stripe is right and the whole is what the registry recorded; else why not."""
    rank = int(restore.file[len("rank-") : -len(".shard")])
    try:
        manifest = verify_shard(directory, rank, digest=restore.digest or None)
    except ShardCorrupt as problem:
        missing = problem.problem is Problem.MISSING
        return PrepareFailure.SHARD_MISSING if missing else PrepareFailure.SHARD_CORRUPT, str(problem)
    except OSError as error:
        return PrepareFailure.SHARD_MISSING, f"{error.filename or directory}: {error.strerror}"
    identity = manifest.identity
    if identity.checkpoint_id != restore.checkpoint or identity.step != restore.step:
        found = f"checkpoint {identity.checkpoint_id[:80]!r}, step {identity.step}"
        wanted = f"checkpoint {restore.checkpoint!r}, step {restore.step}"
        return PrepareFailure.SHARD_CORRUPT, f"{directory}/{restore.file}: {found}, not {wanted}"
    return None
