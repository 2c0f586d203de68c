"""What is on disk when a save is cut short, at every single system call. Rows G7 and G12."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, cast

import pytest

from tests.unit.task_support import in_child
from virialpb import shardfile
from virialpb.shardfile import STRIPE_BYTES, ShardCorrupt, ShardIdentity, ShardWriter, verify_shard

WHO: Final = ShardIdentity(checkpoint_id="c1", step=20, rank=0, world_size=1)
DATA: Final = bytes(range(256)) * (STRIPE_BYTES // 256 * 2 + 3)
Event = tuple[str, str]
Save = Callable[[Path, Callable[[], None]], None]


class Disk:
    """Stands where the shard file's module sees `os`: notes each call that changes the disk, or dies at one of them."""

    def __init__(self, die_at: int = -1) -> None:
        self.trace: list[Event] = []
        self._die_at = die_at
        self._names: dict[int, str] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def open(self, path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            self._note("create", os.path.basename(path))
        fd = os.open(path, flags, mode)
        self._names[fd] = "." if flags & os.O_DIRECTORY else os.path.basename(path)
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        half = len(data) // 2
        self._note("write", self._names[fd], lambda: os.write(fd, data[:half]))
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        self._note("fsync", self._names[fd])
        os.fsync(fd)

    def rename(self, source: str, target: str) -> None:
        self._note("rename", f"{os.path.basename(source)} {os.path.basename(target)}")
        os.rename(source, target)

    def _note(self, what: str, name: str, last_words: Callable[[], object] = lambda: None) -> None:
        if len(self.trace) == self._die_at:
            last_words()
            os.kill(os.getpid(), signal.SIGKILL)
        self.trace.append((what, name))


def save_properly(directory: Path, tell: Callable[[], None]) -> None:
    writer = ShardWriter(directory, WHO)
    writer.write(DATA)
    writer.finish()
    tell()


def disk_in_use() -> Disk:
    return cast("Disk", shardfile.os)


def skip(argument: object) -> None:
    del argument


def recorded(save: Save, directory: Path) -> list[Event]:
    """The changes to the disk that a save makes, in order, with ("told", "") where PREPARED is sent."""
    disk = Disk()
    directory.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardfile, "os", disk)
        save(directory, lambda: disk.trace.append(("told", "")))
    return disk.trace


def commit_comes_last(trace: list[Event]) -> bool:
    """Whether a loss of power after any event leaves nothing that claims to be more than it is.

    A file's content is safe from its fsync on, names are safe from the directory's fsync on. The manifest may get its
    name only when the shard has its own and is safe; PREPARED may be told only when all of it is safe.
    """
    safe: set[str] = set()
    named: dict[str, str] = {}
    names_safe = True
    for what, name in trace:
        if what in ("create", "write"):
            safe.discard(name)
        elif what == "fsync" and name != ".":
            safe.add(name)
        elif what == "fsync":
            names_safe = True
        elif what == "rename":
            source, target = name.split()
            named[target] = source
            names_safe = False
            if target == "rank-00000.json" and named.get("rank-00000.shard") not in safe:
                return False
        elif what == "told" and not (len(named) == 2 and names_safe and safe.issuperset(named.values())):
            return False
    return trace[-1] == ("told", "")


@pytest.mark.row("G7")
def test_case_g7_the_manifest_comes_after_the_shard_is_durable_and_prepared_after_both(tmp_path: Path) -> None:
    trace = recorded(save_properly, tmp_path / "run")
    assert commit_comes_last(trace)
    assert [event for event in trace if event[0] != "write"] == [
        ("create", ".rank-00000.shard.tmp"),
        ("fsync", ".rank-00000.shard.tmp"),
        ("rename", ".rank-00000.shard.tmp rank-00000.shard"),
        ("create", ".rank-00000.json.tmp"),
        ("fsync", ".rank-00000.json.tmp"),
        ("rename", ".rank-00000.json.tmp rank-00000.json"),
        ("fsync", "."),
        ("told", ""),
    ]


