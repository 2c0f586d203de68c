"""Tasks that belong to one leadership: kept, named, ended together, and never lost silently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


class Crew:
    """`on_broken(name, error, vital)` is told of a task that ended by an exception nobody expected.

    A vital one is a part of the leadership: without it something would silently not happen any more.
    """

    def __init__(self, on_broken: Callable[[str, BaseException, bool], None]) -> None:
        self._on_broken = on_broken
        # A dict keeps the order of starting, so that ends come in a stable order too.
        self._tasks: dict[asyncio.Task[None], bool] = {}

    def start(self, work: Coroutine[None, None, None], name: str, *, vital: bool = True) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = vital
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        vital = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_broken(task.get_name(), error, vital)

    def cancel(self, *, keep: asyncio.Task[None] | None) -> None:
        """Cancel everything but `keep` and the task that asks."""
        asking = asyncio.current_task()
        for task in tuple(self._tasks):
            if task is not keep and task is not asking:
                task.cancel()

    async def end(self) -> None:
        """Cancel everything and wait until it is over."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
