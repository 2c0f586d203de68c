"""A slot's life under a real guardian: prepare, start, extend, stop, exit, release."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from noded.run.client import GuardianRefused
from noded.run.guardian import deserted
from noded.run.protocol import ExitReason, Refusal, Token
from tests.integration.guardian_support import (
    PYTHON,
    World,
    alive,
    ask,
    command_line,
    groups_of,
    new_world,
    now_ns,
    start_by_hand,
    until,
)


@pytest.fixture
def ignored_signals() -> Iterator[None]:
    """What nohup, or a shell without job control, leaves ignored in whatever it starts."""
    numbers = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(params=["auto", "weak"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with new_world(request.param) as made:
        yield made


async def test_a_task_runs_and_its_exit_is_kept_until_released(world: World) -> None:
    noded = await world.noded()
    await noded.run(["sh", "-c", "echo out; echo err >&2; exit 7"])
    end = (await noded.exit_of("j.1.0")).exit
    assert (end.reason, end.code, end.signal, end.empty) == (ExitReason.EXITED, 7, None, True)
    assert end.stderr_tail == "err\n"
    assert (await noded.status("j.1.0")).exit == end
    await until(lambda: world.status("j.1.0").get("state") == "EXITED", "status.json written")
    await noded.client.release("j.1.0")
    assert await noded.client.list_slots() == ()
    await until(lambda: world.status("j.1.0")["state"] == "RELEASED", "released in status.json")
    assert (world.log("j.1.0"), world.log("j.1.0", "stderr")) == ("out\n", "err\n")
    assert list((world.runtime_dir / "t").iterdir()) == []


async def test_pids_are_those_of_the_host(world: World) -> None:
    noded = await world.noded()
    status = await noded.run(["sleep", "1000"])
    assert status.pid is not None
    assert status.init_pid is not None
    assert command_line(status.pid) == "sleep\x001000\x00"
    assert (status.pid == status.init_pid) == (world.fencing == "weak")
    assert await noded.client.start("j.1.0", status.token) == await noded.client.start("j.1.0", status.token)
    assert (await noded.status("j.1.0")).pid == status.pid, "a repeated start starts nothing"


async def test_the_pid_of_the_shortest_life_is_known(world: World) -> None:
    noded = await world.noded()
    for number in range(20):
        status = await noded.run(["true"], f"s{number}.1.0")
        assert status.pid
        assert status.start_ticks
        assert (await noded.exit_of(f"s{number}.1.0")).exit.code == 0


async def test_no_descriptor_of_its_starter_stays_open(world: World) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    done = start_by_hand(world, "--fencing", world.fencing, pass_fds=[writer], umask=0)
    assert (done.returncode, done.stderr) == (0, "")
    os.close(writer)
    assert os.read(reader, 1) == b"", "the guardian does not hold it"
    os.close(reader)
    noded = await world.noded(spawn=False)
    assert (await noded.client.hello()).pid == world.guardian_pid
    modes = {path.name: path.stat().st_mode & 0o777 for path in (*world.base.iterdir(), *world.data_dir.iterdir())}
    assert (modes["data"], modes["run"]) == (0o700, 0o711)
    assert modes["guardian.lock"] == 0o600


async def test_stop_lets_the_task_end_by_itself(world: World) -> None:
    noded = await world.noded()
    await noded.run(["sh", "-c", "trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done"])
    await until(lambda: world.log("j.1.0") == "ready\n", "the trap is set")
    await noded.client.stop("j.1.0", 60_000, "test")
    end = (await noded.exit_of("j.1.0")).exit
    assert (end.reason, end.code) == (ExitReason.STOPPED, 5)


async def test_stop_kills_what_ignores_it(world: World) -> None:
    noded = await world.noded()
    await noded.run(["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.01; done"])
    await until(lambda: world.log("j.1.0") == "ready\n", "the trap is set")
    await noded.client.stop("j.1.0", 100, "test")
    await noded.client.stop("j.1.0", 100, "test")
    end = (await noded.exit_of("j.1.0")).exit
    assert (end.reason, end.signal, end.empty) == (ExitReason.STOPPED, signal.SIGKILL, True)


async def test_background_children_end_with_the_task(world: World) -> None:
    noded = await world.noded()
    await noded.run(
        ["sh", "-c", "sleep 1000 & sh -c 'read a b </proc/self/stat; echo $a; exec sleep 1000' & sleep 0.2"]
    )
    await noded.exit_of("j.1.0")
    await until(lambda: world.log("j.1.0"), "the child said who it is")
    assert not alive(int(world.log("j.1.0").split()[0])) or world.fencing == "auto"


async def test_the_lease_ends_the_task(world: World) -> None:
    noded = await world.noded()
    status = await noded.run_leased(["sleep", "1000"], 300)
    end = (await noded.exit_of(status.slot)).exit
    assert (end.reason, end.empty) == (ExitReason.LEASE_EXPIRED, True)
    assert status.pid is not None
    assert not alive(status.pid)
    assert end.at_ns >= status.deadline_ns
    assert await noded.client.extend({status.slot: now_ns() + 10**12}) == {status.slot}


async def test_an_extended_lease_goes_on(world: World) -> None:
    noded = await world.noded()
    first = now_ns() + 2_000_000_000
    request = ask(["sleep", "1000"], deadline_ns=first)
    await noded.client.prepare(request)
    assert await noded.client.extend({"j.1.0": first + 10**12, "no.1.0": first}) == {"no.1.0"}
    started = await noded.client.start("j.1.0", request.token)
    await until(lambda: now_ns() > first + 300_000_000, "the first deadline is over")
    assert alive(started.pid)


async def test_prepared_is_reserved_and_given_back(world: World) -> None:
    noded = await world.noded()
    first = ask(["sleep", "1000"], device_keys=("gpu0",))
    await noded.client.prepare(first)
    with pytest.raises(GuardianRefused) as busy:
        await noded.client.prepare(ask(["sleep", "1"], "k.1.0", device_keys=("gpu1", "gpu0")))
    assert busy.value.reason is Refusal.DEVICE_BUSY
    assert "gpu0 held by j.1.0" in busy.value.message
    await noded.client.release("j.1.0")
    assert await noded.client.prepare(ask(["sleep", "1"], "k.1.0", device_keys=("gpu0",))) == 0
    with pytest.raises(GuardianRefused) as gone:
        await noded.client.start("j.1.0", first.token)
    assert gone.value.reason is Refusal.NOT_FOUND


@pytest.mark.parametrize(
    ("options", "reason", "text"),
    [
        ({"command": "no-such-command-xyz"}, Refusal.COMMAND_NOT_FOUND, "no-such-command-xyz"),
        ({"command": "/etc/passwd"}, Refusal.COMMAND_NOT_FOUND, "/etc/passwd"),
        ({"cwd": "/no/such/place"}, Refusal.CWD_MISSING, "/no/such/place"),
        ({"user": "no-such-user-xyz"}, Refusal.USER_UNKNOWN, "no-such-user-xyz"),
        ({"group": "no-such-group-xyz"}, Refusal.USER_UNKNOWN, "no-such-group-xyz"),
        ({"hold_port": True, "bind_address": "192.0.2.7"}, Refusal.PREPARE_FAILED, "j.1.0"),
    ],
)
async def test_prepare_says_what_is_missing(world: World, options: dict[str, Any], reason: Refusal, text: str) -> None:
    noded = await world.noded()
    argv = [options.get("command", "sleep"), "1000"]
    with pytest.raises(GuardianRefused) as refused:
        await noded.client.prepare(ask(argv, **{key: value for key, value in options.items() if key != "command"}))
    assert refused.value.reason is reason
    assert text in refused.value.message
    assert await noded.client.list_slots() == ()


async def test_a_command_that_cannot_be_run_is_a_failed_start(world: World) -> None:
    noded = await world.noded()
    script = world.base / "broken"
    script.write_bytes(b"\x7fELF not really")
    script.chmod(0o755)
    await noded.client.prepare(ask([str(script)]))
    with pytest.raises(GuardianRefused) as refused:
        await noded.client.start("j.1.0", Token("j", 1, (0, 10)))
    assert refused.value.reason is Refusal.START_FAILED
    end = (await noded.exit_of("j.1.0")).exit
    assert (end.reason, end.empty) == (ExitReason.START_FAILED, True)
    assert "Exec format error" in end.stderr_tail


async def test_release_is_refused_while_it_runs(world: World) -> None:
    noded = await world.noded()
    await noded.run(["sleep", "1000"])
    with pytest.raises(GuardianRefused) as refused:
        await noded.client.release("j.1.0")
    assert refused.value.reason is Refusal.NOT_EMPTY
    with pytest.raises(GuardianRefused) as live:
        await noded.client.shutdown()
    assert live.value.reason is Refusal.NOT_EMPTY
    await noded.client.shutdown(kill=True)
    await until(lambda: not alive(world.guardian_pid), "the guardian ends")


async def test_the_task_starts_from_a_clean_process(ignored_signals: None, world: World) -> None:
    """No descriptor but 0, 1, 2; ordinary umask, signals and OOM score, whatever the guardian's are."""
    noded = await world.noded()
    look = (
        "import os, signal;"
        "print(sorted(os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')), oct(os.umask(0)),"
        " open('/proc/self/oom_score_adj').read().strip(), os.readlink('/proc/self/fd/0'),"
        " os.getsid(0) == os.getpid());"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'));"
        # Python itself ignores SIGPIPE and SIGXFSZ; 32 and 33 are glibc's own.
        "print(int(status['SigBlk'], 16), int(status['SigIgn'], 16) & ~(1 << 12 | 1 << 24 | 3 << 31))"
    )
    await noded.run([PYTHON, "-I", "-S", "-c", look])
    await noded.exit_of("j.1.0")
    await until(lambda: world.log("j.1.0").count("\n") == 2, "both lines")
    # The fourth descriptor is the directory being listed.
    assert world.log("j.1.0").splitlines() == ["['0', '1', '2'] 4 0o22 0 /dev/null True", "0 0"]


