"""What dies, what survives: guardian, noded, launcher and task fail in turn, and the fence holds."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import AsyncIterator

import pytest

from noded.run import procs
from noded.run.client import Connected, Disconnected, GuardianClient, GuardianUnavailable
from noded.run.protocol import ExitReason, Fencing, SlotState
from tests.integration.guardian_support import (
    ESCAPE,
    PYTHON,
    TaskChannel,
    World,
    alive,
    ask,
    command_line,
    mark_of,
    new_world,
    now_ns,
    start_by_hand,
    until,
)


@pytest.fixture(params=["auto", "weak"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with new_world(request.param) as made:
        yield made


def launcher_of(init_pid: int) -> int:
    process = procs.read_process(init_pid)
    assert process is not None
    return process.ppid


async def escapee(world: World, slot: str = "j.1.0") -> int:
    """The host's pid of a process that left the task's session and process tree."""
    await until(lambda: "ready" in world.log(slot) and "escaped" in world.log(slot), "the task forked away")
    found = [pid for pid in procs.take_snapshot().strays(f"{mark_of(world)}/{slot}", None) if _is_orphan(pid)]
    assert len(found) == 1
    return found[0]


def _is_orphan(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    session, group = int(fields[3]), int(fields[2])
    return session == group != pid


async def test_setsid_escapee_dies(world: World) -> None:
    noded = await world.noded()
    await noded.run([PYTHON, "-I", "-S", "-c", ESCAPE])
    pid = await escapee(world)
    await noded.client.stop("j.1.0", 0, "test")
    assert (await noded.exit_of("j.1.0")).exit.empty
    assert not alive(pid)
    hello = await noded.client.hello()
    assert (hello.fencing is Fencing.WEAK) == (world.fencing == "weak"), "a weak fence is said to be weak"


async def test_guardian_killed_takes_its_tasks_along(world: World) -> None:
    noded = await world.noded()
    status = await noded.run([PYTHON, "-I", "-S", "-c", ESCAPE])
    pid = await escapee(world)
    await noded.client.close()
    assert status.pid is not None
    os.kill(world.guardian_pid, signal.SIGKILL)
    await until(lambda: not alive(status.pid or 0) and not alive(pid), "task and escapee die with the guardian")


async def test_a_new_guardian_reports_what_the_old_one_lost(world: World) -> None:
    noded = await world.noded()
    await noded.run(["sleep", "1000"], device_keys=("gpu0",))
    await noded.run(["sh", "-c", "exit 3"], "k.1.0")
    done = (await noded.exit_of("k.1.0")).exit
    await noded.client.prepare(ask(["sleep", "1000"], "p.1.0"))
    first = await noded.client.hello()
    await until(lambda: world.status("k.1.0").get("state") == "EXITED" and world.status("p.1.0"), "states written")
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: len([e for e in noded.heard if isinstance(e, Connected)]) == 2, "a new guardian is started")
    second = await noded.client.hello()
    assert second.nonce != first.nonce
    assert second.boot_id == first.boot_id
    assert second.slots == ()
    by_slot = {status.slot: status for status in second.leftovers}
    lost = by_slot["j.1.0"].exit
    assert lost is not None
    assert (lost.reason, lost.empty) == (ExitReason.GUARDIAN_LOST, True)
    assert by_slot["k.1.0"].exit == done, "an exit that noded had not acknowledged is not lost"
    prepared = by_slot["p.1.0"].exit
    assert prepared is not None
    assert prepared.reason is ExitReason.GUARDIAN_LOST
    for slot in by_slot:
        await noded.client.release(slot)
    assert await noded.client.list_slots() == ()
    await noded.run(["true"], "n.1.0", device_keys=("gpu0",))


async def test_what_outlived_the_old_guardian_is_killed_before_the_new_one_serves() -> None:
    """The worst case of the weak fence: guardian and launcher die at once, and nobody is left to kill an escapee."""
    async with new_world("weak") as world:
        noded = await world.noded()
        status = await noded.run([PYTHON, "-I", "-S", "-c", ESCAPE], device_keys=("gpu0",))
        pid = await escapee(world)
        await noded.client.close()
        assert status.init_pid is not None
        launcher = launcher_of(status.init_pid)
        os.kill(world.guardian_pid, signal.SIGSTOP)
        os.kill(launcher, signal.SIGKILL)
        os.kill(world.guardian_pid, signal.SIGKILL)
        await until(lambda: not alive(launcher) and not alive(world.guardian_pid), "both are gone")
        assert alive(pid), "the escapee outlives them, or this test shows nothing"
        second = await world.noded()
        (left,) = (await second.client.hello()).leftovers
        assert left.exit is not None
        assert (left.state, left.exit.reason, left.exit.empty) == (SlotState.EXITED, ExitReason.GUARDIAN_LOST, True)
        assert not alive(pid)


async def test_noded_hears_of_the_loss(world: World) -> None:
    noded = await world.noded()
    os.kill(world.guardian_pid, signal.SIGKILL)
    await until(lambda: len(noded.heard) >= 3, "lost and back")
    assert [type(event) for event in noded.heard] == [Connected, Disconnected, Connected]


async def test_launcher_killed_ends_the_slot(world: World) -> None:
    noded = await world.noded()
    status = await noded.run([PYTHON, "-I", "-S", "-c", ESCAPE])
    pid = await escapee(world)
    assert status.init_pid is not None
    os.kill(launcher_of(status.init_pid), signal.SIGKILL)
    end = (await noded.exit_of("j.1.0")).exit
    assert (end.reason, end.signal, end.empty) == (ExitReason.SIGNALED, signal.SIGKILL, True)
    assert not alive(status.pid or 0)
    assert not alive(pid)


async def test_launcher_stopped_does_not_save_the_task(world: World) -> None:
    noded = await world.noded()
    status = await noded.run(["sleep", "1000"])
    assert status.init_pid is not None
    os.kill(launcher_of(status.init_pid), signal.SIGSTOP)
    await noded.client.stop("j.1.0", 0, "test")
    assert (await noded.exit_of("j.1.0")).exit.empty
    assert not alive(status.pid or 0)


async def test_noded_away_the_guardian_keeps_the_deadline(world: World) -> None:
    noded = await world.noded()
    status = await noded.run_leased(["sleep", "1000"], 400)
    await noded.client.close()
    await until(lambda: not alive(status.pid or 0), "the task is killed without noded")
    assert now_ns() >= status.deadline_ns
    back = await world.noded(spawn=False)
    assert (await back.ended(status.slot)).reason is ExitReason.LEASE_EXPIRED


async def test_a_stopped_guardian_kills_before_it_serves(world: World) -> None:
    """SIGSTOP longer than the lease. Meanwhile the launcher keeps the deadline; on CONT no report of the task counts,
    though one lies in the guardian's socket, sent while the lease was valid."""
    noded = await world.noded()
    status = await noded.run_leased(["sleep", "1000"], 2000)
    channel = TaskChannel(world)
    channel.send({"id": 1, "call": "progress", "args": {"step": 1}})
    assert (await channel.receive())["ok"] is True
    os.kill(world.guardian_pid, signal.SIGSTOP)
    channel.send({"id": 2, "call": "progress", "args": {"step": 2}})
    channel.send({"id": 3, "call": "checkpoint_prepared", "args": {"step": 2}})
    await until(lambda: not alive(status.pid or 0), "the launcher enforces the lease while the guardian cannot")
    assert now_ns() >= status.deadline_ns
    os.kill(world.guardian_pid, signal.SIGCONT)
    end = (await noded.exit_of(status.slot)).exit
    assert (end.reason, end.empty) == (ExitReason.LEASE_EXPIRED, True)
    assert await noded.client.extend({status.slot: now_ns() + 10**12}) == {status.slot}
    assert [event.progress.step for event in noded.progress()] == [1]
    assert noded.calls() == []
    channel.close()


