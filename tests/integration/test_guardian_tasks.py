"""What a task is given and how it is heard: users, environment, port, limits, VIRIAL_SOCK."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from noded.run import runner
from noded.run.cgroup import PIDS_MAX
from noded.run.client import GuardianRefused
from noded.run.protocol import LINE_BYTES_MAX, ExitReason, Refusal
from tests.integration.guardian_support import PYTHON, TaskChannel, World, ask, groups_of, new_world, until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with new_world() as made:
        yield made


# -- who and where


@needs_root
async def test_root_tasks_need_a_user(world: World) -> None:
    noded = await world.noded(allow_root_tasks=False)
    with pytest.raises(GuardianRefused) as refused:
        await noded.client.prepare(ask(["id"]))
    assert refused.value.reason is Refusal.USER_REQUIRED
    nobody = pwd.getpwnam("nobody")
    await noded.run(
        ["sh", "-c", "id -u; id -g; id -G; echo $USER $HOME; test -w $VIRIAL_SOCK && echo sock"], user="nobody"
    )
    await noded.exit_of("j.1.0")
    await until(lambda: "sock" in world.log("j.1.0"), "the task may use its own socket")
    uid, gid, groups, names, _ = world.log("j.1.0").splitlines()
    assert (int(uid), int(gid), groups.split()) == (nobody.pw_uid, nobody.pw_gid, [str(nobody.pw_gid)])
    assert names == f"nobody {nobody.pw_dir}"


@needs_root
@pytest.mark.parametrize(
    ("options", "reason", "text"),
    [
        ({"user": "root"}, Refusal.USER_REQUIRED, "--allow-root-tasks"),
        ({"user": "0"}, Refusal.USER_REQUIRED, "--allow-root-tasks"),
        ({"user": "nobody", "group": "root"}, Refusal.USER_UNKNOWN, "nobody is not in group root"),
        ({"user": "12345", "group": "0"}, Refusal.USER_UNKNOWN, "12345 is not in group 0"),
    ],
)
async def test_nobody_becomes_more_than_they_are(
    world: World, options: dict[str, str], reason: Refusal, text: str
) -> None:
    noded = await world.noded(allow_root_tasks=False)
    with pytest.raises(GuardianRefused) as refused:
        await noded.client.prepare(ask(["id"], **options))
    assert refused.value.reason is reason
    assert text in refused.value.message
    await noded.run(["sh", "-c", "id -u; id -G"], user="12345")
    await noded.exit_of("j.1.0")
    await until(lambda: world.log("j.1.0") == "12345\n12345\n", "a number without a name is a user too")


@needs_root
async def test_what_the_user_may_not_reach_is_refused_early(world: World) -> None:
    """Seen with the task's rights, not root's."""
    private = world.base / "private"
    private.mkdir(mode=0o700)
    script = world.base / "script"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o700)
    noded = await world.noded()
    for reason, options in ((Refusal.CWD_MISSING, {"cwd": str(private)}), (Refusal.COMMAND_NOT_FOUND, {})):
        with pytest.raises(GuardianRefused) as refused:
            await noded.client.prepare(ask([str(script)], user="nobody", **options))
        assert refused.value.reason is reason


@needs_root
async def test_another_user_cannot_use_the_socket(world: World) -> None:
    noded = await world.noded()
    await noded.run(["sleep", "1000"], user="nobody")
    (path,) = (world.runtime_dir / "t").iterdir()
    stat = path.stat()
    assert (stat.st_mode & 0o777, stat.st_uid) == (0o600, pwd.getpwnam("nobody").pw_uid)
    assert (world.runtime_dir / "guardian.sock").stat().st_mode & 0o777 == 0o600


# -- environment


def environment_of(world: World, slot: str = "j.1.0") -> dict[str, str]:
    return json.loads(world.log(slot))


PRINT_ENV = [PYTHON, "-I", "-S", "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES")


async def test_case_h10_no_request_no_device_variable(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DEVICE_VARIABLES:
        monkeypatch.setenv(name, "0,1,2,3")
    noded = await world.noded()
    await noded.run(PRINT_ENV)
    await noded.exit_of("j.1.0")
    await until(lambda: world.log("j.1.0").endswith("\n"), "its output")
    seen = environment_of(world)
    assert not set(DEVICE_VARIABLES) & set(seen)
    assert not set(seen) - {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_CTYPE", "VIRIAL_SOCK", "VIRIAL_GUARD")
    }, "nothing else leaks in"


WHO = {"home": "/home/ann", "name": "ann", "shell": "/bin/sh"}


@pytest.mark.parametrize("defect", ["inherits_the_environment_of_the_agent"])
def test_case_h10_catches_inheritance(monkeypatch: pytest.MonkeyPatch, defect: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    right = runner.task_environment(WHO, "/run/t.sock", {}, {})
    wrong = {**os.environ, **right} if defect else right
    assert not set(DEVICE_VARIABLES) & set(right)
    assert set(DEVICE_VARIABLES) & set(wrong)


async def test_case_h14_a_value_of_the_user_is_never_overwritten(world: World) -> None:
    noded = await world.noded()
    request = ask(PRINT_ENV, env={"MASTER_ADDR": "mine", "RANK": "", "PATH": os.environ["PATH"], "HOME": "/elsewhere"})
    await noded.client.prepare(request)
    await noded.client.start("j.1.0", request.token, {"MASTER_ADDR": "theirs", "RANK": "3", "WORLD_SIZE": "8"})
    await noded.exit_of("j.1.0")
    await until(lambda: world.log("j.1.0").endswith("\n"), "its output")
    seen = environment_of(world)
    assert {name: seen[name] for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE", "HOME")} == {
        "MASTER_ADDR": "mine",
        "RANK": "",
        "WORLD_SIZE": "8",
        "HOME": "/elsewhere",
    }


@pytest.mark.parametrize("defect", ["injected_values_win", "an_empty_value_counts_as_unset"])
def test_case_h14_catches_overwriting(defect: str) -> None:
    injected, user = {"RANK": "3", "MASTER_ADDR": "theirs"}, {"RANK": "", "MASTER_ADDR": "mine"}
    right = runner.task_environment(WHO, "/run/t.sock", injected, user)
    if defect == "injected_values_win":
        wrong = {**right, **injected}
    else:
        wrong = {name: right[name] or injected.get(name, "") for name in right}
    assert {name: right[name] for name in user} == user
    assert {name: wrong[name] for name in user} != user


# -- port


async def hold_through(world: World, *, defect: bool) -> None:
    """G6: from the answer of prepare until the task listens, nobody else can get the port. The defect: the port is
    probed and let go, as rendezvous code does."""
    noded = await world.noded()
    server = (
        "import os, socket; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1);"
        "s.bind(('127.0.0.1', int(os.environ['MASTER_PORT']))); s.listen(); print('listening', flush=True); s.accept()"
    )
    request = ask([PYTHON, "-I", "-S", "-c", server], hold_port=not defect, bind_address="127.0.0.1")
    port = await noded.client.prepare(request)
    if defect:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
    assert port > 0
    with socket.socket() as thief:
        try:
            thief.bind(("127.0.0.1", port))
            stolen = True
        except OSError:
            stolen = False
    assert not stolen, "somebody else got the port"
    taken: list[socket.socket] = []
    try:
        for _ in range(500):
            other = socket.socket()
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            taken.append(other)
        assert port not in {other.getsockname()[1] for other in taken}, "the kernel gave it away"
    finally:
        for other in taken:
            other.close()
    await noded.client.start("j.1.0", request.token, {"MASTER_PORT": str(port)})
    await until(lambda: "listening" in world.log("j.1.0"), "the task listens on the held port")
    socket.create_connection(("127.0.0.1", port)).close()
    assert (await noded.exit_of("j.1.0")).exit.code == 0
    await noded.client.release("j.1.0")


async def test_case_g6_the_port_is_held_until_handed_over(world: World) -> None:
    await hold_through(world, defect=False)


@pytest.mark.parametrize("defect", ["probes_a_free_port_and_lets_go"])
async def test_case_g6_catches_a_port_that_was_only_probed(world: World, defect: str) -> None:
    with pytest.raises(AssertionError, match=r"got the port|gave it away"):
        await hold_through(world, defect=bool(defect))


async def test_two_slots_hold_two_ports_and_release_gives_them_back(world: World) -> None:
    noded = await world.noded()
    ports = [
        await noded.client.prepare(ask(["true"], slot, hold_port=True, bind_address="127.0.0.1"))
        for slot in ("a.1.0", "b.1.0")
    ]
    assert len(set(ports)) == 2
    await noded.client.release("a.1.0")
    with socket.socket() as again:
        again.bind(("127.0.0.1", ports[0]))


# -- limits


async def test_out_of_memory_is_told_apart(world: World) -> None:
    noded = await world.noded()
    await noded.run([PYTHON, "-I", "-S", "-c", "x = bytearray(512 << 20); print(len(x))"], memory_bytes=64 << 20)
    end = (await noded.exit_of("j.1.0")).exit
    if end.reason is ExitReason.EXITED:
        pytest.skip("no writable memory controller on this host")
    assert (end.reason, end.signal) == (ExitReason.OOM, 9)


FORKS = """
import os, sys, time
for _ in range(200):
    try:
        if os.fork() == 0:
            time.sleep(600)
    except BlockingIOError as error:
        sys.exit(f"fork: {error.strerror}")
