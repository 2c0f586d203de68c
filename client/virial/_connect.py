"""Where and how to connect: addresses, certificates, limits. Shared by both clients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from virial._published import default_address
from virial.errors import InvalidRequestError

ADDRESS_VARIABLE = "VIRIAL_ADDRESS"
MESSAGE_BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a client certificate: the authority that signed the controllers', and our own pair."""

    ca_file: str
    certificate_file: str = ""
    key_file: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError naming the file that cannot be read, InvalidRequestError naming one that is not PEM."""
        own = bool(self.certificate_file and self.key_file)
        return grpc.ssl_channel_credentials(
            root_certificates=_pem(self.ca_file, "CERTIFICATE"),
            private_key=_pem(self.key_file, "PRIVATE KEY") if own else None,
            certificate_chain=_pem(self.certificate_file, "CERTIFICATE") if own else None,
        )

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Differs when a file was replaced: a connection that is refused may have been made with the former one."""
        found: list[tuple[int, int]] = []
        for name in (self.ca_file, self.certificate_file, self.key_file):
            try:
                status = os.stat(name)
            except OSError:  # as little as one that is not used
                found.append((0, 0))
            else:
                found.append((status.st_ino, status.st_mtime_ns))
        return tuple(found)


def _pem(path: str, what: str) -> bytes:
    """gRPC would log its complaint about the content and then never connect."""
    content = Path(path).read_bytes()
    if f"{what}-----".encode("ascii") not in content:
        raise InvalidRequestError(f"{path}: there is no {what} in PEM form in it")
    return content


def addresses_from(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """ "host:port" of each controller: as given (a list, or one text with commas), else from VIRIAL_ADDRESS, else of
    this user's local cluster (`virial up`).

    Raises InvalidRequestError when there is none, or one is malformed.
    """
    if given is None:
        given = os.environ.get(ADDRESS_VARIABLE) or default_address() or ""
    texts = given.split(",") if isinstance(given, str) else list(given)
    addresses = tuple(text.strip() for text in texts if text.strip())
    if not addresses:
        raise InvalidRequestError(
            f"no controller address: give one (host:port), set {ADDRESS_VARIABLE}, or start a cluster on this machine "
            "with `virial up`"
        )
    for address in addresses:
        host, _, port = address.rpartition(":")
        wrong = not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536
        if wrong and not address.startswith("unix:"):
            raise InvalidRequestError(f"controller address {address!r} is not host:port")
    return addresses


def next_after(failed: str, addresses: Sequence[str], index: int) -> int:
    """The index of whom to ask after `failed`, which may have been named by another: not the same one again."""
    following = index + 1
    return following + (addresses[following % len(addresses)] == failed)


def channel_options() -> list[tuple[str, int]]:
    return [
        # A connection is made when it is asked for: what another one met at the same address a moment ago, and how long
        # that one would wait now, says nothing of a controller that was started again meanwhile.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        # A host that is gone says nothing: another controller is asked some seconds later, not a minute.
        ("grpc.keepalive_time_ms", 6_000),
        ("grpc.keepalive_timeout_ms", 3_000),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
