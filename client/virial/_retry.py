"""When a failed call is sent again, and after how long. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from virialpb.errors import TABLE, ErrorDetails
from virialpb.reasons import Reason

# A controller that restarts takes seconds: the cap keeps a client near the moment it is back.
DELAY_FIRST_MS = 50
DELAY_MAX_MS = 2_000
# One of several said that another leads, or none: an election takes half a second.
DELAY_ELECTION_MAX_MS = 250
# A controller that stands still says nothing and closes nothing: where there are others, one of them is asked after so
# long; each time twice as long, so that a call that takes its time gets it in the end.
PATIENCE_FIRST_S = 3.0
# From the transport itself: the connection broke, so it is not known whether the call arrived. Mutations carry a
# request_id and reads change nothing, so both may be sent again.
TRANSPORT_CODES = frozenset({"UNAVAILABLE"})


@dataclass(slots=True)
class Attempts:
    """One call and its repetitions, until `deadline_s` on the caller's clock."""

    deadline_s: float
    rng: random.Random
    count: int = 0
    electing: bool = False
    told: set[str] = field(default_factory=set[str])
    hurried: int = 0

    def patience_s(self, now_s: float, addresses: int) -> float:
        """How long to wait for the next answer."""
        left_s = max(0.05, self.deadline_s - now_s)
        return left_s if addresses < 2 else min(left_s, PATIENCE_FIRST_S * 2**self.hurried)

    def delay_s(self, details: ErrorDetails, now_s: float) -> float | None:
        """How long to wait before the call is sent again; None when it is not. 0: the first time that it is told of a
        leader, who is asked at once; two that name each other are not asked for ever."""
        if details.reason is not None:
            retryable = TABLE[details.reason].retryable
        else:
            # The deadline of one try, not that of the call.
            overdue = details.code.name == "DEADLINE_EXCEEDED" and now_s < self.deadline_s
            self.hurried += overdue
            retryable = overdue or details.code.name in TRANSPORT_CODES
        if not retryable:
            return None
        leader = leader_address(details)
        if leader and leader not in self.told and now_s < self.deadline_s:
            self.told.add(leader)
            self.electing = True
            return 0.0
        self.count += 1
        self.electing |= details.reason in (Reason.NOT_LEADER, Reason.NO_LEADER)
        most_ms = DELAY_ELECTION_MAX_MS if self.electing else DELAY_MAX_MS
        grown_ms = max(DELAY_FIRST_MS << min(self.count - 1, 10), details.retry_after_ms or 0)
        delay_s = min(grown_ms, most_ms) / 1000 * self.rng.uniform(0.5, 1.0)
        return delay_s if now_s + delay_s < self.deadline_s else None


def leader_address(details: ErrorDetails) -> str:
    """Where a NOT_LEADER answer says the leader is; empty when it does not."""
    return details.metadata.get("leader", "")
