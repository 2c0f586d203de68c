"""Blocking work with a deadline, in daemon threads.

A read of a dead disk or network file system can hang in the kernel, where no thread can be stopped. Such a thread is
given up: it is counted, and neither the event loop, nor other work, nor the end of the process waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

THREADS_MAX: Final = 32


class WorkTimeout(Exception):
    """The work did not end in time; its thread may still hang."""


class WorkRefused(Exception):
    """THREADS_MAX threads are busy or hang: this machine's file systems do not answer."""


class Worker:
    """Used from one event loop."""

    def __init__(self) -> None:
        self.running = 0

    async def run(self, work: Callable[[], T], timeout_seconds: float) -> T:
        """What `work` returns or raises. Raises WorkTimeout and WorkRefused."""
        if self.running >= THREADS_MAX:
            raise WorkRefused(f"{self.running} operations on files are under way or hang already")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def finish(value: T | None, error: BaseException | None) -> None:
            self.running -= 1
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(value)  # type: ignore[arg-type] - T may itself be None

        def body() -> None:
            value: T | None = None
            problem: BaseException | None = None
            try:
                value = work()
            except BaseException as error:  # noqa: BLE001 - handed on to whoever waits
                problem = error
            try:
                loop.call_soon_threadsafe(finish, value, problem)
            except RuntimeError:
                return  # the loop has ended meanwhile, and nobody waits

        self.running += 1
        threading.Thread(target=body, name="noded-worker", daemon=True).start()
        try:
            async with asyncio.timeout(timeout_seconds):
                return await done
        except TimeoutError:
            if done.done() and not done.cancelled():
                raise  # raised by the work itself
            raise WorkTimeout(f"not done within {timeout_seconds:g} s") from None
