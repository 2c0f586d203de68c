"""What both ends of a lease must count with alike. No settings: an agent that believed otherwise than its controller
would outlive its lease. Standard library only; pure rooms may import this module."""

from __future__ import annotations

from typing import Final

NS_PER_MS: Final = 1_000_000
KILL_BUDGET_NS: Final = 1_000 * NS_PER_MS
"""What an agent needs to kill a task: it begins so much before the end."""
DRIFT_PERCENT: Final = 1
"""By how much the clocks of two machines may run apart."""


def lease_length_ns(fence_after_ms: int) -> int:
    """How long a renewal holds, from its send time. Negative for a fence_after too short to hold at all."""
    return fence_after_ms * NS_PER_MS * (100 - DRIFT_PERCENT) // 100 - KILL_BUDGET_NS


def fence_after_min_ns(silence_ns: int) -> int:
    """The least fence_after whose lease is longer than a silence of renewals."""
    return -(-(KILL_BUDGET_NS + silence_ns) * 100 // (100 - DRIFT_PERCENT)) + 1
