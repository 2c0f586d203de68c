"""A lock is written to: where its name is a link that someone else put there, the file behind it must stay as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from controld.store.sqlite_file import DirectoryLock
from noded.files import DataDirProblem, NodeFiles
from noded.run.guardian import CannotServe, take_lock


def of_controld(directory: Path) -> None:
    DirectoryLock(directory).acquire()


def of_noded(directory: Path) -> None:
    NodeFiles(directory).open(lambda: "uid-1")


@pytest.mark.parametrize(
    ("name", "take"),
    [
        ("lock", of_controld),
        ("noded.lock", of_noded),
        ("guardian.lock", take_lock),
    ],
)
def test_a_lock_that_is_a_link_changes_nothing(name: str, take: Callable[[Path], object], tmp_path: Path) -> None:
    victim, directory = tmp_path / "passwd", tmp_path / "data"
    victim.write_text("root:x:0:0\n")
    directory.mkdir()
    (directory / name).symlink_to(victim)
    with pytest.raises((OSError, DataDirProblem, CannotServe)):
        take(directory)
    assert victim.read_text() == "root:x:0:0\n"