@pytest.mark.row("G7")
def test_case_g7_catches_each_seeded_defect(tmp_path: Path) -> None:
    class ForgetsFsync(ShardWriter):
        def _publish(self, fd: int, temporary: str, final: str) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(shardfile.os, "fsync", skip, raising=False)
                super()._publish(fd, temporary, final)

    def forgets_fsync(directory: Path, tell: Callable[[], None]) -> None:
        writer = ForgetsFsync(directory, WHO)
        writer.write(DATA)
        writer.finish()
        tell()

    def forgets_the_directory(directory: Path, tell: Callable[[], None]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shardfile, "sync_directory", skip)
            save_properly(directory, tell)

    def tells_early(directory: Path, tell: Callable[[], None]) -> None:
        save_properly(directory, lambda: None)
        trace = disk_in_use().trace
        tell()
        trace.insert(-2, trace.pop())

    def manifest_first(directory: Path, tell: Callable[[], None]) -> None:
        save_properly(directory, tell)
        trace = disk_in_use().trace
        shard = trace.index(("rename", ".rank-00000.shard.tmp rank-00000.shard"))
        trace.insert(trace.index(("rename", ".rank-00000.json.tmp rank-00000.json")), trace.pop(shard))

    for defect in (forgets_fsync, forgets_the_directory, tells_early, manifest_first):
        assert not commit_comes_last(recorded(defect, tmp_path / defect.__name__)), defect.__name__


def killed_everywhere(save: Save, folder: Path) -> Iterator[tuple[Path, bool]]:
    """Save in a child that SIGKILLs itself at its n-th change of the disk (in the middle of a write), for all n.

    Gives the directory that is left and whether PREPARED had been told.
    """
    folder.mkdir()
    for die_at in range(1000):
        directory = folder / str(die_at)
        directory.mkdir()
        told = folder / f"{die_at}.told"

        def child(die_at: int = die_at, directory: Path = directory, told: Path = told) -> None:
            shardfile.os = Disk(die_at)  # pyright: ignore - in this child only
            save(directory, told.touch)

        status = in_child(child)
        assert status in (0, -signal.SIGKILL)
        yield directory, told.exists()
        if status == 0:
            return
    pytest.fail("the save never came to its end")


def eligible(directory: Path) -> bool:
    """As the agent decides it: the manifest is there and every byte verifies."""
    try:
        verify_shard(directory, 0)
    except ShardCorrupt:
        return False
    return True


def whole_or_never_eligible(save: Save, is_eligible: Callable[[Path], bool], folder: Path) -> bool:
    """Whether what a killed save leaves is either whole or not eligible, and what was told is eligible."""
    kills = 0
    for directory, told in killed_everywhere(save, folder):
        kills += 1
        chosen = is_eligible(directory)
        whole = (directory / "rank-00000.shard").exists() and (directory / "rank-00000.shard").read_bytes() == DATA
        if (chosen and not whole) or (told and not chosen):
            return False
    assert kills > 8
    return True


@pytest.mark.row("G12")
def test_case_g12_a_save_killed_at_any_system_call_leaves_nothing_eligible_but_the_whole(tmp_path: Path) -> None:
    assert whole_or_never_eligible(save_properly, eligible, tmp_path / "run")


@pytest.mark.row("G12")
def test_case_g12_catches_each_seeded_defect(tmp_path: Path) -> None:
    def writes_in_place(directory: Path, tell: Callable[[], None]) -> None:
        disk = Disk(disk_in_use()._die_at)
        fd = disk.open(directory / "rank-00000.shard", os.O_WRONLY | os.O_CREAT)
        for start in range(0, len(DATA), STRIPE_BYTES):
            disk.write(fd, memoryview(DATA)[start : start + STRIPE_BYTES])
        tell()

    def trusts_names(directory: Path) -> bool:
        return (directory / "rank-00000.shard").exists()

    def tells_before_it_is_written(directory: Path, tell: Callable[[], None]) -> None:
        tell()
        save_properly(directory, lambda: None)

    defects: dict[str, tuple[Save, Callable[[Path], bool]]] = {
        "writes in place, trusts names": (writes_in_place, trusts_names),
        "tells before it is written": (tells_before_it_is_written, eligible),
    }
    for name, defect in defects.items():
        save, choose = defect
        assert not whole_or_never_eligible(save, choose, tmp_path / name), name
