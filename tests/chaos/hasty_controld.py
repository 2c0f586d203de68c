"""`controld` with a seeded defect: it answers a batch, and commits it a moment later. For the test of the tests."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from controld.__main__ import main
from controld.replica.writer import Writer

DELAY_S = 0.3


def answer_first() -> None:
    finish = Writer._finish

    async def hasty(self: Writer, batch: Any) -> None:
        self._answer(batch)
        await asyncio.sleep(DELAY_S)
        await finish(self, batch)

    Writer._finish = hasty


if __name__ == "__main__":
    answer_first()
    sys.exit(main())