async def test_the_guardian_kills_when_its_launcher_cannot(world: World) -> None:
    noded = await world.noded()
    status = await noded.run_leased(["sleep", "1000"], 600)
    assert status.init_pid is not None
    os.kill(launcher_of(status.init_pid), signal.SIGSTOP)
    end = (await noded.exit_of(status.slot)).exit
    assert (end.reason, end.empty) == (ExitReason.LEASE_EXPIRED, True)


async def restart_noded(world: World, *, defect: bool) -> None:
    """C13. The defect: the going noded takes its guardian along."""
    first = await world.noded()
    before = await first.run(["sh", "-c", "echo one; sleep 1000"], device_keys=("gpu0",))
    nonce = (await first.client.hello()).nonce
    if defect:
        await first.client.shutdown(kill=True)
    await first.client.close()
    second = await world.noded()
    hello = await second.client.hello()
    assert hello.nonce == nonce
    assert hello.leftovers == ()
    (after,) = hello.slots
    assert (after.pid, after.init_pid, after.start_ticks, after.token) == (
        before.pid,
        before.init_pid,
        before.start_ticks,
        before.token,
    )
    assert after.state is SlotState.RUNNING
    assert await second.client.extend({"j.1.0": now_ns() + 700 * 10**9}) == frozenset()
    await second.client.stop("j.1.0", 0, "test")
    assert (await second.exit_of("j.1.0")).exit.reason is ExitReason.STOPPED


