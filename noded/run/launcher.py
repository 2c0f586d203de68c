"""Starts one task and stands over it: `python -I -S -E launcher.py`, once for each slot.

It is spawned when the slot is prepared, so that the interpreter is already warm when GO comes. It has one thread:
after unshare(NEWPID) no thread can be made, and a process with threads may not make a user namespace.

    guardian -> launcher -> init (pid 1 of the task's namespace) -> task
    each with PDEATHSIG on the one before, so that a killed guardian takes every task with it.

Spoken over fd 0, a socket, one JSON object a line:
    in   {"op":"check", argv, cwd, path, user, group, allow_root, mode, guardian_pid, cgroup_procs, socket_dir,
          open_files}
         {"op":"go", env}   {"deadline_ns": n}   {"op":"kill"}
    out  {"checked": {uid, gid, home, shell, name}}    {"refused": reason, "message": str}
         {"init": pid}   {"started": {pid, init_pid, start_ticks}}
         {"failed": message}   {"exit": wait status}
fds 1 and 2 are the task's. Standard library only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from os.path import dirname

# -I leaves the sources out; appended, so that nothing here can shadow the standard library.
sys.path.append(dirname(dirname(dirname(os.path.abspath(__file__)))))

from noded.run.birth import (
    PR_SET_CHILD_SUBREAPER,
    Refused,
    call,
    check,
    children_of,
    die_with_parent,
    enter_namespaces,
    look_up_user,
    probe,
    run_init,
    run_task,
    start_ticks,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LEASE_CHECK_MS = 100


class Launcher:
    def __init__(self) -> None:
        self.inbox = b""
        self.report_rest = b""
        self.deadline_ns: int | None = None
        self.spec: dict[str, Any] = {}
        self.init = 0
        self.task = 0
        self.report = self.go = -1
        self.ticks = 0
        self.status: int | None = None
        self.weak = False
        self.killing = False

    def say(self, **message: object) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(0, data) :]

    def read_lines(self) -> list[dict[str, Any]]:
        data = os.read(0, 1 << 16)
        if not data:
            # The guardian's end is gone, and with it everything that may renew this slot.
            self.kill_all()
            os._exit(1)
        *lines, self.inbox = (self.inbox + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def check(self, spec: dict[str, Any]) -> dict[str, Any]:
        self.weak = spec["mode"] == "weak"
        # A weak launcher must outlive the guardian for the moment it takes to kill what has left the session.
        die_with_parent(signal.SIGTERM if self.weak else signal.SIGKILL)
        if os.getppid() != spec["guardian_pid"]:
            os._exit(1)
        if self.weak:
            call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        who = look_up_user(spec["user"], spec["group"], spec["allow_root"])
        check(spec, who)
        self.spec = spec
        return who

    def launch(self, env: dict[str, str], who: dict[str, Any]) -> None:
        self.spec["env"] = env
        self.spec["pid_seed"] = os.getpid()
        cgroups = [os.open(path, os.O_WRONLY) for path in self.spec["cgroup_procs"]]
        self.report, report = os.pipe()
        if self.weak:
            self.launch_weak(who, report, cgroups)
            return
        go_read, self.go = os.pipe()
        enter_namespaces()
        # The kernel clears it with some changes of credentials, and a new user namespace is one.
        die_with_parent(signal.SIGKILL)
        self.init = os.fork()
        if self.init == 0:
            os.close(self.go)
            run_init(self.spec, who, go_read, report, cgroups)
        os.close(report)
        self.say(init=self.init)
        # Only now may the task come to be: the guardian has its init's pid, whatever happens to this process.
        os.write(self.go, b"g")

    def launch_weak(self, who: dict[str, Any], report: int, cgroups: list[int]) -> None:
        errors_read, errors_write = os.pipe()
        self.init = self.task = os.fork()
        if self.task == 0:
            run_task(self.spec, who, errors_write, cgroups)
        self.ticks = start_ticks(self.task)
        os.close(errors_write)
        os.close(report)
        failure = os.read(errors_read, 4096).decode("utf-8", "replace")
        self.started(failure)

    def started(self, failure: str) -> None:
        if failure:
            self.say(failed=failure)
        else:
            self.say(started={"pid": self.task, "init_pid": self.init, "start_ticks": self.ticks})

    def read_report(self) -> None:
        data = os.read(self.report, 1 << 16)
        if not data:
            os.close(self.report)
            self.report = -1
            return
        *lines, self.report_rest = (self.report_rest + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "forked":
                # Not reaped before it is told to: the pid is certainly the task's.
                self.task = children_of(self.init)[0]
                self.ticks = start_ticks(self.task)
                os.write(self.go, b"k")
            elif word == "exit":
                self.status = int(rest)
            else:
                self.started(bytes.fromhex(rest).decode("utf-8", "replace"))

    def kill_all(self) -> None:
        self.killing = True
        if not self.init:
            return
        if not self.weak:
            os.kill(self.init, signal.SIGKILL)
            return
        # Descendants of a subreaper come to it as their parents die: kill and reap until there are none.
        while True:
            for pid in children_of(os.getpid()):
                os.kill(pid, signal.SIGKILL)
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            if pid == self.task:
                self.status = status

    def reap(self) -> bool:
        """True once the slot is over: its init is reaped, or in weak mode no descendant is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid != self.init:
                continue
            while self.report >= 0:
                self.read_report()
            if self.status is None:
                self.status = status
            if self.weak:
                self.kill_all()
            return True

    def on_signal(self, signum: int, frame: object) -> None:
        if signum == signal.SIGTERM:
            self.killing = True

    def run(self) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, self.on_signal)
        signal.signal(signal.SIGTERM, self.on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        who: dict[str, Any] = {}
        poller = select.poll()
        poller.register(0, select.POLLIN)
        poller.register(wake_read, select.POLLIN)
        watched = -1
        while True:
            if self.report != watched:
                if watched >= 0:
                    poller.unregister(watched)
                if self.report >= 0:
                    poller.register(self.report, select.POLLIN)
                watched = self.report
            ready = {fd for fd, _ in poller.poll(None if self.deadline_ns is None else LEASE_CHECK_MS)}
            now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            if (self.deadline_ns is not None and now_ns >= self.deadline_ns) or self.killing:
                self.kill_all()
            if self.report in ready:
                self.read_report()
            if wake_read in ready:
                os.read(wake_read, 4096)
            if self.init and self.reap():
                self.say(exit=signal.SIGKILL if self.status is None else self.status)
                return
            if 0 not in ready:
                continue
            for line in self.read_lines():
                if "deadline_ns" in line:
                    self.deadline_ns = line["deadline_ns"]
                elif line["op"] == "check":
                    who = self.check(line)
                    self.say(checked=who)
                elif line["op"] == "go":
                    self.launch(line["env"], who)
                elif line["op"] == "kill":
                    self.kill_all()


def main() -> int:
    if sys.argv[1:2] == ["--probe"]:
        return probe(sys.argv[2], sys.argv[3:])
    launcher = Launcher()
    try:
        launcher.run()
    except Refused as refused:
        reason, message = refused.args
        launcher.say(refused=reason, message=message)
        return 0
    except OSError as error:
        launcher.say(failed=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
