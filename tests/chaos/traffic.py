"""Clients that share holds and jobs, and record every call and answer. What they saw has to be linearizable."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable
from dataclasses import dataclass, field

from tests.chaos.replicas import HANG_SECONDS, NODES
from tests.linear.checker import check_each
from tests.linear.models import (
    ALREADY_EXISTS,
    CANCELLED,
    NOT_FOUND,
    OK,
    PENDING,
    Cancel,
    HoldCall,
    Holds,
    JobCall,
    Jobs,
    Place,
    ReadHold,
    ReadJob,
    Release,
    Submit,
)
from tests.linear.recorder import Recorder
from virial import Client
from virial.errors import AlreadyExistsError, NotFoundError, VirialError
from virial.models import JobSpec, JobState, Resources, TaskSpec

OWNERS = 8
# Some callers give up soon, so that some outcomes stay unknown.
PATIENCES_S = (0.6, 2.5, 30.0, 30.0)
NO_NODE_HAS = Resources(cpu_millis=1_000_000, memory_bytes=1 << 20)
JOBS_OPEN = 4


@dataclass
class Traffic:
    """`readers` only read, on a connection that they keep for as long as it answers; the others connect anew often.

    `once`: every hold is placed once, under an owner of its own, and read at the end: no later one hides its loss.
    """

    addresses: list[str]
    seed: int
    clients: int = 6
    readers: int = 2
    once: bool = False
    pause_s: float = 0.015
    holds: Recorder[HoldCall] = field(default_factory=Recorder[HoldCall])
    jobs: Recorder[JobCall] = field(default_factory=Recorder[JobCall])
    wrong: list[str] = field(default_factory=list[str])
    answered: dict[int, int] = field(default_factory=dict[int, int])
    newest_job: int = 0
    placed: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    _tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    _stopping: bool = False

    def start(self) -> None:
        for number in range(self.clients + self.readers):
            self.answered[number] = 0
            self._tasks.append(asyncio.create_task(self._guard(number), name=f"client {number}"))

    async def stop(self) -> None:
        """Every client gets the answer to its last call."""
        self._stopping = True
        async with asyncio.timeout(HANG_SECONDS):
            await asyncio.gather(*self._tasks)

    async def progress(self, answers: int = 3) -> None:
        """Until each client was answered so many times more."""
        before = dict(self.answered)
        try:
            async with asyncio.timeout(HANG_SECONDS):
                while any(self.answered[n] < count + answers for n, count in before.items()):
                    if self.wrong:
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            stuck = [number for number, count in before.items() if self.answered[number] < count + answers]
            raise AssertionError(f"no progress after the heal: clients {stuck}") from None

    async def _guard(self, number: int) -> None:
        """Whatever a client does not expect is wrong."""
        rng = random.Random(f"{self.seed}/{number}")
        try:
            while not self._stopping:
                order = rng.sample(self.addresses, len(self.addresses))
                async with Client(order, timeout_s=rng.choice(PATIENCES_S)) as client:
                    await self._connected(client, number, rng)
        except VirialError as error:
            self.wrong.append(f"client {number}: {type(error).__name__}: {error}")

    async def _connected(self, client: Client, number: int, rng: random.Random) -> None:
        reads_only = number >= self.clients
        for turn in range(1 << 30 if reads_only else rng.randrange(5, 60)):
            if self._stopping:
                return
            unique = f"w{number}-{self.answered[number]}-{turn}"
            if self.once:
                await self._place_once(client, f"c{number}", rng.choice(NODES), unique)
            elif rng.random() < 0.75:
                await self._hold(client, f"c{number}", rng, unique, reads_only=reads_only)
            else:
                await self._job(client, f"c{number}", rng, unique, reads_only=reads_only)
            self.answered[number] += 1
            await asyncio.sleep(rng.uniform(0, 2 * self.pause_s))

    async def _hold(self, client: Client, name: str, rng: random.Random, unique: str, *, reads_only: bool) -> None:
        node, owner = rng.choice(NODES), f"o{rng.randrange(OWNERS)}"
        key = f"{node}/{owner}"
        match "read" if reads_only else rng.choice(("place", "place", "release", "read")):
            case "place":
                await self.holds.record(name, Place(key, unique), _place(client, node, owner, unique))
            case "release":
                await self.holds.record(name, Release(key), _release(client, node, owner))
            case _:
                await self.holds.record(name, ReadHold(key), _read_hold(client, node, owner))

    async def _place_once(self, client: Client, name: str, node: str, owner: str) -> None:
        self.placed.append((node, owner))
        await self.holds.record(name, Place(f"{node}/{owner}", "once"), _place(client, node, owner, "once"))

    async def _job(self, client: Client, name: str, rng: random.Random, unique: str, *, reads_only: bool) -> None:
        key = f"j-{max(0, self.newest_job - rng.randrange(JOBS_OPEN))}"
        match "read" if reads_only else rng.choice(("submit", "submit", "cancel", "read")):
            case "submit":
                if rng.random() < 0.5:
                    self.newest_job += 1
                    key = f"j-{self.newest_job}"
                await self.jobs.record(name, Submit(key, unique), _submit(client, key, unique))
            case "cancel":
                await self.jobs.record(name, Cancel(key), _cancel(client, key))
            case _:
                await self.jobs.record(name, ReadJob(key), _read_job(client, key))

    async def read_all(self) -> None:
        """Once more, at the end: what was acknowledged is there."""
        async with Client(self.addresses, timeout_s=HANG_SECONDS) as client:
            for node in NODES:
                for owner in range(OWNERS):
                    call = ReadHold(f"{node}/o{owner}")
                    await self.holds.record("end", call, _read_hold(client, node, f"o{owner}"))
            for node, owner in self.placed:
                await self.holds.record("end", ReadHold(f"{node}/{owner}"), _read_hold(client, node, owner))
            for number in range(self.newest_job + 1):
                await self.jobs.record("end", ReadJob(f"j-{number}"), _read_job(client, f"j-{number}"))

    def violations(self) -> list[str]:
        """What no order of the operations explains, and what a client did not expect. Raises UndecidedError."""
        holds = check_each(Holds(), self.holds.operations, lambda call: call.key)
        jobs = check_each(Jobs(), self.jobs.operations, lambda call: call.key)
        return [*self.wrong, *(f"{key}: {violation}" for key, violation in [*holds.items(), *jobs.items()])]

    @property
    def operations(self) -> int:
        return self.holds.answered + self.jobs.answered


async def _place(client: Client, node: str, owner: str, reason: str) -> Hashable:
    await client.place_hold(node, owner, reason)
    return OK


async def _release(client: Client, node: str, owner: str) -> Hashable:
    try:
        await client.release_hold(node, owner)
    except NotFoundError:
        return NOT_FOUND
    return OK


async def _read_hold(client: Client, node: str, owner: str) -> Hashable:
    holds = (await client.get_node(node)).holds
    return next((hold.reason for hold in holds if hold.owner == owner), None)


async def _submit(client: Client, job: str, author: str) -> Hashable:
    try:
        await client.submit_job(JobSpec(name=author, resources=NO_NODE_HAS, task=TaskSpec(("true",))), job_id=job)
    except AlreadyExistsError:
        return ALREADY_EXISTS
    return OK


async def _cancel(client: Client, job: str) -> Hashable:
    try:
        await client.cancel_job(job)
    except NotFoundError:
        return NOT_FOUND
    return OK


async def _read_job(client: Client, job: str) -> Hashable:
    try:
        found = await client.get_job(job)
    except NotFoundError:
        return None
    return found.spec.name, CANCELLED if found.state is JobState.CANCELLED else PENDING