async def test_case_c13_a_restarted_noded_adopts_what_runs(world: World) -> None:
    await restart_noded(world, defect=False)


@pytest.mark.parametrize("defect", ["stops_its_guardian_when_it_goes"])
async def test_case_c13_catches_a_noded_that_takes_its_tasks_along(world: World, defect: str) -> None:
    with pytest.raises(AssertionError):
        await restart_noded(world, defect=bool(defect))


async def test_exits_while_noded_is_away_are_kept(world: World) -> None:
    first = await world.noded()
    await first.run(["sh", "-c", "sleep 0.2; exit 4"])
    await first.client.close()
    await until(lambda: world.status("j.1.0").get("state") == "EXITED", "it ends while nobody listens")
    second = await world.noded()
    (status,) = (await second.client.hello()).slots
    assert status.exit is not None
    assert (status.exit.reason, status.exit.code) == (ExitReason.EXITED, 4)


async def test_a_second_guardian_is_refused(world: World) -> None:
    noded = await world.noded()
    second = start_by_hand(world)
    assert second.returncode == 3
    assert second.stderr == (
        f"guardian: another guardian (pid {world.guardian_pid}) already serves --data-dir {world.data_dir}\n"
    )
    assert (await noded.client.hello()).pid == world.guardian_pid


async def come_back_after_sigkill(world: World, *, leave_lock: bool) -> None:
    """E9. A killed guardian leaves its socket and lock file behind; neither may make anyone think it lives."""
    first = await world.noded()
    pid = world.guardian_pid
    await first.client.close()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not alive(pid), "killed")
    assert (world.runtime_dir / "guardian.sock").exists()
    if leave_lock:
        (world.data_dir / "guardian.lock").write_text("1\n")
    second = await world.noded()
    assert (await second.client.hello()).pid == world.guardian_pid != pid


async def test_case_e9_a_stale_socket_is_replaced(world: World) -> None:
    await come_back_after_sigkill(world, leave_lock=False)
    await world.clients[-1].shutdown()
    await come_back_after_sigkill(world, leave_lock=True)


