"""Real control groups of this host: what is in one is killed whole, whichever version does it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from noded.run.cgroup import Cgroup, Places, find_places, remove_places
from tests.integration.guardian_support import HANG_SECONDS

ROOT = Path("/sys/fs/cgroup")
# Joins, then forks into new sessions for as long as it can.
BOMB = """
import os, sys, time
for path in sys.argv[1:]:
    open(path, "w").write("0")
for _ in range(5):
    os.fork()
    os.setsid() if os.getpid() != os.getpgid(0) else None
print("up", flush=True)
time.sleep(1000)
"""


@pytest.fixture(params=["unified", "freezer"])
def places(request: pytest.FixtureRequest) -> Places:
    found = find_places(ROOT, Path("/proc/self/cgroup").read_text(), f"virial-test-{os.getpid()}")
    if request.param == "freezer":
        remove_places(found)
        own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
        group = ROOT / "freezer" / own.get("freezer", "").lstrip("/") / f"virial-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            pytest.skip("this host has no writable v1 freezer")
        found = Places(freezer=group)
    if not found.can_kill:
        pytest.skip("this host has no writable control groups")
    return found


def wait_until_empty(group: Cgroup) -> None:
    give_up = time.monotonic() + HANG_SECONDS
    while not group.empty():
        assert time.monotonic() < give_up, "never empty"
        group.kill()
        time.sleep(0.01)


def test_a_group_is_killed_whole_seen_empty_and_removed(places: Places) -> None:
    group = Cgroup(places, "j.1.0")
    group.create(0, 0)
    assert group.empty()
    task = subprocess.Popen([sys.executable, "-I", "-S", "-c", BOMB, *group.procs], stdout=subprocess.PIPE)
    try:
        assert task.stdout is not None
        for _ in range(32):
            assert task.stdout.readline() == b"up\n"
        assert len(group.pids()) == 32
        assert not group.empty()
        assert not group.remove()
        group.kill()
        wait_until_empty(group)
        assert task.wait(HANG_SECONDS) == -9
        assert task.stdout.read() == b"", "nobody holds the pipe"
        assert group.remove()
    finally:
        group.kill()
        task.wait(HANG_SECONDS)
        if task.stdout is not None:
            task.stdout.close()
        group.remove()
        remove_places(places)
