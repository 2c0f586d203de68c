"""Whether an address can be listened on, and why not: gRPC says only that it failed, in a log of its own."""

from __future__ import annotations

import socket


class AddressError(OSError):
    """The address cannot be listened on. `errno` and `strerror` say why."""


def check_address(host: str, port: int) -> None:
    """Bind and let go again. Raises AddressError; `port` 0 is always free where the host is of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: else the port would seem taken for a minute after a former life of this one.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        reason = error.strerror or str(error)
        raise AddressError(error.errno or 0, f"cannot listen on {host} port {port}: {reason}") from error
