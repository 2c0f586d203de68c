"""Directories of checkpoints: made for a task's user, and emptied again. Blocking: runs in a worker thread.

The agent may be root and the directory anyone's: what is made on a shared file system is made with the task's own
rights, and only files that look like shards are ever deleted, without following a link.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import re
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from virialpb.shardfile import sync_directory

MKDIR_SECONDS: Final = 20
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_SHARD_FILE: Final = re.compile(r"rank-[0-9]{5}\.(shard|json)|\.rank-[0-9]{5}\.(shard|json)\.tmp")


class DirectoryProblem(Exception):
    """A directory could not be made. `full`: for want of room."""

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message)
        self.full = full


@dataclass(frozen=True, slots=True)
class Owner:
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def find_owner(user: str, group: str) -> Owner | None:
    """The ids of a task's user; None when it names none, or is who we are. Raises DirectoryProblem."""
    if not user:
        return None
    try:
        entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
        gid = entry.pw_gid
        if group:
            gid = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise DirectoryProblem(f"user {user!r} or group {group!r} is not known on this node") from None
    if entry.pw_uid == os.geteuid():
        return None
    return Owner(entry.pw_uid, gid, tuple(os.getgrouplist(entry.pw_name, gid)))


def make_local(root: Path, directory: Path, owner: Owner | None) -> None:
    """`directory`, below `root`, for its owner alone; the ones between can be passed through and not listed.

    Raises DirectoryProblem.
    """
    try:
        for parent in reversed([directory.parent, *directory.parent.parents]):
            if parent == root or root in parent.parents:
                _make(parent, 0o711)
        _make(directory, 0o700)
        if owner is not None:
            os.chown(directory, owner.uid, owner.gid, follow_symlinks=False)
    except OSError as error:
        raise _problem(error, directory) from None


def make_shared(directory: Path, owner: Owner | None) -> None:
    """`directory` and its missing parents, with the rights of the task's user and no other. Raises DirectoryProblem."""
    if owner is None or os.geteuid() != 0:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _problem(error, directory) from None
        return
    try:
        done = subprocess.run(
            ["mkdir", "-p", "-m", "0700", "--", str(directory)],
            user=owner.uid,
            group=owner.gid,
            extra_groups=owner.groups,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=MKDIR_SECONDS,
            check=False,
            env={"PATH": os.defpath, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DirectoryProblem(f"cannot make {directory}: {error}") from None
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()[:500]
        full = os.strerror(errno.ENOSPC) in said or os.strerror(errno.EDQUOT) in said
        raise DirectoryProblem(said or f"cannot make {directory}", full=full)


def drop(directory: Path, checkpoint: str) -> int:
    """Delete the shards of one checkpoint, then its directory if nothing else is in it. Returns how many files went.

    One that is not there is dropped already. Raises OSError, and ValueError for a directory that is not the
    checkpoint's own.
    """
    if directory.name != checkpoint:
        raise ValueError(f"{directory} is not the directory of checkpoint {checkpoint}")
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    gone = 0
    try:
        for name in os.listdir(fd):
            if _SHARD_FILE.fullmatch(name) and stat.S_ISREG(os.lstat(name, dir_fd=fd).st_mode):
                os.unlink(name, dir_fd=fd)
                gone += 1
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):  # not empty: something that is not ours to delete
        directory.rmdir()
    return gone


def _make(directory: Path, mode: int) -> None:
    try:
        directory.mkdir(mode=mode)
    except FileExistsError:
        if not directory.is_dir() or directory.is_symlink():
            raise
        return
    directory.chmod(mode)  # whatever the umask took away
    sync_directory(directory.parent)


def _problem(error: OSError, directory: Path) -> DirectoryProblem:
    return DirectoryProblem(f"cannot make {error.filename or directory}: {error.strerror}", full=error.errno in _FULL)
