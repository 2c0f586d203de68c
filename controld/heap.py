"""What the garbage collector walks. The state is large, lives long, and has no cycles: walking it again and again
stalls the loop, 350 ms for 1.35 million objects, which is as long as another controller waits before it takes over.
"""

from __future__ import annotations

import gc
from typing import Any

OLDEST_GENERATION = 2
THRESHOLDS = (20_000, 5, 3)
"""A batch of commands makes some ten thousand objects that end with it: by default each of them is walked once or twice
before that, a fifth of the time a commit takes. A young collection is a few ms so, a full one some 30."""


def keep_survivors() -> None:
    """From now on a full collection walks what was made since the last one, and never again what it left alive.

    Garbage in cycles is found as before, unless it was alive at the very moment of a full collection: then it stays
    until `keep_loaded`. Calls have cycles (gRPC makes some for each), so that is a few of them a collection.
    """
    gc.set_threshold(*THRESHOLDS)
    if _freeze_survivors not in gc.callbacks:
        gc.callbacks.append(_freeze_survivors)


def _freeze_survivors(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == OLDEST_GENERATION:
        gc.freeze()


def keep_loaded() -> None:
    """After a load, when nothing hangs on this loop yet: collect everything there is, and keep what is left."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
