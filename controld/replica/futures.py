"""Futures nobody awaits."""

from __future__ import annotations

import asyncio
from typing import TypeVar

_T = TypeVar("_T")


def _look(future: asyncio.Future[_T]) -> None:
    if not future.cancelled():
        future.exception()


def ignore_outcome(future: asyncio.Future[_T]) -> None:
    """For what is asked again by itself: a failure that is not looked at would be reported by the event loop."""
    future.add_done_callback(_look)
