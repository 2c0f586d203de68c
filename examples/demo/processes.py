"""What the kernel says of processes: when they started, when they ended. Times are CLOCK_BOOTTIME in seconds."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path


def boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def start_time_s(pid: int) -> float | None:
    """`starttime` of /proc/PID/stat; None when the process is gone. Its grain is one clock tick, rounded down."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The name may hold blanks and brackets; what follows the last bracket is regular, and starttime is field 22.
    return int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, as the kernel lists children now."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                children = [int(c) for c in (thread / "children").read_text(encoding="ascii").split()]
                found += children
                waiting += children
    return found


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class ExitTimes:
    """Notes the moment at which each watched process's pidfd becomes readable, from a thread of its own."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._pids: dict[int, int] = {}
        self._times_s: dict[int, float] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="exit-times", daemon=True)
        self._thread.start()

    def watch(self, pid: int) -> bool:
        """Begin to watch; False when the process is gone already."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        with self._lock:
            self._pids[fd] = pid
            self._poll.register(fd, select.POLLIN)
        return True

    def time_s(self, pid: int) -> float | None:
        """When `pid` ended; None while it lives."""
        with self._lock:
            return self._times_s.get(pid)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(5)
        with self._lock:
            for fd in self._pids:
                os.close(fd)

    def _run(self) -> None:
        while not self._stop.is_set():
            # Short waits, so that what is registered meanwhile is looked at within a moment.
            for fd, _ in self._poll.poll(10):
                now_s = boottime_s()
                with self._lock:
                    if fd in self._pids:
                        self._times_s.setdefault(self._pids.pop(fd), now_s)
                        self._poll.unregister(fd)
                        os.close(fd)
