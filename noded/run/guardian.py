"""The guardian: owns a node's tasks and their deadlines, and outlives noded.

`python -m noded.run.guardian --data-dir D --runtime-dir R`. One a data directory (flock). Standard library only, one
thread, no file written by itself. Exit status: 0 after a shutdown, 2 for a usage error, 3 when it cannot serve here.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import resource
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from noded.run import control, leftovers, procs
from noded.run.cgroup import Cgroup, Places, claim, find_places, pids_max, remove_places, sweep, sweep_others
from noded.run.protocol import Fencing
from noded.run.runner import LAUNCHER, Site, spawn_python
from noded.run.scribe import Scribe
from noded.run.service import Service, boottime_ns
from noded.run.slots import SlotTable

if TYPE_CHECKING:
    from types import FrameType

UNIX_PATH_BYTES_MAX: Final = 107
LOCK_SECONDS: Final = 2.0
"""A predecessor that was just killed may still be writing its last lines."""
SOURCE_ROOT: Final = Path(__file__).resolve().parents[2]
_PR_SET_CHILD_SUBREAPER: Final = 36


class CannotServe(Exception):
    """One message for whoever started the guardian."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="noded.run.guardian", description="Owns a node's tasks and their deadlines.")
    parser.add_argument("--data-dir", type=Path, required=True, help="logs and states of tasks; one guardian each")
    parser.add_argument("--runtime-dir", type=Path, required=True, help="guardian.sock and the tasks' sockets")
    parser.add_argument("--allow-root-tasks", action="store_true", help="run tasks as root, and in any group")
    parser.add_argument(
        "--fencing",
        choices=("auto", "pidns", "weak"),
        default="auto",
        help="auto: the strongest this host allows; pidns: refuse to serve with less; weak: sessions only",
    )
    parser.add_argument("--cgroup-root", type=Path, default=Path("/sys/fs/cgroup"))
    parser.add_argument("--detach", action="store_true", help="return once it serves; it goes on in its own session")
    return parser.parse_args(argv)


# -- surroundings ------------------------------------------------------------------------------------------------


def close_inherited() -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX") if sys.platform != "linux" else 1 << 20)
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def protect() -> None:
    """The last process the kernel's OOM killer should take; where that is not allowed, an ordinary one."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-999")
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def make_dirs(data_dir: Path, runtime_dir: Path) -> None:
    try:
        (data_dir / "tasks").mkdir(parents=True, exist_ok=True)
        for directory in (runtime_dir, runtime_dir / "t"):
            new = not directory.exists()
            directory.mkdir(parents=True, exist_ok=True)
            if new:
                # Tasks of other users pass through to their own socket; they cannot list.
                directory.chmod(0o711)
    except OSError as error:
        raise CannotServe(f"cannot make {error.filename}: {error.strerror}") from None


def take_lock(data_dir: Path) -> int:
    """Held as long as anything of this guardian, its scribe too, may write into the directory."""
    path = data_dir / "guardian.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise CannotServe(f"cannot open {path}: {error.strerror}") from None
    give_up = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise CannotServe(f"cannot lock {path}: {error.strerror}") from None
            if time.monotonic() > give_up:
                owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                raise CannotServe(
                    f"another guardian (pid {owner or 'unknown'}) already serves --data-dir {data_dir}"
                ) from None
            time.sleep(0.05)
            continue
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return fd


def listen(runtime_dir: Path) -> socket.socket:
    """A socket file that a killed guardian left is replaced; one that answers is not (E9)."""
    path = runtime_dir / "guardian.sock"
    longest = max(len(os.fsencode(path)), len(os.fsencode(runtime_dir / "t" / ("x" * 16 + ".sock"))))
    if longest > UNIX_PATH_BYTES_MAX:
        raise CannotServe(
            f"--runtime-dir {runtime_dir} is too long: its sockets would have {longest} bytes,"
            f" unix sockets allow {UNIX_PATH_BYTES_MAX}"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CannotServe(f"{path} is there, but: {error.strerror or error}") from None
        else:
            raise CannotServe(f"another guardian, of another --data-dir, answers on {path}")
    try:
        listener.bind(str(path))
    except OSError as error:
        raise CannotServe(f"cannot listen on {path}: {error.strerror}") from None
    path.chmod(0o600)
    listener.listen(16)
    listener.setblocking(False)
    for stale in (runtime_dir / "t").glob("*.sock"):
        stale.unlink(missing_ok=True)
    return listener


def probe(mode: str, places: Places) -> bool:
    """Whether a task could be started that way here."""
    group = Cgroup(places, f"probe-{os.getpid()}")
    try:
        group.create(0, 0)
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-E", str(LAUNCHER), "--probe", mode, *group.procs],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        group.remove()
    return done.returncode == 0


def raise_open_files() -> int:
    """Each slot costs about ten descriptors. Returns the soft limit there was, for the tasks: some cannot take more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def choose_site(args: argparse.Namespace, mark: str) -> Site:
    """The strongest fence that works here. Raises CannotServe when --fencing pidns was asked for and does not."""

    def site(fencing: Fencing, places: Places) -> Site:
        return Site(fencing, places, args.runtime_dir / "t", mark, args.allow_root_tasks, open_files, most)

    most = pids_max(Path("/proc/sys/kernel/pid_max").read_text())
    open_files = raise_open_files()
    none = Places()
    if args.fencing == "weak":
        return site(Fencing.WEAK, none)
    own = Path("/proc/self/cgroup").read_text()
    places = find_places(args.cgroup_root, own, f"virial-{mark}")
    if places.can_kill and probe("pidns", places):
        return site(Fencing.PIDNS_CGROUP, places)
    if probe("pidns", none):
        return site(Fencing.PIDNS, none)
    if args.fencing == "pidns":
        raise CannotServe("--fencing pidns: this host does not let us make PID namespaces")
    return site(Fencing.WEAK, places if places.can_kill and probe("weak", places) else none)


