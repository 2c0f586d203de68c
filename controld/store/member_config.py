"""The etcd member beside a controller: where its files are, what it is told, what must not be asked of it.

DIRECTORY/             mode 0700: who can reach the socket may write anything
  c:0                  the socket, the member's only client address (etcd takes the shape host:port alone)
  data/                etcd's own
  etcd.json            what it is told; written anew at each start
  etcd.log
  started              it was bootstrapped: without data/ it is not bootstrapped a second time
  quarantined          its data is damaged, and why; while this is here it is not started
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from controld.store.etcd_endpoint import SOCKET, SOCKET_PATH_BYTES_MAX
from virialpb.addresses import is_loopback

SIZES: Final = (1, 3, 5)
QUOTA_RESERVE_BYTES: Final = 64 << 20
_CORRUPT_CHECK_NS: Final = 12 * 3_600 * 10**9


class MemberConfigError(ValueError):
    """What is wrong with the member's settings and what to do: one sentence."""


@dataclass(frozen=True, slots=True)
class PeerTls:
    """PEM files for the talk between members; each shows its certificate to the other."""

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """`peers`: the peer URL of every member, this one's among them, under their names.

    `size_bytes_max` is the store's own limit; etcd's quota lies above it, so that the store refuses first.
    `joins`: the others run already and have added this one, instead of all beginning together.
    `listen`: the URL to listen on for the others, where it is not this one's peer URL; etcd listens on addresses alone.
    Election 50/500 ms: a lost leading member costs 0.6 s of writes, at 100/1000 twice as much (measured, 2 cores).
    """

    name: str
    directory: Path
    peers: Mapping[str, str]
    cluster_name: str = "virial"
    joins: bool = False
    size_bytes_max: int = 8 << 30
    heartbeat_ms: int = 50
    election_ms: int = 500
    tls: PeerTls | None = None
    listen: str = ""
    extra: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def endpoint(self) -> str:
        """As `controld.store.etcd_endpoint.parse_endpoint` reads it."""
        return f"unix:{self.directory / SOCKET}"


def check(config: MemberConfig) -> None:
    """Raises MemberConfigError."""
    if not config.directory.is_absolute():
        raise MemberConfigError(f"{config.directory}: name the member's directory by its whole path")
    if len(str(config.directory / SOCKET).encode()) > SOCKET_PATH_BYTES_MAX:
        raise MemberConfigError(
            f"{config.directory}: its socket's path would be longer than {SOCKET_PATH_BYTES_MAX} bytes; "
            "use a shorter directory"
        )
    if config.name not in config.peers:
        raise MemberConfigError(f"the member {config.name!r} is not among {', '.join(sorted(config.peers)) or 'none'}")
    if not config.joins and len(config.peers) not in SIZES:
        raise MemberConfigError(
            f"a controller has 1, 3 or 5 members, not {len(config.peers)}: an even number survives no more losses"
        )
    if len(set(config.peers.values())) < len(config.peers):
        raise MemberConfigError("two members have the same peer URL")
    for name, url in config.peers.items():
        _check_peer(name, url, secure=config.tls is not None)
    listen = config.listen or config.peers[config.name]
    _check_peer("listening", listen, secure=config.tls is not None)
    if not _is_address(urlsplit(listen).hostname or ""):
        raise MemberConfigError(
            f"{listen}: etcd listens on an address and not on a name: give one, such as --listen-peer https://0.0.0.0:2380"
        )
    if config.election_ms < 5 * config.heartbeat_ms:
        raise MemberConfigError("election_ms must be at least five heartbeat_ms, else one late beat is an election")


def _check_peer(name: str, url: str, *, secure: bool) -> None:
    if any(character in name for character in "=,") or not name:
        raise MemberConfigError(f"{name!r} cannot name a member: no '=' and no ','")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = parts = None
    if parts is None or parts.scheme not in ("http", "https") or host is None or port is None:
        raise MemberConfigError(f"{name}: {url!r} is no peer URL: write https://HOST:PORT")
    if (parts.scheme == "https") != secure:
        todo = "set the peers' TLS files" if parts.scheme == "https" else "write https://, since TLS files are set"
        raise MemberConfigError(f"{name}: {url}: {todo}")
    if not secure and not is_loopback(host):
        raise MemberConfigError(f"{name}: {url} can be reached from other machines, so its peers need TLS files")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def quota_bytes(size_bytes_max: int) -> int:
    """Of the file, for a store that may use so much of it."""
    return size_bytes_max + max(QUOTA_RESERVE_BYTES, size_bytes_max // 8)


def render(config: MemberConfig) -> str:
    """etcd's configuration file (JSON is YAML). Its names are those of 3.4 and 3.5; unknown ones are ignored."""
    client, peer = f"unix://{SOCKET}", config.peers[config.name]
    content: dict[str, object] = {
        "name": config.name,
        "data-dir": "data",
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": config.listen or peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": ",".join(f"{name}={url}" for name, url in sorted(config.peers.items())),
        "initial-cluster-state": "existing" if config.joins else "new",
        "initial-cluster-token": config.cluster_name,
        "strict-reconfig-check": True,
        "pre-vote": True,
        "heartbeat-interval": config.heartbeat_ms,
        "election-timeout": config.election_ms,
        "quota-backend-bytes": quota_bytes(config.size_bytes_max),
        "max-txn-ops": 1_024,
        "max-request-bytes": 2 << 20,
        "enable-v2": False,
        "experimental-initial-corrupt-check": True,
        "experimental-corrupt-check-time": _CORRUPT_CHECK_NS,
        "logger": "zap",
        "log-level": "warn",
        "log-outputs": ["stderr"],
    }
    if config.tls is not None:
        content["peer-transport-security"] = {
            "trusted-ca-file": str(config.tls.ca),
            "cert-file": str(config.tls.certificate),
            "key-file": str(config.tls.key),
            "client-cert-auth": True,
        }
    return json.dumps(content | dict(config.extra), indent=2, sort_keys=True) + "\n"
