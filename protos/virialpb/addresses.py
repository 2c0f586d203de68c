"""HOST:PORT as settings have it. Standard library only."""

from __future__ import annotations

import ipaddress


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, an IPv6 host in brackets. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"'{text}' has an IPv6 host without brackets: write [HOST]:PORT")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"'{text}' is not HOST:PORT with a port of 0 to 65535, such as 127.0.0.1:7700")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """A name other than localhost may lead anywhere, so it does not count."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
