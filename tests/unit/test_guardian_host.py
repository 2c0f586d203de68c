"""What the guardian reads from /proc and /sys/fs/cgroup, on made-up trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from noded.run import procs
from noded.run.cgroup import PIDS_MAX, Cgroup, Places, find_places, pids_max, sweep


def made(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group_files(path: Path, *names: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        (path / name).write_text("")


V2_SELF = "0::/virial.scope\n"
V1_SELF = "6:pids:/d\n5:freezer:/a\n4:memory:/b\n1:cpu,cpuacct:/c\n1:name=systemd:/\n"
HYBRID_SELF = "6:freezer:/\n4:memory:/api\n1:cpu:/\n0::/\n"


def test_v2_with_delegated_controllers(tmp_path: Path) -> None:
    made(tmp_path, {"cgroup.controllers": "cpu memory", "virial.scope/cgroup.subtree_control": "cpu memory\n"})
    places = find_places(tmp_path, V2_SELF, "virial-x")
    base = tmp_path / "virial.scope" / "virial-x"
    assert places == Places(unified=base, unified_limits=True, unified_pids=True)
    # On a real one each write adds.
    assert (base / "cgroup.subtree_control").read_text() == "+pids"
    group = Cgroup(places, "j.1.0")
    group.create(1500, 1 << 30, 4096)
    slot = base / "j.1.0"
    assert group.procs == [str(slot / "cgroup.procs")]
    assert (slot / "memory.max").read_text() == str(1 << 30)
    assert (slot / "memory.oom.group").read_text() == "1"
    assert (slot / "cpu.max").read_text() == "150000 100000"
    assert (slot / "pids.max").read_text() == "4096"


def test_v2_alone_in_a_scope_makes_room_for_controllers(tmp_path: Path) -> None:
    files = {
        "cgroup.controllers": "",
        "virial.scope/cgroup.type": "domain\n",
        "virial.scope/cgroup.subtree_control": "",
    }
    made(tmp_path, {**files, "virial.scope/cgroup.procs": f"{os.getpid()}\n"})
    find_places(tmp_path, V2_SELF, "virial-x")
    assert (tmp_path / "virial.scope/virial-guardian/cgroup.procs").read_text() == str(os.getpid())


def test_v2_delegated_moves_all_that_is_in_it(tmp_path: Path) -> None:
    files = {
        "cgroup.controllers": "",
        "virial.scope/cgroup.type": "domain\n",
        "virial.scope/cgroup.subtree_control": "",
    }
    made(tmp_path, {**files, "virial.scope/cgroup.procs": "4190001\n4190002\n"})
    try:
        os.setxattr(tmp_path / "virial.scope", "user.delegate", b"1")
    except OSError:
        pytest.skip("this file system has no extended attributes")
    find_places(tmp_path, V2_SELF, "virial-x")
    # On a real one each write moves one process; here the last one stays to be read.
    assert (tmp_path / "virial.scope/virial-guardian/cgroup.procs").read_text() == "4190002"


def test_v2_shared_with_others_is_left_as_it_is(tmp_path: Path) -> None:
    files = {
        "cgroup.controllers": "",
        "virial.scope/cgroup.type": "domain\n",
        "virial.scope/cgroup.subtree_control": "",
    }
    made(tmp_path, {**files, "virial.scope/cgroup.procs": f"{os.getpid()}\n1\n"})
    find_places(tmp_path, V2_SELF, "virial-x")
    assert not (tmp_path / "virial.scope/virial-guardian").exists()


def test_v1_kills_by_freezer_and_limits_by_its_controllers(tmp_path: Path) -> None:
    for name in ("freezer/a", "memory/b", "cpu/c", "pids/d"):
        (tmp_path / name).mkdir(parents=True)
    places = find_places(tmp_path, V1_SELF, "virial-x")
    assert places == Places(
        freezer=tmp_path / "freezer/a/virial-x",
        memory=tmp_path / "memory/b/virial-x",
        cpu=tmp_path / "cpu/c/virial-x",
        pids=tmp_path / "pids/d/virial-x",
    )
    group = Cgroup(places, "j.1.0")
    group.create(500, 4096, 77)
    assert (tmp_path / "pids/d/virial-x/j.1.0/pids.max").read_text() == "77"
    assert str(tmp_path / "pids/d/virial-x/j.1.0/cgroup.procs") in group.procs
    made(tmp_path, {"pids/d/virial-x/j.1.0/pids.events": "max 3\n"})
    assert group.forks_refused() == 3
    assert (tmp_path / "memory/b/virial-x/j.1.0/memory.limit_in_bytes").read_text() == "4096"
    assert (tmp_path / "cpu/c/virial-x/j.1.0/cpu.cfs_quota_us").read_text() == "50000"


def test_hybrid_kills_in_v2_and_limits_in_v1(tmp_path: Path) -> None:
    made(tmp_path, {"unified/cgroup.controllers": "", "unified/cgroup.procs": "1\n"})
    for name in ("freezer", "memory/api", "cpu"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "unified/cgroup.subtree_control").mkdir()  # as a file that cannot be written
    places = find_places(tmp_path, HYBRID_SELF, "virial-x")
    assert places == Places(
        unified=tmp_path / "unified/virial-x", memory=tmp_path / "memory/api/virial-x", cpu=tmp_path / "cpu/virial-x"
    )
    assert not (tmp_path / "freezer/virial-x").exists()


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert find_places(tmp_path, "", "virial-x") == Places()
    group = Cgroup(Places(), "j.1.0")
    group.create(1000, 1 << 20)
    group.kill()
    assert (group.procs, group.empty(), group.oom_kills(), group.remove()) == ([], True, 0, True)


@pytest.mark.parametrize(("events", "empty"), [("populated 0\nfrozen 0\n", True), ("populated 1\nfrozen 0\n", False)])
def test_empty_is_what_the_kernel_says(tmp_path: Path, events: str, empty: bool) -> None:
    group = Cgroup(Places(unified=tmp_path), "j.1.0")
    group_files(tmp_path / "j.1.0", "cgroup.kill")
    (tmp_path / "j.1.0/cgroup.events").write_text(events)
    assert group.empty() is empty
    group.kill()
    assert (tmp_path / "j.1.0/cgroup.kill").read_text() == "1"


def test_v1_looks_below_for_groups_the_task_made(tmp_path: Path) -> None:
    group = Cgroup(Places(freezer=tmp_path), "j.1.0")
    made(tmp_path / "j.1.0", {"cgroup.procs": "11\n12\n", "own/cgroup.procs": "13\n"})
    assert sorted(group.pids()) == [11, 12, 13]
    assert not group.empty()


def test_oom_kills_of_either_version(tmp_path: Path) -> None:
    made(tmp_path, {"two/j/memory.events": "low 0\noom 3\noom_kill 2\n", "one/j/memory.oom_control": "oom_kill 4\n"})
    assert Cgroup(Places(unified=tmp_path / "two"), "j").oom_kills() == 2
    assert Cgroup(Places(unified=tmp_path / "none", memory=tmp_path / "one"), "j").oom_kills() == 4


def test_sweep_takes_only_what_is_empty(tmp_path: Path) -> None:
    (tmp_path / "gone.1.0" / "below").mkdir(parents=True)
    made(tmp_path, {"busy.1.0/cgroup.procs": "1\n"})
    sweep(Places(unified=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["busy.1.0"]


def stat_line(pid: int, name: str, state: str, ppid: int, ticks: int) -> str:
    return f"{pid} ({name}) {state} {ppid} " + " ".join(["0"] * 17) + f" {ticks} 0 0\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    rows = [(1, "init", "S", 0), (10, "launcher", "S", 1), (11, "a) S (b", "S", 10), (12, "leaf", "R", 11)]
    rows += [(20, "stray", "S", 1), (21, "other", "S", 1), (30, "dead", "Z", 10)]
    for pid, name, state, ppid in rows:
        made(tmp_path, {f"{pid}/stat": stat_line(pid, name, state, ppid, pid * 100), f"{pid}/environ": "A=b\0"})
    (tmp_path / "20/environ").write_text("A=b\0VIRIAL_GUARD=m/j.1.0\0Z=1\0")
    (tmp_path / "21/environ").write_text("VIRIAL_GUARD=m/j.1.01\0")
    made(tmp_path, {"self/stat": "x", "uptime": "1 1"})
    return tmp_path


def test_processes_are_read_whatever_their_name(proc: Path) -> None:
    assert procs.read_process(11, proc) == procs.Process(11, 10, 1100, zombie=False)
    assert procs.read_process(30, proc) == procs.Process(30, 10, 3000, zombie=True)
    assert procs.read_process(99, proc) is None


def test_strays_are_descendants_and_those_with_the_mark(proc: Path) -> None:
    snapshot = procs.take_snapshot(7, proc)
    assert snapshot.strays("m/j.1.0", 10) == [11, 12, 20]
    assert snapshot.strays("m/j.1.0", None) == [20]
    assert snapshot.strays("m/other", None) == []


def test_a_snapshot_is_shared_only_while_it_proves_something() -> None:
    finder = procs.Finder()
    first = finder.look(0, 1000)
    assert finder.look(1000, 1000 + procs.FRESH_NS) is first
    assert finder.look(0, 1001 + procs.FRESH_NS) is not first, "too old"
    second = finder.look(0, 5 * procs.FRESH_NS)
    assert finder.look(5 * procs.FRESH_NS + 1, 5 * procs.FRESH_NS + 1) is not second, "taken before what it is to prove"


def test_a_pidfd_is_only_of_the_process_that_was_meant() -> None:
    own = procs.read_process(os.getpid())
    assert own is not None
    fd = procs.open_pidfd(own.pid, own.start_ticks, (own.ppid,))
    assert fd is not None
    assert not procs.has_exited(fd)
    os.close(fd)
    assert procs.open_pidfd(own.pid, own.start_ticks + 1) is None
    assert procs.open_pidfd(own.pid, parents=(own.pid,)) is None
    assert procs.open_pidfd(2**22 + 5) is None


@pytest.mark.parametrize(("kernel", "most"), [("4194304\n", PIDS_MAX), ("32768\n", 8192), ("", PIDS_MAX)])
def test_a_slot_never_gets_all_the_numbers_the_kernel_has(kernel: str, most: int) -> None:
    assert pids_max(kernel) == most


def test_a_process_is_known_again_and_another_with_its_number_is_not() -> None:
    own = procs.identity()
    namespace, pid, ticks = own.split()
    assert procs.may_live(own)
    assert not procs.may_live(f"{namespace} {pid} {int(ticks) + 1}")
    assert procs.may_live(f"{int(namespace) + 1} {pid} {int(ticks) + 1}"), "of another namespace nobody can tell"
    assert procs.may_live("")
