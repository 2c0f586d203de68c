"""The planner process: same plans as inline, and every way it can be lost is one PlannerLostError and a new process."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from controld.core.ids import Incarnation, JobId, NodeUid
from controld.core.model import Device
from controld.core.spec import GangSpec, Resources
from controld.matching.engine import plan
from controld.matching.port import FreeDevice, NodeView, Pending, PlannerLostError, Snapshot
from controld.replica.planner import ProcessPlanner

GIB = 1 << 30


def view(n: int, *, cpu_free_millis: int = 4_000) -> NodeView:
    uid = NodeUid(f"uid-{n:04d}")
    devices = tuple(FreeDevice(Device(f"gpu{i}", "accelerator", attributes=(("fast", True),)), 1000) for i in range(4))
    return NodeView(
        uid=uid,
        name=f"n{n}",
        incarnation=Incarnation(uid, "boot", "g1"),
        unfit=None,
        cpu_free_millis=cpu_free_millis,
        memory_free_bytes=8 * GIB,
        cpu_millis=4_000,
        memory_bytes=8 * GIB,
        devices=devices,
        attributes=(("rack", "r1"), ("slots", 3), ("spot", False)),
        fencing_weak=False,
    )


def snapshot(nodes: int, revision: int = 1) -> Snapshot:
    return Snapshot(revision, tuple(view(n) for n in range(nodes)))


def gangs(count: int, ranks: int = 3) -> tuple[Pending, ...]:
    resources = Resources(500, GIB)
    return tuple(Pending(JobId(f"j{n}"), 1, GangSpec(ranks), resources, 0, n) for n in range(count))


@pytest.fixture
async def planner() -> AsyncIterator[ProcessPlanner]:
    made = ProcessPlanner()
    yield made
    await made.close()
    assert made.pid is None


async def test_plans_are_those_of_the_engine(planner: ProcessPlanner) -> None:
    shot = snapshot(600)
    assert await planner.plan(shot, gangs(20)) == plan(shot, gangs(20))
    pid = planner.pid
    # Nodes changed, came and went: the process is told the difference, and plans on the whole.
    nodes = (*(view(n, cpu_free_millis=100) for n in range(300)), *shot.nodes[310:], view(9_000))
    changed = Snapshot(2, nodes)
    assert await planner.plan(changed, gangs(20)) == plan(changed, gangs(20))
    assert await planner.plan(snapshot(2, 3), gangs(2)) == plan(snapshot(2, 3), gangs(2))
    assert planner.pid == pid


async def test_killed_between_and_within_questions(planner: ProcessPlanner) -> None:
    shot = snapshot(50)
    expected = plan(shot, gangs(5))
    assert await planner.plan(shot, gangs(5)) == expected
    first = planner.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    asking = asyncio.ensure_future(planner.plan(shot, gangs(5)))
    await asyncio.sleep(0.05)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(PlannerLostError):
        await asking
    assert await planner.plan(shot, gangs(5)) == expected
    second = planner.pid
    assert second not in (None, first)
    os.kill(second or 0, signal.SIGKILL)
    # Its death is noticed before the question (a new process) or by it (lost): never an answer made up.
    for _ in range(2):
        try:
            assert await planner.plan(shot, gangs(5)) == expected
        except PlannerLostError:
            continue
    assert await planner.plan(shot, gangs(5)) == expected
    assert planner.pid not in (None, second)


async def test_a_question_that_is_given_up_leaves_no_answer_behind(planner: ProcessPlanner) -> None:
    shot = snapshot(50)
    await planner.plan(shot, gangs(1))
    asking = asyncio.ensure_future(planner.plan(shot, gangs(5)))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await planner.plan(shot, gangs(2)) == plan(shot, gangs(2))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import time; time.sleep(60)", "in time"),
        ("raise SystemExit(1)", "gone"),
        ("import sys; sys.stdout.write('hello, this is no frame'); sys.stdout.flush(); sys.stdin.read()", "gone"),
        (
            "import sys; b = sys.stdout.buffer; b.write(b'\\x00\\x00\\x00\\x01\\xc1'); b.flush(); sys.stdin.read()",
            "gone",
        ),
    ],
)
async def test_a_process_that_is_no_planner_is_ended(script: str, message: str) -> None:
    planner = ProcessPlanner(command=(sys.executable, "-c", script), start_deadline_seconds=2.0)
    with pytest.raises(PlannerLostError, match=message):
        await planner.plan(snapshot(1), gangs(1))
    assert planner.pid is None
    await planner.close()


async def test_a_plan_that_takes_too_long_is_cut_short() -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from controld.matching.worker import serve
        serve(sys.stdin.buffer, sys.stdout.buffer, lambda snapshot, pending: time.sleep(60))
        """
    )
    planner = ProcessPlanner(command=(sys.executable, "-c", script), plan_deadline_seconds=0.3)
    with pytest.raises(PlannerLostError, match="in time"):
        await planner.plan(snapshot(1), gangs(1))
    assert planner.pid is None
    await planner.close()


async def test_an_engine_that_raises_is_told_and_the_process_stays() -> None:
    script = textwrap.dedent(
        """
        import sys
        from controld.matching.engine import plan
        from controld.matching.worker import serve
        def broken(snapshot, pending):
            print("to standard output", file=sys.stderr)
            if len(pending) == 13:
                raise ZeroDivisionError("unlucky")
            return plan(snapshot, pending)
        serve(sys.stdin.buffer, sys.stdout.buffer, broken)
        """
    )
    planner = ProcessPlanner(command=(sys.executable, "-c", script))
    shot = snapshot(3)
    assert await planner.plan(shot, gangs(1)) == plan(shot, gangs(1))
    pid = planner.pid
    with pytest.raises(PlannerLostError, match="unlucky"):
        await planner.plan(shot, gangs(13))
    assert planner.pid == pid
    more = replace(shot, revision=2, nodes=(*shot.nodes, view(7)))
    assert await planner.plan(more, gangs(2)) == plan(more, gangs(2))
    await planner.close()


async def test_the_process_ends_with_its_controller() -> None:
    """Its input ends when the controller dies, however it dies."""
    script = textwrap.dedent(
        """
        import asyncio, os, signal
        from controld.matching.port import Snapshot
        from controld.replica.planner import ProcessPlanner
        async def main():
            planner = ProcessPlanner()
            await planner.plan(Snapshot(1, ()), ())
            print(planner.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
        """
    )
    controller = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    output, _ = await controller.communicate()
    try:
        planner = os.pidfd_open(int(output))
    except ProcessLookupError:
        return  # gone already
    ended, _, _ = await asyncio.to_thread(select.select, [planner], [], [], 60)
    os.close(planner)
    assert ended
