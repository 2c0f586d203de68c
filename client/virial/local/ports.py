"""Ports on loopback that are ours for as long as the cluster runs, also while the part that uses one is down.

A controller and a member are known to the others by their port, so that it must be chosen before any of them starts
and must still be free when one starts again. A socket that is bound and does not listen keeps it: the kernel gives a
port that is bound to nobody who asks for a free one, and lets a server listen on it that sets SO_REUSEADDR, as all do.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, cast

from virial.errors import VirialError

LOOPBACK: Final = "127.0.0.1"
FILE_NAME: Final = "cluster.json"


class ReservedPorts:
    """A port for each name, the same ones whenever this directory is used: members remember each other's."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        """Raises VirialError where one that was used before is taken now, or `names` are others than before."""
        self._sockets: list[socket.socket] = []
        path = directory / FILE_NAME
        known = _read(path)
        if known and set(known) != set(names):
            raise VirialError(
                f"{directory} is of a cluster of other parts ({', '.join(sorted(known))}): start it with as many "
                "controllers as before, or name another directory"
            )
        try:
            self.ports = {name: self._reserve(name, known.get(name, 0)) for name in names}
        except BaseException:
            self.close()
            raise
        if not known:
            partial = path.with_name(f".{FILE_NAME}")
            partial.write_text(json.dumps(self.ports, indent=2) + "\n", encoding="ascii")
            partial.replace(path)

    def address(self, name: str) -> str:
        return f"{LOOPBACK}:{self.ports[name]}"

    def _reserve(self, name: str, port: int) -> int:
        made = socket.socket()
        self._sockets.append(made)
        if port:  # connections of a former life may linger on it
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((LOOPBACK, port))
        except OSError as error:
            raise VirialError(
                f"port {port} of {name} cannot be used ({error.strerror}): stop what uses it, or name another directory"
            ) from error
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # from here on the part may listen there
        return int(made.getsockname()[1])

    def close(self) -> None:
        for made in self._sockets:
            made.close()
        self._sockets.clear()


def _read(path: Path) -> Mapping[str, int]:
    """Empty where the directory is new. Raises VirialError."""
    try:
        found: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        found = None
    ports = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    known = {name: port for name, port in ports.items() if isinstance(port, int)}
    if not known or len(known) < len(ports):
        raise VirialError(f"{path} is damaged; name another directory")
    return known
