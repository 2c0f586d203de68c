"""How a task comes to be: checks, namespaces, init and the task's own first steps. Runs in the launcher's process.

Standard library only, and little of it: this is on the way of every start.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
MS_REC_SLAVE = 0x4000 | 0x80000
MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
TASK_UMASK = 0o022

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The spec cannot be run here: (reason, message)."""


# -- what the kernel is asked ------------------------------------------------------------------------------------


def call(name: str, *args: object) -> None:
    if getattr(libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def die_with_parent(signum: int) -> None:
    """PDEATHSIG names the creating THREAD of the parent, and is cleared by a change of uid: set it after that."""
    call("prctl", PR_SET_PDEATHSIG, signum, 0, 0, 0)


def enter_namespaces() -> None:
    """The next child is pid 1 of a new PID namespace. Raises OSError where that is refused."""
    if os.geteuid() == 0:
        call("unshare", CLONE_NEWPID)
        return
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEWUSER | CLONE_NEWPID)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def own_proc() -> None:
    """A /proc that shows the namespace's own pids. Refused inside some containers; the task then sees the host's."""
    try:
        call("unshare", CLONE_NEWNS)
        call("mount", None, b"/", None, MS_REC_SLAVE, None)
        call("mount", b"proc", b"/proc", b"proc", MS_NOSUID_NODEV_NOEXEC, None)
    except OSError:
        return


def spread_pids(seed: int) -> None:
    """Two tasks of one node must not both be pid 2: CUDA IPC compares bare pids to tell a peer from itself."""
    try:
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(seed))
    except OSError:
        return


def set_oom_score(value: int) -> None:
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(value))
    except OSError:
        return


