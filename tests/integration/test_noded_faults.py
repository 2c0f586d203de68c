"""What noded, its guardian and its network do to a running task when one of them goes away."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from noded.run import procs
from tests.integration.noded_support import HANG_SECONDS, FakeController, Noded, controller, go, noded, prepare, token
from tests.integration.relay_support import relay
from virialpb.v1 import common_pb2, node_pb2

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


async def run_task(fake: FakeController, *, fence_after_ms: int = 30_000, slot: str = "j.1.0") -> node_pb2.SlotStatus:
    await fake.until(lambda: fake.sessions, "hello")
    wanted = prepare(SLEEP, slot=slot)
    wanted.fence_after_ms = fence_after_ms
    fake.order(prepare=wanted)
    await fake.until_state(slot, "READY")
    fake.order(go=go(slot))
    return await fake.until_state(slot, "RUNNING")


def task_pids(agent: Noded) -> list[int]:
    """Processes of tasks below this agent's guardian."""
    found = procs.all_processes()
    mine = {agent.guardian_pid()}
    for _ in range(6):
        mine |= {process.pid for process in found if process.ppid in mine}
    command = "time.sleep(600)"
    return [pid for pid in mine if command in _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


async def gone(pids: list[int]) -> None:
    """Wait by pidfd, so that another process that gets the number is not waited for."""
    async with asyncio.timeout(HANG_SECONDS):
        for pid in pids:
            fd = procs.open_pidfd(pid)
            if fd is not None:
                ended = asyncio.Event()
                asyncio.get_running_loop().add_reader(fd, ended.set)
                await ended.wait()
                asyncio.get_running_loop().remove_reader(fd)
                os.close(fd)


async def test_case_c13_a_killed_noded_is_restarted_and_adopts_its_task(tmp_path: Path) -> None:
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]) as agent:
        await run_task(fake)
        before, pids, incarnation = agent.guardian_pid(), task_pids(agent), fake.session.hello.incarnation
        assert pids
        await agent.stop(signal.SIGKILL)
        await agent.start()
        await fake.until(lambda: len(fake.sessions) == 2, "second hello")
        assert fake.session.hello.incarnation == incarnation
        assert [slot.state for slot in fake.session.hello.beat.slots] == [node_pb2.SlotStatus.RUNNING]
        assert agent.guardian_pid() == before
        assert task_pids(agent) == pids
        fake.order(stop=node_pb2.Stop(slot="j.1.0", token=token(), grace_ms=0, reason="CANCELLED"))
        exited = await fake.until_state("j.1.0", "EXITED")
        assert exited.exit.reason == "STOPPED"


async def test_a_plain_stop_of_noded_leaves_its_tasks(tmp_path: Path) -> None:
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]) as agent:
        await run_task(fake)
        pids = task_pids(agent)
        plain = Noded(tmp_path / "n1", [fake.address])
        await agent.stop(signal.SIGKILL)
        await plain.start()
        await fake.until(lambda: len(fake.sessions) == 2, "second hello")
        assert await plain.stop() == 0
        assert task_pids(agent) == pids
        await agent.start()
        await fake.until(lambda: len(fake.sessions) == 3, "third hello")
        assert [slot.state for slot in fake.session.hello.beat.slots] == [node_pb2.SlotStatus.RUNNING]


async def test_kill_tasks_on_exit_leaves_nothing(tmp_path: Path) -> None:
    async with controller() as fake:
        async with noded(tmp_path / "n1", [fake.address]) as agent:
            await run_task(fake)
            guardian, pids = agent.guardian_pid(), task_pids(agent)
            assert await agent.stop() == 0
        await gone([guardian, *pids])


async def test_case_g15_a_dead_guardian_is_a_new_incarnation_with_its_old_slots_gone(tmp_path: Path) -> None:
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]) as agent:
        await run_task(fake)
        pids, first = task_pids(agent), fake.session.hello.incarnation
        os.kill(agent.guardian_pid(), signal.SIGKILL)
        await gone(pids)
        await fake.until(lambda: len(fake.sessions) == 2, "second hello")
        hello = fake.session.hello
        assert hello.incarnation.node_uid == first.node_uid
        assert hello.incarnation.guardian_nonce != first.guardian_nonce
        assert list(hello.gone_slots) == ["j.1.0"]
        assert not hello.beat.slots
        # the node works again
        fake.order(prepare=prepare(["/bin/true"], slot="j.2.0", owner=token(generation=2, revision=30)))
        await fake.until_state("j.2.0", "READY")


