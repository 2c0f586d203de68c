"""Whether a server asks for TLS. Standard library only; blocks."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Final

PROBE_S: Final = 1.0


def asks_for_tls(addresses: Sequence[str]) -> bool:
    """Whether one of them answers a TLS greeting: a caller without TLS only ever hears that a socket was closed.

    Blocks for at most PROBE_S each. Its certificate is not looked at, and nothing is said to it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return any(_greets(address, context) for address in addresses if not address.startswith("unix:"))


def _greets(address: str, context: ssl.SSLContext) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), PROBE_S) as plain,
            context.wrap_socket(plain),
        ):
            return True
    except ssl.SSLError as error:
        # Such as one that asks for a certificate; whoever knows no TLS sends no alerts.
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
