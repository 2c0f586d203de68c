"""Planners: in a process of their own, so that no plan stalls the leader's loop; or inline, for tests."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from controld.core.ids import NodeUid
from controld.matching import wire
from controld.matching.port import NodeView, Pending, Plan, Planner, PlannerLostError, Snapshot

# Between two slices of comparing and encoding nodes the loop serves everyone else: a slice takes a few ms.
SLICE_NODES = 250
# Planning yields to the leader's loop when cores are scarce.
NICENESS = 10


class InlinePlanner:
    """Plans at once, on the caller's loop: deterministic, for simulation and tests."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    async def plan(self, snapshot: Snapshot, pending: tuple[Pending, ...]) -> Plan:
        return self._planner(snapshot, pending)

    async def close(self) -> None:
        return


class ProcessPlanner:
    """Asks a child process. One that dies, talks nonsense or takes too long is killed; the next question starts one."""

    def __init__(
        self,
        *,
        command: Sequence[str] = (sys.executable, "-m", "controld.matching.worker"),
        plan_deadline_seconds: float = 10.0,
        start_deadline_seconds: float = 30.0,
    ) -> None:
        self._command = tuple(command)
        self._plan_deadline_seconds = plan_deadline_seconds
        self._start_deadline_seconds = start_deadline_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._number = 0
        # What this process was told: the next question sends what differs.
        self._told: dict[NodeUid, NodeView] = {}
        self._one_at_a_time = asyncio.Lock()
        # Killed, not yet seen gone.
        self._dying: list[asyncio.subprocess.Process] = []

    @property
    def pid(self) -> int | None:
        """Of the running process; None when there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def plan(self, snapshot: Snapshot, pending: tuple[Pending, ...]) -> Plan:
        async with self._one_at_a_time:
            try:
                process = await self._running()
                async with asyncio.timeout(self._plan_deadline_seconds):
                    return await self._ask(process, snapshot, pending)
            except TimeoutError as error:
                self._discard()
                raise PlannerLostError("no answer in time") from error
            except (OSError, EOFError, wire.WireError) as error:
                self._discard()
                raise PlannerLostError(f"the planner process is gone: {error}") from error
            except asyncio.CancelledError:
                # Half a question may be written, and an answer may come that nobody waits for.
                self._discard()
                raise

    async def close(self) -> None:
        """End the process and see it gone."""
        self._discard()
        await self._bury()

    async def _bury(self) -> None:
        while self._dying:
            process = self._dying[-1]
            await process.wait()
            # Whatever it still had to say: its pipe is closed by reading to the end.
            assert process.stdout is not None
            await process.stdout.read()
            self._dying.remove(process)

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._discard()
        await self._bury()
        self._told = {}
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
        async with asyncio.timeout(self._start_deadline_seconds):
            if not isinstance(await self._read(self._process), wire.Ready):
                raise wire.WireError("the first word was not `ready`")
        return self._process

    async def _ask(self, process: asyncio.subprocess.Process, snapshot: Snapshot, pending: tuple[Pending, ...]) -> Plan:
        await self._tell(process, snapshot)
        self._number += 1
        await self._write(process, wire.Ask(self._number, snapshot.revision, pending))
        answer = await self._read(process)
        match answer:
            case wire.Answer(number, plan) if number == self._number:
                return plan
            case wire.Failed(number, error) if number == self._number:
                raise PlannerLostError(f"the planner failed: {error}")
            case _:
                raise wire.WireError(f"{type(answer).__name__} where answer {self._number} was due")

    async def _tell(self, process: asyncio.subprocess.Process, snapshot: Snapshot) -> None:
        for start in range(0, len(snapshot.nodes), SLICE_NODES):
            part = snapshot.nodes[start : start + SLICE_NODES]
            # Most are the very objects of the last question: comparing these by value would cost more than sending.
            changed = tuple(n for n in part if (told := self._told.get(n.uid)) is not n and told != n)
            if changed:
                await self._write(process, wire.Nodes(changed))
                self._told.update((node.uid, node) for node in changed)
            await asyncio.sleep(0)
        if len(self._told) > len(snapshot.nodes):
            present = {node.uid for node in snapshot.nodes}
            gone = tuple(uid for uid in self._told if uid not in present)
            await self._write(process, wire.Nodes((), gone))
            for uid in gone:
                del self._told[uid]

    @staticmethod
    async def _write(process: asyncio.subprocess.Process, message: wire.ToPlanner) -> None:
        assert process.stdin is not None
        process.stdin.write(wire.frame(message))
        await process.stdin.drain()

    @staticmethod
    async def _read(process: asyncio.subprocess.Process) -> wire.FromPlanner:
        """Raises WireError, EOFError (IncompleteReadError is one)."""
        assert process.stdout is not None
        length = wire.length_of(await process.stdout.readexactly(wire.LENGTH_BYTES))
        return wire.from_planner(await process.stdout.readexactly(length))

    def _discard(self) -> None:
        """Kill the process: it holds nothing that the next one is not told anew."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        self._dying.append(process)
