"""Code inside a task: rank, progress, checkpoint, restore, "save now".

    from virial import task

    t = task.current()
    restored = t.restore()
    for step in range(restored.step + 1 if restored else 1, steps + 1):
        ...
        t.progress(step, loss=loss)
        if step % 100 == 0:
            with t.checkpoint(step) as shard:
                np.savez(shard, **state)

Standard library only, and no gRPC: data loaders fork, and a gRPC client in a forked child hangs or crashes.
"""

from __future__ import annotations

from virial.task._checkpoint import Deadlines, Shard
from virial.task._errors import CheckpointError, SaveError, TaskEnvironmentError
from virial.task._restore import Restored
from virial.task._task import SaveRequest, Task, current
from virialpb.shardfile import ShardCorrupt

__all__ = [
    "CheckpointError",
    "Deadlines",
    "Restored",
    "SaveError",
    "SaveRequest",
    "Shard",
    "ShardCorrupt",
    "Task",
    "TaskEnvironmentError",
    "current",
]
