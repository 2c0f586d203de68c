"""Runs a command as `nobody` on a kernel that refuses it user namespaces. Needs root.

    without_namespaces.py COMMAND...

The limit belongs to a user namespace of its own, made here and then left to the ordinary user, so that the machine's
stays as it is. As in a container that forbids them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

NOBODY = 65534
CLONE_NEWUSER = 0x10000000


def main() -> None:
    made, mapped = os.pipe(), os.pipe()
    child = os.getpid()
    if os.fork() == 0:  # the one outside, which may write the maps
        os.read(made[0], 1)
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        os.write(mapped[1], b"x")
        os._exit(0)
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER) != 0:
        sys.exit(f"no user namespace: {os.strerror(ctypes.get_errno())}")
    os.write(made[1], b"x")
    os.read(mapped[0], 1)
    for descriptor in (*made, *mapped):
        os.close(descriptor)
    os.wait()
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
