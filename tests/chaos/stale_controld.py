"""`controld` with a seeded defect: a leader answers reads from what it knows, without a proof that it still leads, and
never doubts that it does. For the test of the tests."""

from __future__ import annotations

import sys
from typing import Any

from controld.__main__ import main
from controld.replica.barrier import Barrier
from controld.replica.leader import Leader
from controld.replica.replica import Replica


def read_at_once() -> None:
    async def wait(self: Barrier) -> None:
        if self._closed is not None:
            raise self._closed

    async def watch_proof(self: Replica, leader: Any) -> None:
        del self, leader

    def lose(self: Leader, error: Exception) -> None:
        del self, error

    Barrier.wait = wait
    Leader._lose = lose
    Replica._watch_proof = watch_proof


if __name__ == "__main__":
    read_at_once()
    sys.exit(main())
