"""Users: seeded commands, asked again under the same request id until an answer comes, and what they were told."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

from controld.core.commands import CancelJob, DrainNode, PlaceHold, ReleaseHold, SubmitJob
from controld.core.ids import JobId, NodeUid
from controld.core.model import Hold
from controld.core.spec import (
    SECOND_NS,
    CheckpointSpec,
    DeviceRequest,
    Durability,
    GangSpec,
    JobSpec,
    Resources,
    RestartSpec,
    TaskSpec,
    Writes,
)
from controld.core.transitions.nodes import DRAIN_OWNER
from controld.replica.errors import OverloadedError, RefusedError
from controld.store.port import StoreError
from tests.sim.calls import Unreachable
from tests.sim.task import Program

if TYPE_CHECKING:
    from tests.sim.world import Controller, World

UserCommand = SubmitJob | CancelJob | PlaceHold | ReleaseHold | DrainNode
ATTEMPTS_MAX = 40
GIB = 1 << 30
IMPOSSIBLE = "impossible"


class User:
    """`count` commands spread over `seconds`. `shares`: of each kind of command. `work_s`: of a job."""

    shares = (50, 14, 14, 14, 4)
    work_s = (8.0, 70.0)

    def __init__(self, world: World, name: str, count: int, seconds: float) -> None:
        self.world = world
        self.name = name
        self.rng: Random = world.rng(f"user/{name}")
        self._count = count
        self._seconds = seconds
        self._number = 0
        self._jobs: list[JobId] = []
        self._holds: list[NodeUid] = []
        self._asked: list[UserCommand] = []

    async def run(self) -> None:
        for _ in range(self._count):
            await asyncio.sleep(self.rng.uniform(0.2, 1.8) * self._seconds / self._count)
            await self.ask(self._choose())
            if self._asked and self.rng.random() < 0.25:
                # A user whose answer was lost, or who presses the key twice.
                await self.ask(self.rng.choice(self._asked))

    async def ask(self, command: UserCommand) -> bool:
        """Whether it was carried out; False: refused, or nobody could be reached for long."""
        self.world.commands += 1
        for attempt in range(ATTEMPTS_MAX):
            try:
                reply = await self._controller().submit(command)
            except (Unreachable, StoreError, OverloadedError) as error:
                self._failed(error)
                await asyncio.sleep(self.rng.uniform(0.05, min(2.0, 0.1 * 2**attempt)))
                continue
            except RefusedError as error:
                self.world.trace.note("refused", command.request_id, error.refused.reason)
                return False
            self.world.checkers.acknowledged(command.request_id, command, reply)
            self._asked.append(command)
            if isinstance(command, SubmitJob):
                self._jobs.append(JobId(reply.subject))
            return True
        return False

    def _controller(self) -> Controller:
        found = [c for c in self.world.controllers if c.leading]
        return self.rng.choice(found or self.world.controllers)

    def _failed(self, error: Exception) -> None:
        """A call has: what is to be learned from it."""

    def next_id(self) -> str:
        self._number += 1
        return f"{self.name}-{self._number}"

    def _choose(self) -> UserCommand:
        rng = self.rng
        kind = rng.choices(("submit", "cancel", "hold", "release", "drain"), self.shares)[0]
        node = NodeUid(rng.choice(list(self.world.hosts.values())).disk.node_uid)
        if kind == "cancel" and self._jobs:
            return CancelJob(self.next_id(), rng.choice(self._jobs))
        if kind == "hold":
            self._holds.append(node)
            seconds = rng.choice((0, 20, 60))
            return PlaceHold(self.next_id(), node, Hold(self.name, "maintenance"), expire_after_ns=seconds * SECOND_NS)
        if kind == "release" and self._holds:
            return ReleaseHold(self.next_id(), self._holds.pop(), self.name)
        if kind == "drain":
            self.world.loop.after(rng.uniform(10, 60), self._undrain, node)
            return DrainNode(self.next_id(), node, "maintenance")
        return SubmitJob(self.next_id(), self._spec())

    def _undrain(self, node: NodeUid) -> None:
        self.world.start(self.ask(ReleaseHold(self.next_id(), node, DRAIN_OWNER)))

    def _spec(self) -> JobSpec:
        rng = self.rng
        impossible = rng.random() < 0.04
        ranks = rng.choice((1, 1, 2, 2, 3)) if not impossible else len(self.world.hosts) + 1
        step_ms = rng.choice((1000, 2000, 4000))
        steps = max(4, int(rng.uniform(*self.work_s) * 1000 / step_ms))
        program = Program(steps, step_ms, rng.choice((2, 4, 8)))
        if rng.random() < 0.1:
            crash = rng.randrange(1, steps)
            program = Program(steps, step_ms, program.save_every, crash, rng.choice((1, 2, 4)))
        hangs = rng.random() < 0.06
        if hangs:
            program = Program(steps, step_ms, program.save_every, 0, 1)
        shared = rng.random() < 0.7
        durability = Durability.SHARED_DIRECTORY if shared else Durability.LOCAL_DISK
        devices = rng.choice((0, 0, 1, 2))
        share = rng.choice((300, 500, 1000)) if devices == 1 else 1000
        request = (DeviceRequest("accelerator", devices, share),) if devices else ()
        return JobSpec(
            name=IMPOSSIBLE if impossible else rng.choice(("train", "tune", "eval")),
            gang=GangSpec(ranks, rng.choice((0, 0, 1)) if not impossible else 0, self._spread(impossible)),
            resources=Resources(rng.choice((500, 1000, 2000, 3000)), 4 * GIB, request),
            task=TaskSpec(program.command(), grace_ms=rng.choice((0, 500, 3000))),
            fence_after_ns=rng.choice((8, 15, 30, 60)) * SECOND_NS,
            writes=rng.choice((Writes.SHARED, Writes.TOKEN)),
            checkpoint=CheckpointSpec(durability, "/shared" if shared else "", timeout_ns=30 * SECOND_NS),
            restart=RestartSpec(max=rng.choice((2, 20, 20, 20))),
            priority=rng.choice((0, 0, 0, 5)),
            start_timeout_ns=20 * SECOND_NS if hangs else 0,
        )

    def _spread(self, impossible: bool) -> str:
        return "node" if impossible or self.rng.random() < 0.8 else "none"
