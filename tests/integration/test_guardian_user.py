"""A guardian that an ordinary user runs: a user namespace where the kernel gives one, and what it then cannot do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from noded.run.client import GuardianRefused
from noded.run.protocol import ExitReason, Fencing, Refusal
from tests.integration.guardian_support import ESCAPE, HANG_SECONDS, ROOT, World, alive, ask, new_world, now_ns, until

NOBODY = 65534
INTERPRETER = Path(sys.executable).resolve().relative_to(Path(sys.base_prefix).resolve())
ORDINARY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all"]


def may_make_namespaces() -> bool:
    done = subprocess.run([*ORDINARY, "unshare", "--user", "--pid", "--fork", "true"], capture_output=True, cwd="/")
    return done.returncode == 0


@pytest.fixture(params=["auto", "weak"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Root makes what `nobody` may not see (its interpreter, these sources) visible in a mount namespace of its own."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None or shutil.which("unshare") is None:
        pytest.skip("becoming an ordinary user needs root, setpriv and unshare")
    async with new_world(request.param) as made:
        start_as_nobody(made)
        yield made


def start_as_nobody(world: World) -> None:
    python, source = world.base / "python", world.base / "source"
    for directory in (python, source, world.data_dir, world.runtime_dir):
        directory.mkdir()
    os.chown(world.data_dir, NOBODY, NOBODY)
    os.chown(world.runtime_dir, NOBODY, NOBODY)
    script = 'mount --bind "$1" "$2" && mount --bind "$3" "$4" && shift 4 && exec "$@"'
    command = [
        *("unshare", "--mount", "sh", "-c", script, "sh", sys.base_prefix, str(python), str(ROOT), str(source)),
        *(*ORDINARY, str(python / INTERPRETER), "-P", "-m", "noded.run.guardian", "--detach"),
        *("--fencing", world.fencing, "--data-dir", str(world.data_dir), "--runtime-dir", str(world.runtime_dir)),
    ]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    # A shared libpython is looked for where it was built to be, which `nobody` may not see.
    env["LD_LIBRARY_PATH"] = str(python / "lib")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_SECONDS, cwd="/")
    assert done.returncode == 0, done.stderr


async def test_an_ordinary_user_gets_the_fence_the_kernel_allows(world: World) -> None:
    noded = await world.noded(spawn=False)
    fencing = (await noded.client.hello()).fencing
    expected = Fencing.WEAK if world.fencing == "weak" or not may_make_namespaces() else Fencing.PIDNS
    assert fencing is expected
    await noded.run(["sh", "-c", "id -u; echo $$; exit 3"])
    assert (await noded.exit_of("j.1.0")).exit.code == 3
    await until(lambda: world.log("j.1.0").count("\n") == 2, "its output")
    assert world.log("j.1.0").splitlines()[0] == str(NOBODY)


async def test_the_lease_and_escapees_of_an_ordinary_user(world: World) -> None:
    noded = await world.noded(spawn=False)
    python = world.base / "python"
    libraries = f"LD_LIBRARY_PATH={python / 'lib'}"
    status = await noded.run(["env", libraries, str(python / INTERPRETER), "-I", "-S", "-c", ESCAPE])
    await until(lambda: "escaped" in world.log("j.1.0"), "it forked away")
    assert status.pid is not None
    fresh = await noded.client.extend({"j.1.0": now_ns() + 10**12})
    assert fresh == frozenset()
    await noded.client.stop("j.1.0", 0, "test")
    end = (await noded.exit_of("j.1.0")).exit
    assert (end.reason, end.empty) == (ExitReason.STOPPED, True)
    assert pids_of(NOBODY) & {status.pid} == set()
    assert [pid for pid in pids_of(NOBODY) if "sleep(1000)" in command(pid)] == []
    leased = await noded.run_leased(["sleep", "1000"], 300)
    assert (await noded.exit_of(leased.slot)).exit.reason is ExitReason.LEASE_EXPIRED


async def test_its_death_takes_the_tasks_along(world: World) -> None:
    noded = await world.noded(spawn=False)
    status = await noded.run(["sleep", "1000"])
    os.kill(world.guardian_pid, signal.SIGKILL)
    await until(lambda: not alive(status.pid or 0), "the task dies with its guardian")


async def test_it_cannot_become_someone_else(world: World) -> None:
    noded = await world.noded(spawn=False)
    with pytest.raises(GuardianRefused) as refused:
        await noded.client.prepare(ask(["true"], user="root"))
    assert refused.value.reason is Refusal.USER_UNKNOWN
    assert f"uid {NOBODY}" in refused.value.message
    await noded.run(["true"], user="nobody")
    assert (await noded.exit_of("j.1.0")).exit.code == 0


def pids_of(uid: int) -> set[int]:
    found: set[int] = set()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                found.add(int(name))
        except OSError:
            continue
    return found


def command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode()
    except OSError:
        return ""