def spawn_scribe(data_dir: Path, lock_fd: int) -> tuple[int, int]:
    reader, writer = os.pipe()
    try:
        pid = spawn_python(
            ["-S", "-P", "-m", "noded.run.scribe", str(data_dir)],
            {"PYTHONPATH": str(SOURCE_ROOT)},
            {0: reader, 3: lock_fd},
        )
    finally:
        os.close(reader)
    return pid, writer


def refuse_copy(args: argparse.Namespace, earlier: list[leftovers.Leftover]) -> None:
    """Of a data directory that was copied the tasks are another guardian's, and would be killed as left behind."""
    owner = next((pid for leftover in earlier if (pid := leftover.owner()) is not None), None)
    if owner is not None:
        (args.runtime_dir / "guardian.sock").unlink(missing_ok=True)
        raise CannotServe(
            f"--data-dir {args.data_dir} is a copy: the guardian that wrote it (pid {owner}) runs, with tasks of its"
            " own; give this one a directory of its own, or end that one first"
        )


# -- life --------------------------------------------------------------------------------------------------------


def serve(args: argparse.Namespace, ready: int | None) -> None:
    make_dirs(args.data_dir, args.runtime_dir)
    lock_fd = take_lock(args.data_dir)
    directory_fd = os.open(args.data_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    protect()
    listener = listen(args.runtime_dir)
    mark = hashlib.sha256(os.fsencode(args.data_dir)).hexdigest()[:16]
    site = choose_site(args, mark)
    boot_id = procs.boot_id()
    earlier, complaints = leftovers.read_leftovers(args.data_dir, site, boot_id)
    refuse_copy(args, earlier)
    if ready is not None:
        leave_terminal(args.data_dir)
    scribe = Scribe(boottime_ns, lambda: spawn_scribe(args.data_dir, lock_fd))
    gone = leftovers.clear(earlier)
    sweep(site.places)
    claim(site.places, procs.identity())
    sweep_others(site.places, procs.may_live)
    table = SlotTable(root_needs_user=os.geteuid() == 0 and not args.allow_root_tasks)
    service = Service(
        site=site,
        table=table,
        scribe=scribe,
        listener=listener,
        nonce=secrets.token_hex(16),
        boot_id=boot_id,
        leftovers=[leftover for leftover in earlier if not gone[leftover.status.slot]],
        on_request=control.handle_request,
        deserted=lambda: deserted(directory_fd, lock_fd, idle=not table.live()),
    )
    for leftover in earlier:
        slot_gone = gone[leftover.status.slot]
        service.act(table.adopt_leftover(leftover.status, empty=slot_gone, now_ns=boottime_ns()))
        service.note("slot.leftover", slot=leftover.status.slot, gone=slot_gone)
    for complaint in complaints:
        service.note("status.unreadable", why=complaint)

    def on_stop(signum: int, frame: FrameType | None) -> None:
        service.stop_asked = True

    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_stop)
    service.note("guardian.started", pid=os.getpid(), fencing=site.fencing, nonce=service.nonce, places=site.places)
    if ready is not None:
        os.write(ready, b"ready")
        os.close(ready)
    service.run()
    service.note("guardian.stopped", live=len(table.live()))
    (args.runtime_dir / "guardian.sock").unlink(missing_ok=True)
    remove_places(site.places)
    drain(scribe)


def deserted(directory_fd: int, lock_fd: int, *, idle: bool) -> bool:
    """Whether the data directory was deleted: its last name is gone. Never a path, which a dead disk would not answer.

    A lock file alone may fall to whatever tidies up old files: no reason to end training, but to serve nothing new.
    """
    return os.fstat(directory_fd).st_nlink == 0 or (idle and os.fstat(lock_fd).st_nlink == 0)


def drain(scribe: Scribe) -> None:
    """The last lines, if the disk takes them within five seconds."""
    give_up = time.monotonic() + 5
    while not scribe.idle and scribe.alive and time.monotonic() < give_up:
        select.select([], [scribe.fd], [], 0.1)
        scribe.flush()
    scribe.close()
    while time.monotonic() < give_up:
        try:
            if os.waitpid(scribe.pid, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            return
        time.sleep(0.005)


def detach() -> int:
    """Returns in the child, with a pipe to say "ready" on. The parent waits for that and exits."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        os.setsid()
        return writer
    os.close(writer)
    # Until "ready", or until the child has written its one message to stderr and died.
    os._exit(0 if os.read(reader, 16) == b"ready" else 3)


def leave_terminal(data_dir: Path) -> None:
    """From here on only a crash of the guardian itself writes to stderr, and whoever started us waits for its end."""
    fd = os.open(data_dir / "guardian.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    os.close(null)


def main(argv: list[str]) -> int:
    args = parse(argv)
    args.data_dir, args.runtime_dir = args.data_dir.resolve(), args.runtime_dir.absolute()
    os.umask(0o077)
    close_inherited()
    os.chdir("/")
    ready = detach() if args.detach else None
    try:
        serve(args, ready)
    except CannotServe as error:
        sys.stderr.write(f"guardian: {error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
