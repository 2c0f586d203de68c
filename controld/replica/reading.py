"""Whether the call under way is content with a copy that may be behind: set at the edge, asked where it is served."""

from __future__ import annotations

from contextvars import ContextVar

STALE_READS: ContextVar[bool] = ContextVar("stale_reads", default=False)