async def test_a_task_dies_by_its_own_clock_when_acknowledgements_stop(tmp_path: Path) -> None:
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]) as agent:
        await run_task(fake, fence_after_ms=4_000)
        pids = task_pids(agent)
        fake.acks = False
        await gone(pids)
        fake.acks = True
        exited = await fake.until_state("j.1.0", "EXITED")
        assert exited.exit.reason == "LEASE_EXPIRED"


async def test_all_controllers_away_for_longer_than_a_dial_kills_nothing(tmp_path: Path) -> None:
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]) as agent:
        await run_task(fake)
        pids = task_pids(agent)
        await fake.stop()
        await asyncio.sleep(4)
        assert task_pids(agent) == pids
        await fake.start(fake.address)
        await fake.until(lambda: len(fake.sessions) == 2, "second hello")
        assert [slot.state for slot in fake.session.hello.beat.slots] == [node_pb2.SlotStatus.RUNNING]


async def test_a_partition_in_which_nothing_closes_is_noticed_and_dialled_around(tmp_path: Path) -> None:
    async with (
        controller() as fake,
        relay(fake.address) as first,
        relay(fake.address) as second,
        noded(tmp_path / "n1", [first.address, second.address]) as agent,
    ):
        await run_task(fake)
        used = max(first, second, key=lambda one: one.carried_bytes)  # the other one is only kept warm
        used.freeze()
        await fake.until(lambda: len(fake.sessions) >= 2, "another session around the partition")
        assert task_pids(agent)
        await fake.until_state("j.1.0", "RUNNING")


async def test_a_new_history_stops_and_confirms(tmp_path: Path) -> None:
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]):
        await run_task(fake)
        fake.epoch = common_pb2.Epoch(history=2, revision=1)
        fake.order(beat_ack=node_pb2.BeatAck(seq=0))
        exited = await fake.until_state("j.1.0", "EXITED")
        assert exited.exit.reason == "STOPPED"


async def test_a_refused_session_stops_nothing_and_is_tried_again(tmp_path: Path) -> None:
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]) as agent:
        await run_task(fake)
        pids = task_pids(agent)
        fake.refuse = node_pb2.SessionRefused(reason="NO_LEADER", message="no controller leads at the moment")
        fake.session.orders.put_nowait(None)
        await asyncio.sleep(1)
        assert task_pids(agent) == pids
        fake.refuse = None
        await fake.until(lambda: len(fake.sessions) == 2, "second hello")


async def test_case_c9_a_second_noded_over_one_data_directory_is_refused(tmp_path: Path) -> None:
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]):
        await fake.until(lambda: fake.sessions, "hello")
        second = Noded(tmp_path / "n1", [fake.address])
        second.log = tmp_path / "second.log"
        await second.start()
        async with asyncio.timeout(HANG_SECONDS):
            assert await second.wait() == 2
        (line,) = second.log.read_text().splitlines()
        assert "is in use by a noded that runs" in line


@pytest.mark.slow
async def test_a_guardian_that_hangs_for_good_costs_its_tasks_and_not_the_node(tmp_path: Path) -> None:
    async with controller() as fake, noded(tmp_path / "n1", [fake.address]) as agent:
        await run_task(fake, fence_after_ms=4_000)
        pids, guardian = task_pids(agent), agent.guardian_pid()
        os.kill(guardian, signal.SIGSTOP)
        await gone(pids)  # by the launcher, which enforces the same deadline
        await gone([guardian])
        await fake.until(lambda: len(fake.sessions) >= 2, "a new incarnation")
        assert list(fake.session.hello.gone_slots) == ["j.1.0"]
        fake.order(prepare=prepare(["/bin/true"], slot="j.2.0", owner=token(generation=2, revision=30)))
        await fake.until_state("j.2.0", "READY")