def children_of(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except FileNotFoundError:
        pass
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit() and stat_fields(int(name))[1:2] == [str(pid)]:
            found.append(int(name))
    return found


def stat_fields(pid: int) -> list[str]:
    """/proc/<pid>/stat after the command: state, ppid, ... ; empty when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().decode("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def start_ticks(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[19]) if len(fields) > 19 else 0


# -- checking ----------------------------------------------------------------------------------------------------


def look_up_user(user: str | None, group: str | None, allow_root: bool) -> dict[str, Any]:
    """May ask a directory service, which is why it is done here and not in the guardian. Raises Refused, also for a
    group the user is not in: by that way a task would become what its owner cannot."""
    import grp
    import pwd

    own_uid = os.geteuid()
    try:
        if user is None:
            entry = pwd.getpwuid(own_uid)
        elif user.isdigit():
            entry = pwd.getpwuid(int(user))
        else:
            entry = pwd.getpwnam(user)
        uid, gid, name, home, shell = entry.pw_uid, entry.pw_gid, entry.pw_name, entry.pw_dir, entry.pw_shell
    except KeyError:
        if user is not None and not user.isdigit():
            raise Refused("USER_UNKNOWN", f"user {user!r} does not exist on this node") from None
        uid = own_uid if user is None else int(user)
        gid, name, home, shell = os.getegid() if uid == own_uid else uid, str(uid), "/", "/bin/sh"
    own_gid = gid
    if group is not None:
        try:
            gid = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
        except KeyError:
            raise Refused("USER_UNKNOWN", f"group {group!r} does not exist on this node") from None
    if own_uid != 0 and (uid, gid) != (own_uid, os.getegid()):
        raise Refused("USER_UNKNOWN", f"the guardian runs as uid {own_uid} and cannot become {name}")
    groups = os.getgrouplist(name, own_gid) if own_uid == 0 and not name.isdigit() else [own_gid]
    if own_uid == 0 and not allow_root:
        if uid == 0:
            raise Refused("USER_REQUIRED", "the task would be root: name another user, or --allow-root-tasks")
        if gid not in groups:
            raise Refused("USER_UNKNOWN", f"user {name} is not in group {group}")
    return {"uid": uid, "gid": gid, "groups": groups, "name": name, "home": home, "shell": shell or "/bin/sh"}


def become(who: dict[str, Any]) -> None:
    if os.geteuid() != 0:
        return
    os.setgroups(who["groups"])
    os.setgid(who["gid"])
    os.setuid(who["uid"])


def find_command(command: str, path: str) -> str | None:
    """As execvp would, from the working directory. Raises PermissionError where something is there but may not run."""
    candidates = [command] if "/" in command else [os.path.join(part or ".", command) for part in path.split(":")]
    denied = None
    for candidate in candidates:
        if os.path.isfile(candidate):
            if os.access(candidate, os.X_OK):
                return candidate
            denied = candidate
    if denied is not None:
        raise PermissionError(denied)
    return None


def check(spec: dict[str, Any], who: dict[str, Any]) -> None:
    """Directory and command, seen with the task's own rights (root may be squashed on NFS, or see too much).

    Done in a child so that this process keeps its rights. Raises Refused."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = ["", ""]
        try:
            become(who)
            os.chdir(spec["cwd"])
            if not os.access(spec["socket_dir"], os.X_OK):
                answer = ["PREPARE_FAILED", f"{who['name']} cannot pass through to {spec['socket_dir']}"]
            elif find_command(spec["argv"][0], spec["path"]) is None:
                answer = ["COMMAND_NOT_FOUND", f"command {spec['argv'][0]!r} is not on this node"]
        except PermissionError as error:
            reason = "COMMAND_NOT_FOUND" if error.errno is None else "CWD_MISSING"
            answer = [reason, f"{who['name']} may not use {error.filename or error.args[0]!r}"]
        except OSError as error:
            answer = ["CWD_MISSING", f"cwd {spec['cwd']!r}: {error.strerror}"]
        finally:
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        reason, message = json.loads(file.read() or b'["PREPARE_FAILED","the check died"]')
    os.waitpid(child, 0)
    if reason:
        raise Refused(reason, message)


# -- the task and its init ---------------------------------------------------------------------------------------


def run_task(spec: dict[str, Any], who: dict[str, Any], errors: int, cgroups: list[int]) -> None:
    """In the task's process: becomes the command, or writes why not to `errors`. Never returns."""
    where = "setup"
    try:
        signal.set_wakeup_fd(-1)
        join(cgroups)
        os.setsid()
        set_oom_score(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spec["open_files"], resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        become(who)
        die_with_parent(signal.SIGKILL)
        os.umask(TASK_UMASK)
        # All: whoever started noded (nohup, a shell without job control) may have left some ignored, and an ignored
        # signal stays so over exec.
        for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        where = f"cwd {spec['cwd']!r}"
        os.chdir(spec["cwd"])
        command = spec["argv"][0]
        where = f"exec {command!r}"
        found = find_command(command, spec["env"].get("PATH", spec["path"]))
        os.execve(found or command, spec["argv"], spec["env"])  # noqa: S606 - no shell is the point
    except BaseException as error:  # noqa: BLE001 - reported; this process must never return
        os.write(errors, f"{where}: {error}"[:2000].encode("utf-8", "replace"))
    finally:
        os._exit(127)


def run_init(spec: dict[str, Any], who: dict[str, Any], go: int, report: int, cgroups: list[int]) -> None:
    """In pid 1 of the namespace: starts the task, reaps, ends with the task; the kernel then kills the rest."""
    try:
        die_with_parent(signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        join(cgroups)
        # The launcher may have died before the line above; its end of the pipe is then closed.
        if os.read(go, 1) != b"g":
            os._exit(1)
        os.close(0)
        os.open("/dev/null", os.O_RDONLY)
        own_proc()
        spread_pids(spec["pid_seed"])
        supervise(spec, who, go, report)
    except BaseException as error:  # noqa: BLE001 - reported; this process must never return
        os.write(report, b"failed " + f"setup: {error}"[:2000].encode("utf-8", "replace").hex().encode() + b"\n")
    finally:
        os._exit(1)


def supervise(spec: dict[str, Any], who: dict[str, Any], go: int, report: int) -> None:
    errors_read, errors_write = os.pipe()
    task = os.fork()
    if task == 0:
        run_task(spec, who, errors_write, [])
    os.close(errors_write)
    for fd in (1, 2):
        # Else the log pipes would not end with the task.
        os.dup2(0, fd)
    os.write(report, b"forked\n")
    # Nothing is reaped before the launcher has read the task's host pid, however short its life.
    os.read(go, 1)
    failure = os.read(errors_read, 4096)
    os.write(report, b"failed " + failure.hex().encode() + b"\n" if failure else b"running\n")
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == task:
            os.write(report, f"exit {status}\n".encode())
            os._exit(0)


def join(cgroups: list[int]) -> None:
    for fd in cgroups:
        os.write(fd, b"0")
        os.close(fd)


def probe(mode: str, cgroup_procs: list[str]) -> int:
    """0 when a child can be started in a PID namespace (unless mode is weak) and in these cgroups."""
    try:
        cgroups = [os.open(path, os.O_WRONLY) for path in cgroup_procs]
        if mode != "weak":
            enter_namespaces()
        child = os.fork()
    except OSError:
        return 1
    if child == 0:
        try:
            join(cgroups)
            os._exit(0)
        finally:
            os._exit(1)
    return 0 if os.waitpid(child, 0)[1] == 0 else 1
