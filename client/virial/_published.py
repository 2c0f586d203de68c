"""Where `virial up` leaves its address for other programs of the same user, and how they find it.

One line a running cluster: its address and the process that runs it. The newest is found; when it ends, the one before
it is found again. What a killed process left behind is passed over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path
from typing import Final

FILE_NAME: Final = "virial-address"
# Nobody runs so many clusters: more is not a file of ours.
_FILE_BYTES_MAX: Final = 65_536


def address_file() -> Path:
    """In XDG_RUNTIME_DIR where that is ours: `su` and `sudo` keep the one of another user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and _ours(Path(runtime)):
        return Path(runtime) / FILE_NAME
    return Path(f"/tmp/virial-{os.getuid()}") / FILE_NAME  # noqa: S108 - its owner is checked


def default_address() -> str | None:
    """The address of this user's newest local cluster that still runs; None where there is none."""
    path = address_file()
    if not _ours(path.parent):
        return None
    try:
        with _locked(path, os.O_RDONLY, fcntl.LOCK_SH) as fd:
            running = _running(fd)
    except OSError:
        return None
    return running[-1][0] if running else None


def publish_address(address: str) -> str | None:
    """Let others find `address` while this process runs. Returns what they found before, if anything.

    Raises OSError where the file cannot be written or its directory belongs to somebody else.
    """
    path = address_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _ours(path.parent):
        raise PermissionError(0, "belongs to another user", str(path.parent))
    with _locked(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX) as fd:
        running = _running(fd)
        _write(fd, [*running, (address, os.getpid())])
    return running[-1][0] if running else None


def withdraw_address(address: str) -> None:
    """Undo `publish_address`; the others' stay. Nothing when it is not there."""
    with contextlib.suppress(OSError), _locked(address_file(), os.O_RDWR, fcntl.LOCK_EX) as fd:
        _write(fd, [line for line in _running(fd) if line != (address, os.getpid())])


def _ours(directory: Path) -> bool:
    """Whether only this user (and root) says what is in it: /tmp is anyone's, so a name there proves nothing."""
    try:
        return directory.is_dir() and not directory.is_symlink() and directory.stat().st_uid == os.getuid()
    except OSError:
        return False


@contextlib.contextmanager
def _locked(path: Path, flags: int, how: int) -> Generator[int]:
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, how)
        yield fd
    finally:
        os.close(fd)


def _running(fd: int) -> list[tuple[str, int]]:
    """(address, pid) of each cluster whose process lives, oldest first. Lines of another form are passed over."""
    found: list[tuple[str, int]] = []
    for line in os.pread(fd, _FILE_BYTES_MAX, 0).decode("ascii", errors="replace").splitlines():
        address, _, pid = line.partition(" ")
        if address and pid.isdecimal() and Path(f"/proc/{pid}").exists():
            found.append((address, int(pid)))
    return found


def _write(fd: int, lines: list[tuple[str, int]]) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, "".join(f"{address} {pid}\n" for address, pid in lines).encode("ascii"), 0)
