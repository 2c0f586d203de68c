"""Watches go on over a controller that is killed and started again: no change is lost, none comes twice."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import virial
from tests.integration.sdk_support import Controller
from virial import Client, JobSpec, JobState, SyncClient
from virial.models import Cursor, Event, JobChange, Resources, TaskSpec

SPEC = JobSpec(name="w", task=TaskSpec(command=("true",)), resources=Resources(1000, 1 << 30))
HANG_S = 60.0


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    controller = Controller(tmp_path / "controld")
    controller.start()
    yield controller
    controller.kill()


def reading(address: str, watch: Callable[[SyncClient], Iterator[Any]]) -> queue.Queue[Any]:
    """What a watch gives, read by a thread of its own; an error is given as well and ends it."""
    found: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        try:
            with SyncClient(address) as client:
                for item in watch(client):
                    found.put(item)
        except virial.VirialError as error:
            found.put(error)

    threading.Thread(target=read, daemon=True).start()
    return found


def take_until(found: queue.Queue[Any], done: Callable[[Any], bool]) -> list[Any]:
    taken: list[Any] = []
    while True:
        item = found.get(timeout=HANG_S)
        if isinstance(item, virial.VirialError):
            raise item
        taken.append(item)
        if done(item):
            return taken


def submit_and_kill(client: SyncClient, controller: Controller, rounds: int) -> list[str]:
    """Submit two jobs and cancel one, kill and start the controller; again and again. The jobs' ids."""
    ids: list[str] = []
    for _ in range(rounds):
        ids += [client.submit_job(SPEC).id, client.submit_job(SPEC).id]
        client.cancel_job(ids[-1])
        controller.kill()
        controller.start()
    return ids


def test_events_come_once_each_and_in_order(controller: Controller) -> None:
    found = reading(controller.address, lambda client: client.watch_events())
    with SyncClient(controller.address) as client:
        ids = submit_and_kill(client, controller, 3)
        last = client.submit_job(SPEC).id
        taken: list[Event] = take_until(found, lambda e: e.job == last)
        assert [e.sequence for e in taken] == list(range(1, len(taken) + 1))
        assert taken == client.list_events()
    assert [e.job for e in taken if e.kind == "job.submitted"] == [*ids, last]


def test_an_asynchronous_watch_does_the_same(controller: Controller) -> None:
    async def run() -> None:
        async with Client(controller.address) as client:
            taken: list[Event] = []

            async def read(until: str) -> None:
                async for event in client.watch_events(taken[-1].sequence if taken else 0):
                    taken.append(event)
                    if event.job == until:
                        return

            first = (await client.submit_job(SPEC)).id
            await asyncio.wait_for(read(first), HANG_S)
            reader = asyncio.create_task(read("w-3"))
            await asyncio.to_thread(controller.kill)
            await asyncio.to_thread(controller.start)
            assert [(await client.submit_job(SPEC)).id for _ in range(2)] == ["w-2", "w-3"]
            await asyncio.wait_for(reader, HANG_S)
            assert [e.sequence for e in taken] == list(range(1, len(taken) + 1))

    asyncio.run(run())


def test_a_watch_of_jobs_misses_no_change(controller: Controller) -> None:
    with SyncClient(controller.address) as client:
        before = client.submit_job(SPEC).id
        found = reading(controller.address, lambda client: client.watch_jobs())
        start: list[JobChange] = take_until(found, lambda c: c.synced)
        assert [c.job.id for c in start if c.job is not None] == [before]
        ids = submit_and_kill(client, controller, 2)
        last = client.submit_job(SPEC).id
        taken: list[JobChange] = take_until(found, lambda c: c.job is not None and c.job.id == last)
        present = {job.id: job.revision for job in client.list_jobs()}
    seen: dict[str, list[int]] = {}
    for change in taken:
        if change.job is not None:
            seen.setdefault(change.job.id, []).append(change.job.revision)
    # The newest state of every job that changed was seen, and no job ever went back.
    assert {id_: revisions[-1] for id_, revisions in seen.items()} == {id_: present[id_] for id_ in [*ids, last]}
    assert all(revisions == sorted(revisions) for revisions in seen.values())
    cancelled = {c.job.id for c in taken if c.job is not None and c.job.state is JobState.CANCELLED}
    assert cancelled == set(ids[1::2])
    revisions = [c.cursor.revision for c in taken]
    assert revisions == sorted(revisions)


def test_a_watch_of_one_job_resumes_from_a_cursor_of_its_own(controller: Controller) -> None:
    with SyncClient(controller.address) as client:
        job = client.submit_job(SPEC).id
        first = list(itertools.islice(client.watch_jobs(job), 2))
        assert [c.synced for c in first] == [False, True]
        client.submit_job(SPEC)
        client.cancel_job(job)
        resumed = reading(controller.address, lambda c: c.watch_jobs(job, cursor=first[-1].cursor))
        taken: list[JobChange] = take_until(resumed, lambda c: c.job is not None)
        states = [c.job.state for c in taken if c.job is not None]
        assert states == [JobState.CANCELLED]


def test_a_cursor_of_another_history_is_refused_at_once(controller: Controller) -> None:
    with SyncClient(controller.address) as client, pytest.raises(virial.CompactedError, match="list, then watch"):
        next(client.watch_jobs(cursor=Cursor(99, 1)))


def test_a_watch_ends_with_an_error_when_no_controller_comes_back(controller: Controller) -> None:
    with SyncClient(controller.address, timeout_s=1.0) as client:
        watch = client.watch_jobs()
        assert next(watch).synced
        controller.kill()
        with pytest.raises(virial.UnavailableError, match="no answer from"):
            next(watch)
