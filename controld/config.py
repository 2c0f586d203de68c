"""Settings of a controller: one frozen tree; defaults < TOML file < environment < flags; cross-checks in `validate`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from controld.core.spec import SECOND_NS
from controld.store.etcd_endpoint import SOCKET, EndpointError, parse_endpoint
from virialpb.addresses import is_loopback, parse_address
from virialpb.layered import ConfigError, Loaded, load
from virialpb.lease import fence_after_min_ns
from virialpb.units import format_duration_ns

ENVIRONMENT_PREFIX: Final = "VIRIAL_CONTROLD"
DEFAULT_FILE: Final = "/etc/virial/controld.toml"
OFF: Final = "off"
_PREFIX: Final = re.compile(r"[a-z0-9-]{1,64}")


class StoreKind(StrEnum):
    SQLITE = "sqlite"
    ETCD = "etcd"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """`memory` forgets everything at the end of the process: for tests.

    For `etcd`: `member_dir` is the directory of the member beside this controller (`controld member`), reached by the
    socket in it. `endpoints` in its place name an etcd by themselves: unix:/PATH, https://HOST:PORT with the three PEM
    files, http://HOST:PORT on this machine. `prefix` keeps several clusters apart in one etcd.
    `open_timeout`: how long a start waits for a member with a majority.
    """

    kind: StoreKind = StoreKind.SQLITE
    size_max_bytes: int = field(default=8 << 30, metadata={"unit": "bytes", "minimum": 16 << 20})
    member_dir: str | None = None
    endpoints: tuple[str, ...] = ()
    prefix: str = "virial"
    open_timeout_ns: int = field(default=30 * SECOND_NS, metadata={"unit": "duration_ns", "minimum": SECOND_NS})
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    @property
    def etcd_endpoints(self) -> tuple[str, ...]:
        return (f"unix:{self.member_dir}/{SOCKET}",) if self.member_dir is not None else self.endpoints


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files. With `client_ca`, callers must show a certificate that it signed, and may what the role in it may.

    With an issuer, which `client_ca` signed or is, nodes join at `join_listen` by a token and renew by themselves.
    """

    certificate: str | None = None
    key: str | None = None
    client_ca: str | None = None
    issuer_certificate: str | None = None
    issuer_key: str | None = None
    join_listen: str = OFF


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Times of the lease protocol, as in docs/design.

    `fence_after`: how long after its last renewal a task is stopped, where its job names no other time. `recovery`: how
    long agents may be without a controller when it restarts.
    """

    renew_interval_ns: int = field(
        default=SECOND_NS, metadata={"unit": "duration_ns", "minimum": 50_000_000, "maximum": 60 * SECOND_NS}
    )
    grace_ns: int = field(default=SECOND_NS, metadata={"unit": "duration_ns", "minimum": 100_000_000})
    fence_after_ns: int = field(default=60 * SECOND_NS, metadata={"unit": "duration_ns", "maximum": 86_400 * SECOND_NS})
    recovery_ns: int = field(default=SECOND_NS, metadata={"unit": "duration_ns"})

    @property
    def fence_after_min_ns(self) -> int:
        """The least fence_after: fence_after * (1 - drift) - kill budget - 2 * renew_interval > recovery."""
        return fence_after_min_ns(2 * self.renew_interval_ns + self.recovery_ns)


@dataclass(frozen=True, slots=True)
class ElectionConfig:
    """Of several controllers, as in docs/design: the leader pings its followers each `ping_interval`, but not when its
    last proof of leadership is older than `proof_max`; after a silence of `takeover` another may take its place."""

    ping_interval_ns: int = field(
        default=SECOND_NS // 10, metadata={"unit": "duration_ns", "minimum": SECOND_NS // 100, "maximum": SECOND_NS}
    )
    takeover_ns: int = field(default=400_000_000, metadata={"unit": "duration_ns", "minimum": SECOND_NS // 20})
    proof_max_ns: int = field(default=750_000_000, metadata={"unit": "duration_ns", "minimum": SECOND_NS // 2})


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """`prepare_timeout`: for a rank to get ready. `reconnect`: for agents to find a new leader, else suspect."""

    prepare_timeout_ns: int = field(default=60 * SECOND_NS, metadata={"unit": "duration_ns", "minimum": SECOND_NS})
    reconnect_ns: int = field(default=10 * SECOND_NS, metadata={"unit": "duration_ns", "minimum": SECOND_NS})
    plan_deadline_ns: int = field(default=10 * SECOND_NS, metadata={"unit": "duration_ns", "minimum": 100_000_000})


@dataclass(frozen=True, slots=True)
class KeepConfig:
    """How much of what is over stays in the state. Retried requests are answered from it for `requests`."""

    requests_ns: int = field(default=86_400 * SECOND_NS, metadata={"unit": "duration_ns", "minimum": 3_600 * SECOND_NS})
    events: int = field(default=10_000, metadata={"minimum": 100, "maximum": 1_000_000})
    ended_jobs: int = field(default=1_000, metadata={"minimum": 1, "maximum": 100_000})


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: str = field(default="info", metadata={"choices": ("debug", "info", "warning", "error")})
    format: str = field(default="auto", metadata={"choices": ("auto", "json", "text", "console")})


@dataclass(frozen=True, slots=True)
class Config:
    """`listen` and `metrics_listen` are HOST:PORT; port 0 takes a free one, which `ports.json` in `data_dir` names.

    `peers`: the other controllers of this cluster, HOST:PORT; without any this one is alone. `advertise`: HOST:PORT by
    which they, agents and clients reach this one (default: `listen`); `peers` may name it too.
    """

    data_dir: str = "/var/lib/virial/controld"
    listen: str = "127.0.0.1:7700"
    metrics_listen: str = "127.0.0.1:7701"
    insecure: bool = False
    identity: str = ""
    peers: tuple[str, ...] = ()
    advertise: str = ""
    store: StoreConfig = field(default_factory=StoreConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    election: ElectionConfig = field(default_factory=ElectionConfig)
    keep: KeepConfig = field(default_factory=KeepConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def address(self) -> str:
        """Where others reach this controller."""
        return self.advertise or self.listen

    @property
    def others(self) -> tuple[str, ...]:
        """`peers` without this controller."""
        return tuple(dict.fromkeys(peer for peer in self.peers if peer != self.address))

    @property
    def fence_after_min_ns(self) -> int:
        """The least fence_after that outlives a restart and, with others, an election."""
        if not self.peers:
            return self.lease.fence_after_min_ns
        election_ns = self.election.proof_max_ns + 2 * self.election.takeover_ns
        return replace(self.lease, recovery_ns=max(self.lease.recovery_ns, election_ns)).fence_after_min_ns

    @property
    def grpc_address(self) -> tuple[str, int]:
        return parse_address(self.listen)

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        return None if self.metrics_listen == OFF else parse_address(self.metrics_listen)


def load_config(
    *, toml_text: str | None, toml_name: str, environ: Mapping[str, str], flags: Mapping[str, object]
) -> Loaded[Config]:
    """The settings of all layers, cross-checked. Raises ConfigError with every mistake."""
    loaded = load(
        Config, toml_text=toml_text, toml_name=toml_name, environ=environ, prefix=ENVIRONMENT_PREFIX, flags=flags
    )
    errors = [
        f"{name}: {text} (set by: {loaded.origins.get(name, 'default')})" for name, text in validate(loaded.value)
    ]
    if errors:
        raise ConfigError(errors)
    return loaded


def validate(config: Config) -> list[tuple[str, str]]:
    """(setting, what is wrong and what to do) of every broken rule between settings."""
    return [*_addresses(config), *_tls(config), *_store(config), *_lease(config), *_loop(config), *_peers(config)]


def _local(address: str) -> bool:
    try:
        return is_loopback(parse_address(address)[0])
    except ValueError:
        return False  # told elsewhere


def _addresses(config: Config) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    known: dict[str, tuple[str, int]] = {}
    for name, text in (("listen", config.listen), ("metrics_listen", config.metrics_listen)):
        if name == "metrics_listen" and text == OFF:
            continue
        try:
            known[name] = parse_address(text)
        except ValueError as error:
            found.append((name, str(error)))
    if "listen" in known and not is_loopback(known["listen"][0]) and not config.tls.certificate and not config.insecure:
        text = (
            f"{config.listen} can be reached from other machines, and without TLS anyone there could run commands on "
            "every node; set tls.certificate, tls.key and tls.client_ca, or say --insecure in a network you trust"
        )
        found.append(("listen", text))
    if "metrics_listen" in known and not is_loopback(known["metrics_listen"][0]) and not config.insecure:
        text = (
            f"{config.metrics_listen} can be reached from other machines; listen on 127.0.0.1 and let a local agent "
            "forward it, or say --insecure"
        )
        found.append(("metrics_listen", text))
    if len(set(known.values())) < len(known) and config.listen.rpartition(":")[2] != "0":
        found.append(("metrics_listen", "is the same address as listen; name another port, or 'off'"))
    return found


def _tls(config: Config) -> list[tuple[str, str]]:
    tls = config.tls
    found: list[tuple[str, str]] = []
    if (tls.certificate is None) != (tls.key is None):
        missing = "tls.key" if tls.key is None else "tls.certificate"
        found.append((missing, "is missing: a certificate and its key come together"))
    if tls.certificate is not None and tls.client_ca is None and not config.insecure and not _local(config.listen):
        text = (
            "is missing: without it callers are not asked who they are, and whoever reaches "
            f"{config.listen} may do everything; set it, or say --insecure in a network you trust"
        )
        found.append(("tls.client_ca", text))
    if tls.client_ca is not None and tls.certificate is None:
        found.append(("tls.client_ca", "callers can be asked for certificates only over TLS; set tls.certificate"))
    if (tls.issuer_certificate is None) != (tls.issuer_key is None):
        missing = "tls.issuer_key" if tls.issuer_key is None else "tls.issuer_certificate"
        found.append((missing, "is missing: an issuer's certificate and its key come together"))
    if tls.issuer_certificate is not None and tls.client_ca is None:
        found.append(("tls.client_ca", "is missing: certificates of nodes are good for nothing where nobody asks"))
    if tls.join_listen != OFF:
        try:
            parse_address(tls.join_listen)
        except ValueError as error:
            found.append(("tls.join_listen", str(error)))
        if tls.issuer_certificate is None:
            found.append(("tls.join_listen", "nodes can join only where tls.issuer_certificate and issuer_key are set"))
    files = {
        "certificate": tls.certificate,
        "key": tls.key,
        "client_ca": tls.client_ca,
        "issuer_certificate": tls.issuer_certificate,
        "issuer_key": tls.issuer_key,
    }
    for name, path in files.items():
        if path is not None and not Path(path).is_file():
            found.append((f"tls.{name}", f"{path} is not a file"))
    return found


def _store(config: Config) -> list[tuple[str, str]]:
    store = config.store
    if store.kind is not StoreKind.ETCD:
        return [
            (f"store.{name}", f"is for store.kind etcd, and it is {store.kind}")
            for name, value in (("member_dir", store.member_dir), ("endpoints", store.endpoints))
            if value
        ]
    found: list[tuple[str, str]] = []
    if bool(store.endpoints) == (store.member_dir is not None):
        text = "store.kind etcd needs either the directory of its member or store.endpoints"
        found.append(("store.member_dir", text))
    if not _PREFIX.fullmatch(store.prefix):
        found.append(("store.prefix", f"'{store.prefix}' must be 1 to 64 characters of [a-z0-9-]"))
    files = {"ca": store.ca, "certificate": store.certificate, "key": store.key}
    for text in store.etcd_endpoints:
        name = "store.member_dir" if store.member_dir is not None else "store.endpoints"
        try:
            endpoint = parse_endpoint(text)
        except EndpointError as error:
            found.append((name, str(error)))
            continue
        if endpoint.secure and None in files.values():
            found.append((name, f"{text} needs store.ca, store.certificate and store.key"))
        open_to_others = text.startswith("http:") and not is_loopback(endpoint.target.rpartition(":")[0].strip("[]"))
        if open_to_others and not config.insecure:
            found.append((name, f"over {text} anyone could read and change the state; use https://, or say --insecure"))
    for name, path in files.items():
        if path is not None and not Path(path).is_file():
            found.append((f"store.{name}", f"{path} is not a file"))
    return found


def _peers(config: Config) -> list[tuple[str, str]]:
    if not config.peers:
        return [("advertise", "is for one of several controllers; set peers too")] if config.advertise else []
    found: list[tuple[str, str]] = []
    for name, texts in (("peers", config.peers), ("advertise", (config.address,))):
        for text in texts:
            try:
                host, port = parse_address(text)
            except ValueError as error:
                found.append((name, str(error)))
                continue
            if port == 0 or host in ("0.0.0.0", "::"):  # noqa: S104 - refused
                found.append(
                    (name, f"{text} is no address that others can reach; set {name} to HOST:PORT of this kind")
                )
    if not config.others:
        found.append(("peers", "names no controller but this one; leave it out where there is one only"))
    if config.store.kind is not StoreKind.ETCD:
        found.append(("peers", f"several controllers need store.kind etcd, and it is {config.store.kind}"))
    if config.tls.certificate is not None and config.tls.client_ca is None:
        found.append(("tls.client_ca", "is what the peers' certificates are checked with; set it, or no tls at all"))
    election = config.election
    if election.takeover_ns < 3 * election.ping_interval_ns:
        found.append(
            ("election.takeover", "must be at least three election.ping_interval: one late ping is no silence")
        )
    return found


def _lease(config: Config) -> list[tuple[str, str]]:
    lease, minimum_ns = config.lease, config.fence_after_min_ns
    if lease.fence_after_ns >= minimum_ns:
        return []
    least = format_duration_ns(-(-minimum_ns // 1_000_000) * 1_000_000)
    text = (
        f"{format_duration_ns(lease.fence_after_ns)} is too short: a restart of the controller would stop every task; "
        f"the least is {least}, or make lease.renew_interval or lease.recovery shorter"
    )
    return [("lease.fence_after", text)]


def _loop(config: Config) -> list[tuple[str, str]]:
    if config.loop.reconnect_ns >= 2 * config.lease.renew_interval_ns:
        return []
    return [
        ("loop.reconnect", "must be at least two lease.renew_interval: else every node is suspect after each restart")
    ]
