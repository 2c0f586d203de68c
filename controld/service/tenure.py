"""How long a stream may stay open: as long as its caller would be let in anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Final

from controld.service.failures import CallError
from controld.service.gate import Caller

# An authority that is trusted no more, or a wall clock that was set, is noticed after so long.
LOOK_SECONDS_MAX: Final = 30.0
LOOK_SECONDS_MIN: Final = 0.05


@asynccontextmanager
async def tenure(admit: Callable[[], Caller], now: Callable[[], datetime]) -> AsyncGenerator[None]:
    """The body runs until the caller is not admitted any more. Raises CallError then."""
    loop = asyncio.get_running_loop()
    refusal: CallError | None = None
    timer: asyncio.TimerHandle | None = None
    limit = asyncio.timeout(None)

    def look() -> None:
        nonlocal refusal, timer
        try:
            caller = admit()
        except CallError as error:
            refusal = error
            limit.reschedule(loop.time())
            return
        if caller.not_after is not None:
            left_seconds = (caller.not_after - now()).total_seconds()
            timer = loop.call_later(min(max(left_seconds, LOOK_SECONDS_MIN), LOOK_SECONDS_MAX), look)

    try:
        async with limit:
            look()
            yield
    except TimeoutError:
        if refusal is not None and limit.expired():
            raise refusal from None
        raise
    finally:
        if timer is not None:
            timer.cancel()
