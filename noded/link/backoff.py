"""How long to wait before the next dial: doubling, with full jitter, so that a lost leader's agents do not come as one.

`random` is passed in: a seeded one gives the same waits again.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

FIRST_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 2.0
"""An outage of the controllers shorter than fence_after must leave time for a hello: stay far below it."""


@dataclass(slots=True)
class Backoff:
    random: Random
    attempt: int = 0

    def next_seconds(self) -> float:
        """Between a tenth of and the whole of 0.1 s, 0.2 s, ... 2 s."""
        longest = min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** min(self.attempt, 16))
        self.attempt += 1
        return longest * self.random.uniform(0.1, 1.0)

    def reset(self) -> None:
        self.attempt = 0