"""


async def test_a_fork_bomb_meets_a_limit_and_is_told(world: World) -> None:
    noded = await world.noded()
    await noded.client.prepare(ask([PYTHON, "-I", "-S", "-c", FORKS]))
    limits = [path for path in groups_of(world, "j.1.0/pids.max") if path.read_text().strip() != "max"]
    if not limits:
        pytest.skip("no writable pids controller on this host")
    assert 0 < int(limits[0].read_text()) <= PIDS_MAX
    limits[0].write_text("20")
    await noded.client.start("j.1.0", ask([]).token, {})
    end = (await noded.exit_of("j.1.0")).exit
    assert end.code == 1
    assert "fork: " in end.stderr_tail
    assert "was at its limit of" in end.stderr_tail
    await until(lambda: "was at its limit of" in world.log("j.1.0", "stderr"), "the log says it too")


# -- calls


async def test_calls_are_answered_forwarded_and_pushed(world: World) -> None:
    noded = await world.noded()
    status = await noded.run(["sleep", "1000"], rank=2)
    channel = TaskChannel(world)
    channel.send({"id": 1, "call": "hello"})
    hello = await channel.receive()
    assert hello["result"] == {"rank": 2, "token": {"job": "j", "generation": 1, "epoch": [0, 10]}}
    channel.send({"id": 2, "call": "progress", "args": {"step": 12, "metrics": {"loss": 0.5}}})
    assert await channel.receive() == {"id": 2, "ok": True, "result": {}}
    await until(noded.progress, "progress heard")
    (heard,) = noded.progress()
    assert (heard.slot, heard.token, heard.progress.step, heard.progress.metrics) == (
        "j.1.0",
        status.token,
        12,
        {"loss": 0.5},
    )
    channel.send({"id": 3, "call": "checkpoint_begin", "args": {"step": 12}})
    channel.send({"id": 4, "call": "checkpoint_wait", "args": {"checkpoint_id": "c"}})
    await until(lambda: len(noded.calls()) == 2, "both calls heard")
    begin, wait = noded.calls()
    assert (begin.call, begin.args) == ("checkpoint_begin", {"step": 12})
    await noded.client.reply_error("j.1.0", wait.call_id, "NOT_FOUND", "no such checkpoint")
    await noded.client.reply("j.1.0", begin.call_id, {"checkpoint_id": "c9"})
    await noded.client.reply("j.1.0", begin.call_id, {"checkpoint_id": "late"})
    assert await channel.receive() == {"id": 4, "ok": False, "error": "NOT_FOUND", "message": "no such checkpoint"}
    assert await channel.receive() == {"id": 3, "ok": True, "result": {"checkpoint_id": "c9"}}
    await noded.client.push("j.1.0", {"push": "save_now", "step": 13, "reason": "drain"})
    assert await channel.receive() == {"push": "save_now", "step": 13, "reason": "drain"}
    assert (await noded.status("j.1.0")).progress == heard.progress
    await until(lambda: '"step": 12' in json.dumps(world.status("j.1.0")), "and written, a second later")
    channel.close()


async def test_calls_wait_for_the_next_noded(world: World) -> None:
    first = await world.noded()
    await first.run(["sleep", "1000"])
    channel, gone = TaskChannel(world), TaskChannel(world)
    for each, number in ((channel, 1), (gone, 2)):
        each.send({"id": number, "call": "checkpoint_begin", "args": {"step": number}})
    await until(lambda: len(first.calls()) == 2, "heard once")
    gone.close()
    await first.client.close()
    second = await world.noded()
    await until(second.calls, "told again")
    (call,) = second.calls()
    assert call.args == {"step": 1}
    await second.client.reply("j.1.0", call.call_id, {"checkpoint_id": "c"})
    assert (await channel.receive())["result"] == {"checkpoint_id": "c"}
    channel.close()


async def test_a_newer_noded_replaces_the_older(world: World) -> None:
    older = await world.noded(spawn=True)
    await older.run(["sleep", "1000"])
    newer = await world.noded()
    channel = TaskChannel(world)
    channel.send({"id": 1, "call": "save", "args": {}})
    await until(newer.calls, "the newer hears")
    channel.close()
    await older.client.close()


@pytest.mark.parametrize("junk", [b"not json\n", b"[1,2]\n", b'{"call": "hello"}\n', b"x" * LINE_BYTES_MAX])
async def test_junk_costs_only_its_own_connection(world: World, junk: bytes) -> None:
    noded = await world.noded()
    await noded.run(["sleep", "1000"])
    good, bad = TaskChannel(world), TaskChannel(world)
    bad.sock.sendall(junk)
    assert await bad.receive() == {}
    good.send({"id": 1, "call": "hello"})
    assert (await good.receive())["ok"] is True
    with socket.socket(socket.AF_UNIX) as control:
        control.settimeout(30)
        control.connect(str(world.runtime_dir / "guardian.sock"))
        control.sendall(junk)
        assert control.recv(1) == b""
    assert (await noded.client.hello()).pid == world.guardian_pid
    good.close()
    bad.close()


async def test_bad_arguments_are_answered(world: World) -> None:
    noded = await world.noded()
    await noded.run(["sleep", "1000"])
    channel = TaskChannel(world)
    for args in ({}, {"step": -1}, {"step": 1, "metrics": {"a": "b"}}):
        channel.send({"id": 1, "call": "progress", "args": args})
        reply = await channel.receive()
        assert (reply["ok"], reply["error"]) == (False, "BAD_MESSAGE")
    channel.close()


async def test_a_task_that_does_not_read_is_not_read_from(world: World) -> None:
    """Its answers pile up in bounded memory, and nobody else waits."""
    noded = await world.noded()
    await noded.run(["sleep", "1000"])
    deaf, good = TaskChannel(world), TaskChannel(world)
    deaf.sock.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 64 << 20:
            sent += deaf.sock.send(b'{"id":1,"call":"hello"}\n' * 1000)
            good.send({"id": 1, "call": "hello"})
            assert (await good.receive())["ok"] is True
    assert sent < 16 << 20
    deaf.close()
    good.close()


async def test_connections_and_waiting_calls_are_bounded(world: World) -> None:
    noded = await world.noded()
    await noded.run(["sleep", "1000"])
    channels = [TaskChannel(world) for _ in range(runner.TASK_CONNECTIONS_MAX)]
    for channel in channels:
        channel.send({"id": 1, "call": "hello"})
        assert (await channel.receive())["ok"] is True
    one_more = TaskChannel(world)
    assert await one_more.receive() == {}
    for number in range(101):
        channels[0].send({"id": number, "call": "checkpoint_begin", "args": {"step": number}})
    reply = await channels[0].receive()
    assert (reply["id"], reply["error"]) == (100, "OVERLOADED")
    for channel in (*channels, one_more):
        channel.close()


async def test_logs_are_rotated(world: World) -> None:
    noded = await world.noded()
    await noded.run(["sh", "-c", "seq 1 5000"], log_bytes_max=8192, log_files_max=3)
    await noded.exit_of("j.1.0")
    folder = world.data_dir / "tasks" / "j.1.0"
    await until(lambda: world.log("j.1.0").endswith("\n5000\n"), "the newest lines are in stdout.log")
    files = [folder / "stdout.log.2", folder / "stdout.log.1", folder / "stdout.log"]
    assert sorted(path.name for path in folder.glob("stdout*")) == sorted(path.name for path in files)
    lines = "".join(path.read_text() for path in files).splitlines()
    assert lines == [str(number) for number in range(5001 - len(lines), 5001)]
    assert all(path.stat().st_size <= 8192 for path in files)


def test_a_runtime_dir_that_is_too_long_is_one_message(tmp_path: Path) -> None:
    import subprocess
    import sys

    deep = tmp_path / ("x" * 100)
    done = subprocess.run(
        [sys.executable, "-m", "noded.run.guardian", "--data-dir", str(tmp_path / "d"), "--runtime-dir", str(deep)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 3
    assert done.stderr.startswith(f"guardian: --runtime-dir {deep} is too long")
    assert done.stderr.count("\n") == 1
