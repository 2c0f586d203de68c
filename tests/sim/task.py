"""A simulated rank: steps in lock-step with its peers, saves checkpoints through its guardian, ends as told.

What it is to do stands in its command, so it travels through the whole control plane as a real one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim.disk import SHARD_BYTES, Shard, content_of
from tests.sim.loop import Process

if TYPE_CHECKING:
    from tests.sim.node import Host
    from tests.sim.truth import Run

ASK_AGAIN_S = 5.0
ASKS_MAX = 24
WRITE_S = (0.02, 0.3)
START_S = (0.1, 0.8)
END_S = (0.0, 1.5)


class CallRefused(Exception):
    """The guardian or the controller answered with an error."""


@dataclass(frozen=True, slots=True)
class Program:
    """`crash_step` -1: never; 0: it hangs before its first step. Either in its first `crashes` generations only."""

    steps: int
    step_ms: int
    save_every: int
    crash_step: int = -1
    crashes: int = 0

    def command(self) -> tuple[str, ...]:
        numbers = (self.steps, self.step_ms, self.save_every, self.crash_step, self.crashes)
        return ("train", *map(str, numbers))

    @staticmethod
    def of(command: tuple[str, ...]) -> Program:
        return Program(*map(int, command[1:]))


class Collective:
    """Where the ranks of one generation meet after each step; who waits for a dead peer waits for ever."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._arrived: dict[int, set[int]] = {}
        self._met: dict[int, asyncio.Event] = {}

    async def meet(self, step: int, rank: int) -> None:
        arrived = self._arrived.setdefault(step, set())
        met = self._met.setdefault(step, asyncio.Event())
        arrived.add(rank)
        if len(arrived) == self._world_size:
            met.set()
            self._arrived.pop(step - 1, None)
            self._met.pop(step - 1, None)
        else:
            await met.wait()


class Rank:
    """`connection` is its end of VIRIAL_SOCK, given by the guardian."""

    def __init__(self, host: Host, process: Process, env: Mapping[str, str], program: Program, run: Run) -> None:
        self.host = host
        self.process = process
        self.run = run
        self._env = env
        self._program = program
        self._rng: Random = host.world.rng(f"task/{run.slot}/{run.token.epoch}")
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_call = 0
        self.connected = True
        # How long SIGKILL takes where the kernel does not let go of it.
        self.stuck_s = 0.0

    # -- VIRIAL_SOCK

    def send(self, message: dict[str, Any]) -> None:
        """The guardian says something to this task."""
        self.process.post(self._rng.uniform(0.0001, 0.001), self._hear, message)

    def _hear(self, message: dict[str, Any]) -> None:
        future = self._calls.get(message.get("id", -1))
        if future is not None and not future.done():
            future.set_result(message)

    async def _ask(self, call: str, timeout_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Raises CallRefused, TimeoutError."""
        self._next_call += 1
        number = self._next_call
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        message = {"id": number, "call": call, "args": arguments}
        self.host.tell_guardian(self.run.slot, self, message)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await future
        finally:
            del self._calls[number]
        if not answer.get("ok"):
            raise CallRefused(f"{answer.get('error')}: {answer.get('message')}")
        return answer["result"]

    # -- the work

    async def main(self) -> None:
        code = await self._train()
        self.run.finished = code == 0
        self.host.task_exited(self.run.slot, self, code=code)

    async def _train(self) -> int:
        program, rng = self._program, self._rng
        rank, world_size = int(self._env["RANK"]), int(self._env["WORLD_SIZE"])
        token = self.run.token
        meeting = self.host.world.collective(token, world_size)
        await asyncio.sleep(rng.uniform(*START_S))
        step = 0
        if program.crash_step == 0 and token.generation <= program.crashes and rank == 0:
            await asyncio.Event().wait()
        if "VIRIAL_CHECKPOINT_ID" in self._env:
            found = self._restore(rank)
            if found is None:
                return 3
            step = found
        while step < program.steps:
            await meeting.meet(step, rank)
            await asyncio.sleep(program.step_ms * rng.uniform(0.9, 1.1) / 1000)
            step += 1
            if step == program.crash_step and token.generation <= program.crashes and rank == 0:
                return 1
            await self._ask("progress", step=step, metrics={"loss": 1.0 / step})
            if step % program.save_every == 0:
                await self._save(step, rank)
        await meeting.meet(step, rank)
        await asyncio.sleep(rng.uniform(*END_S))
        return 0

    def _restore(self, rank: int) -> int | None:
        """The step to go on from; None: the shard was damaged after its agent had looked at it."""
        directory = self._env["VIRIAL_CHECKPOINT_DIR"]
        id_, step = self._env["VIRIAL_CHECKPOINT_ID"], int(self._env["VIRIAL_CHECKPOINT_STEP"])
        shard = self.host.tree(directory).find(directory, f"rank-{rank:05d}.shard")
        if not self.whole(shard, rank):
            return None
        self.host.world.checkers.restored(self.run, id_, step, shard)
        return step

    def whole(self, shard: Shard | None, rank: int) -> bool:
        """`virial.task` reads nothing whose digests are wrong."""
        return shard is not None and shard.content == content_of(self.run.token.job, shard.step, rank)

    async def _save(self, step: int, rank: int) -> None:
        """Best effort, as in `virial.task`: one that fails is told of, and training goes on."""
        try:
            begun = await self._patiently("checkpoint_begin", step=step)
            directory = begun["directory"]
            tree = self.host.tree(directory)
            if tree.full or directory not in tree.directories:
                await self._ask(
                    "checkpoint_failed",
                    ASK_AGAIN_S,
                    checkpoint_id=begun["checkpoint_id"],
                    reason="STORAGE_FULL",
                    message="no room",
                )
                return
            job, generation = self.run.token.job, self.run.token.generation
            shard = Shard(begun["checkpoint_id"], step, rank, generation, content_of(job, step, rank))
            tree.directories[directory][f".{shard.file}.tmp"] = shard
            await asyncio.sleep(self._rng.uniform(*WRITE_S))
            files = tree.directories.get(directory)
            if files is None or files.pop(f".{shard.file}.tmp", None) is None:
                return
            files[shard.file] = replace(shard, durable=True)
            told = {"checkpoint_id": shard.checkpoint, "step": step, "size_bytes": SHARD_BYTES}
            answer = await self._patiently("checkpoint_prepared", **told, digest=shard.digest, file=shard.file)
            if answer["state"] == "PREPARED":
                await self._patiently("checkpoint_wait", checkpoint_id=shard.checkpoint)
        except (CallRefused, TimeoutError):
            return

    async def _patiently(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Asked again under a new id while nothing comes back, as `virial.task` does."""
        for _ in range(ASKS_MAX):
            try:
                return await self._ask(call, ASK_AGAIN_S, **arguments)
            except TimeoutError:
                continue
        raise TimeoutError