async def test_sigterm_to_the_guardian_stops_tasks_with_their_grace(world: World) -> None:
    noded = await world.noded(spawn=True)
    await noded.run(["sh", "-c", "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.01; done"])
    await until(lambda: world.log("j.1.0") == "ready\n", "the trap is set")
    pid = world.guardian_pid
    await noded.client.close()
    os.kill(pid, signal.SIGTERM)
    await until(lambda: not alive(pid), "the guardian ends")
    assert world.log("j.1.0") == "ready\nsaved\n"
    assert world.status("j.1.0")["exit"]["reason"] == "STOPPED"


async def test_a_guardian_whose_data_directory_was_deleted_ends_with_its_tasks(world: World) -> None:
    noded = await world.noded()
    status = await noded.run(["sleep", "1000"])
    guardian = world.guardian_pid
    await noded.client.close()  # noded would start another

    def deleted() -> bool:
        shutil.rmtree(world.data_dir, ignore_errors=True)  # again where a file was written meanwhile
        return not world.data_dir.exists()

    await until(deleted, "the data directory is deleted")
    await until(lambda: not alive(guardian), "the guardian has ended")
    assert status.pid is not None
    assert not alive(status.pid)
    assert not world.data_dir.exists()
    world.data_dir.mkdir()


async def test_a_tidied_lock_file_ends_no_task(world: World) -> None:
    noded = await world.noded()
    status = await noded.run(["sleep", "1000"])
    (world.data_dir / "guardian.lock").unlink()
    for _ in range(3):  # each answer is a turn of its loop
        assert [slot.slot for slot in await noded.client.list_slots()] == ["j.1.0"]
    assert status.pid is not None
    assert alive(status.pid)


