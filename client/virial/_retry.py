"""When a failed call is sent again, and after how long. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from virialpb.errors import TABLE, ErrorDetails

# A controller that restarts, or an election, takes seconds: the cap keeps a client near the moment it is back.
DELAY_FIRST_MS = 50
DELAY_MAX_MS = 2_000
# From the transport itself: the connection broke, so it is not known whether the call arrived. Mutations carry a
# request_id and reads change nothing, so both may be sent again.
TRANSPORT_CODES = frozenset({"UNAVAILABLE"})


@dataclass(slots=True)
class Attempts:
    """One call and its repetitions, until `deadline_s` on the caller's clock."""

    deadline_s: float
    rng: random.Random
    count: int = 0

    def delay_s(self, details: ErrorDetails, now_s: float) -> float | None:
        """How long to wait before the call is sent again; None when it is not."""
        retryable = (
            TABLE[details.reason].retryable if details.reason is not None else details.code.name in TRANSPORT_CODES
        )
        if not retryable:
            return None
        self.count += 1
        grown_ms = min(DELAY_FIRST_MS << min(self.count - 1, 10), DELAY_MAX_MS)
        delay_s = max(grown_ms, min(details.retry_after_ms or 0, DELAY_MAX_MS)) / 1000 * self.rng.uniform(0.5, 1.0)
        return delay_s if now_s + delay_s < self.deadline_s else None


def leader_address(details: ErrorDetails) -> str:
    """Where a NOT_LEADER answer says the leader is; empty when it does not."""
    return details.metadata.get("leader", "")
