"""The etcd members beside the controllers of a local cluster: each a `controld member`, with an etcd as its child."""

from __future__ import annotations

import http.client
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from virial.errors import VirialError
from virial.local.part import Part

INSTALL_HINT: Final = "apt-get install etcd-server"
# Of `controld member`: where the member listens for its controller, and the sign that it was bootstrapped.
SOCKET: Final = "c:0"
STARTED: Final = "started"
SOCKET_PATH_BYTES_MAX: Final = 107
_ASK_TIMEOUT_S: Final = 2.0
_METRICS_BYTES_MAX: Final = 4 << 20


def require_etcd() -> None:
    """Raises VirialError."""
    if shutil.which("etcd") is None:
        raise VirialError(f"several controllers need etcd on this machine: {INSTALL_HINT}")


def require_short(directory: Path) -> None:
    """Raises VirialError where the path of a member's socket would be longer than the kernel takes."""
    too_long = len(str(directory / "member-0" / SOCKET).encode()) - SOCKET_PATH_BYTES_MAX
    if too_long > 0:
        raise VirialError(f"the path of {directory} is {too_long} bytes too long for sockets in it; use a shorter one")


def make_member(name: str, directory: Path, peers: Mapping[str, str], cluster_name: str) -> Part:
    """`peers`: HOST:PORT of every member, this one's among them, under their names."""
    argv = ["-m", "controld", "member", "--name", name, "--directory", str(directory)]
    for peer, address in peers.items():
        argv += ["--peer", f"{peer}=http://{address}"]
    argv += ["--cluster-name", cluster_name, "--log-format", "json"]
    return Part(name, directory, argv, state_file=STARTED)


def etcd_pid(member: Part) -> int | None:
    """Of the etcd itself, the one child of its `controld member`; None while it is down."""
    if not member.alive:
        return None
    try:
        children = Path(f"/proc/{member.pid}/task/{member.pid}/children").read_text(encoding="ascii").split()
        named = [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "etcd"]
    except OSError:
        return None
    return named[0] if named else None


def leads(member: Part) -> bool:
    """Whether it is, by its own word, the leader of the members."""
    connection = _UnixConnection(str(member.data_dir / SOCKET))
    try:
        connection.request("GET", "/metrics")
        return b"\netcd_server_is_leader 1\n" in connection.getresponse().read(_METRICS_BYTES_MAX)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    """etcd serves its measurements on the socket of its calls; so this needs no stubs of it."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_ASK_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