def test_a_guardian_knows_when_its_data_directory_was_deleted(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    lock = data_dir / "guardian.lock"
    lock.touch()
    fds = os.open(data_dir, os.O_PATH), os.open(lock, os.O_RDONLY)
    assert (deserted(*fds, idle=False), deserted(*fds, idle=True)) == (False, False)
    lock.unlink()
    assert (deserted(*fds, idle=False), deserted(*fds, idle=True)) == (False, True)
    data_dir.rmdir()
    data_dir.mkdir()
    assert (deserted(*fds, idle=False), deserted(*fds, idle=True)) == (True, True)
    for fd in fds:
        os.close(fd)


async def test_groups_of_a_killed_guardian_are_removed_by_another_ones_start(world: World) -> None:
    noded = await world.noded()
    await noded.run(["sleep", "1000"])
    killed = world.guardian_pid
    groups = groups_of(world)
    if not groups:
        pytest.skip("no writable cgroups on this host")
    async with new_world(world.fencing) as other:
        await other.noded()
        assert all(group.exists() for group in groups), "of one that lives"
    await noded.client.close()
    os.kill(killed, signal.SIGKILL)
    await until(lambda: not alive(killed), "the guardian is killed")
    async with new_world(world.fencing) as third:
        await third.noded()
        assert not [group for group in groups if group.exists()]