@pytest.mark.row("E9", defect="believes_the_socket_file")
async def test_case_e9_catches_a_client_that_only_looks_for_the_file(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts no guardian where the file is, and then finds nobody."""
    real = GuardianClient._spawn

    async def spawn(client: GuardianClient) -> None:
        if not (world.runtime_dir / "guardian.sock").exists():
            await real(client)

    monkeypatch.setattr(GuardianClient, "_spawn", spawn)
    with pytest.raises(GuardianUnavailable, match="Connection refused"):
        await come_back_after_sigkill(world, leave_lock=False)


async def test_a_socket_of_another_guardian_is_left_alone(world: World) -> None:
    noded = await world.noded()
    result = start_by_hand(world, "--data-dir", str(world.base / "other"))
    assert result.returncode == 3
    assert "another --data-dir" in result.stderr
    assert (await noded.client.hello()).pid == world.guardian_pid


def scribe_of(world: World) -> int:
    children = [process.pid for process in procs.all_processes() if process.ppid == world.guardian_pid]
    (scribe,) = [pid for pid in children if "noded.run.scribe" in command_line(pid)]
    return scribe


async def test_the_scribe_dies_and_logs_go_on(world: World) -> None:
    noded = await world.noded()
    await noded.run(["sh", "-c", "while :; do echo tick; sleep 0.02; done"])
    await until(lambda: world.log("j.1.0"), "the first line")
    scribe = scribe_of(world)
    os.kill(scribe, signal.SIGKILL)
    before = len(world.log("j.1.0"))
    await until(lambda: len(world.log("j.1.0")) > before + 100, "a new scribe goes on")
    await until(lambda: world.status("j.1.0")["state"] == "RUNNING", "and knows the states")


async def test_a_hanging_disk_stops_neither_leases_nor_tasks(world: World) -> None:
    """The scribe is stopped, as a dead disk would; a task writes far more than all buffers, and leases still end."""
    noded = await world.noded()
    await noded.run(["sh", "-c", "head -c 30000000 /dev/zero; echo done >&2; sleep 1000"], "w.1.0")
    status = await noded.run_leased(["sleep", "1000"], 1000)
    scribe = scribe_of(world)
    os.kill(scribe, signal.SIGSTOP)
    try:
        assert (await noded.exit_of(status.slot)).exit.reason is ExitReason.LEASE_EXPIRED
        assert not alive(status.pid or 0)
        await noded.run(["sh", "-c", "head -c 30000000 /dev/zero; exit 0"], "x.1.0")
        assert (await noded.exit_of("x.1.0")).exit.code == 0, "a task that writes goes on"
    finally:
        os.kill(scribe, signal.SIGCONT)


async def test_many_escapees_die_at_once(world: World) -> None:
    noded = await world.noded()
    many = ESCAPE.replace(
        "if os.fork() == 0:\n    os.setsid()", "if os.fork() == 0:\n    os.setsid()\n    [os.fork() for _ in range(6)]"
    )
    await noded.run([PYTHON, "-I", "-S", "-c", many])
    await until(lambda: len(procs.take_snapshot().strays(f"{mark_of(world)}/j.1.0", None)) > 60, "they are many")
    await noded.client.stop("j.1.0", 0, "test")
    assert (await noded.exit_of("j.1.0")).exit.empty
    assert procs.take_snapshot().strays(f"{mark_of(world)}/j.1.0", None) == []


async def test_a_copy_of_the_directory_leaves_the_tasks_of_the_original_alone(world: World) -> None:
    """Copied with its tasks, on the same host: what it would take for left behind is another guardian's."""
    noded = await world.noded()
    task = await noded.run(["sleep", "600"])
    assert task.pid is not None
    await until(lambda: world.status("j.1.0").get("pid") == task.pid, "written down")
    copy = world.base / "copy"
    shutil.copytree(world.data_dir, copy)
    result = start_by_hand(world, "--data-dir", str(copy), "--runtime-dir", str(world.base / "r2"))
    assert result.returncode == 3
    assert f"--data-dir {copy} is a copy: the guardian that wrote it (pid {world.guardian_pid}) runs" in result.stderr
    assert alive(task.pid)
    assert (await noded.status("j.1.0")).state is SlotState.RUNNING
