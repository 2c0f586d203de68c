"""Where an etcd member is reached, as an operator writes it. No gRPC here: settings are checked before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SOCKET: Final = "c:0"  # of a member of ours, in its directory: etcd takes a name of the shape host:port alone
SOCKET_PATH_BYTES_MAX: Final = 107  # of `sockaddr_un`; a longer one would fail as if nobody listened


class EndpointError(ValueError):
    """An endpoint that cannot be used; the message says why and what to write."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`target` as gRPC writes it."""

    target: str
    secure: bool


def parse_endpoint(text: str) -> Endpoint:
    """`unix:/path/of/socket`, `http://HOST:PORT` or `https://HOST:PORT`. Raises EndpointError."""
    if text.startswith("unix:"):
        path = "/" + text.removeprefix("unix:").lstrip("/")
        if not text.removeprefix("unix:").startswith("/"):
            raise EndpointError(f"'{text}' must name the socket by its whole path, such as unix:/run/virial/etcd/c:0")
        if len(path.encode()) > SOCKET_PATH_BYTES_MAX:
            raise EndpointError(
                f"'{text}': a socket's path has at most {SOCKET_PATH_BYTES_MAX} bytes; use a shorter one"
            )
        return Endpoint(f"unix:{path}", secure=False)
    for scheme, secure in (("http://", False), ("https://", True)):
        rest = text.removeprefix(scheme)
        host, colon, port = rest.rpartition(":")
        if text.startswith(scheme) and host and colon and port.isdecimal() and "/" not in rest:
            return Endpoint(rest, secure)
    raise EndpointError(f"'{text}' is no endpoint: write unix:/PATH, https://HOST:PORT or http://HOST:PORT")
