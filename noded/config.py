"""noded's settings: one frozen tree. How they are layered and written is `virialpb.layered`.

Units: settings that are sizes, CPU or times are written as quantities (`memory = "64GiB"`, `cpu = "8"`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from virialpb.addresses import is_loopback, parse_address
from virialpb.identity import NODE_NAME
from virialpb.layered import ConfigError, Loaded, load
from virialpb.units import format_bytes, format_cpu_millis

PREFIX: Final = "VIRIAL_NODED"
CONFIG_VARIABLE: Final = "VIRIAL_NODED_CONFIG"
DEFAULT_FILE: Final = "/etc/virial/noded.toml"
PORT: Final = 7700
JOIN_PORT: Final = 7702
OFF: Final = "off"
_SECOND_NS: Final = 1_000_000_000
_UNIX_PATH_BYTES_MAX: Final = 107
# What the guardian adds to the runtime directory: "/t/" + 16 hex digits + ".sock".
_LONGEST_SOCKET: Final = "/t/0123456789abcdef.sock"


@dataclass(frozen=True, slots=True)
class CollectConfig:
    """How often the host is read. Neither delays a heartbeat."""

    inventory_period_ns: int = field(default=60 * _SECOND_NS, metadata={"unit": "duration_ns", "minimum": _SECOND_NS})
    readings_period_ns: int = field(default=10 * _SECOND_NS, metadata={"unit": "duration_ns", "minimum": _SECOND_NS})


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files: the authority that signed the controllers' certificates, and this node's own pair."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class NodedConfig:
    """Empty texts and None stand for what is found out on the machine; see `resolved`."""

    name: str = ""
    data_dir: str = "/var/lib/virial/noded"
    runtime_dir: str = ""
    controllers: tuple[str, ...] = (f"127.0.0.1:{PORT}",)
    advertise_address: str = ""
    bind_address: str = "0.0.0.0"  # noqa: S104 - the rendezvous port of rank 0 is for the other nodes
    cpu_millis: int | None = field(default=None, metadata={"unit": "cpu_millis"})
    memory_bytes: int | None = field(default=None, metadata={"unit": "bytes"})
    labels: tuple[tuple[str, str], ...] = ()
    allow_root_tasks: bool = False
    fencing: str = field(default="auto", metadata={"choices": ("auto", "pidns", "weak")})
    rdl: str = ""
    metrics_listen: str = "127.0.0.1:0"
    log_format: str = field(default="auto", metadata={"choices": ("auto", "json", "text", "console")})
    log_level: str = field(default="info", metadata={"choices": ("debug", "info", "warning", "error")})
    insecure: bool = False
    tls: TlsConfig = field(default_factory=TlsConfig)
    join_token_file: str = ""
    join_controllers: tuple[str, ...] = ()
    collect: CollectConfig = field(default_factory=CollectConfig)


def load_config(
    toml_text: str | None, toml_name: str, environ: Mapping[str, str], flags: Mapping[str, object]
) -> Loaded[NodedConfig]:
    """The settings after all layers, each checked by itself. Raises ConfigError."""
    loaded = load(NodedConfig, toml_text=toml_text, toml_name=toml_name, environ=environ, prefix=PREFIX, flags=flags)
    errors = _problems(loaded.value)
    if errors:
        raise ConfigError(errors)
    return loaded


def _problems(config: NodedConfig) -> list[str]:
    errors: list[str] = []
    if config.name and not NODE_NAME.fullmatch(config.name):
        errors.append(
            f"name: '{config.name[:60]}' is not a node's name: at most 253 lower-case letters, digits, '.' and '-',"
            " a letter or digit first and last"
        )
    if not config.controllers:
        errors.append("controllers: name at least one, as HOST:PORT")
    for name, addresses in (("controllers", config.controllers), ("metrics_listen", (config.metrics_listen,))):
        errors += [text for address in addresses if (text := _address_problem(config, name, address))]
    errors += _tls_problems(config.tls)
    if config.join_token_file and config.tls != TlsConfig():
        errors.append(
            "join_token_file: is for a node that has no tls.ca, certificate and key; leave one or the other out"
        )
    if config.join_controllers and not config.join_token_file:
        errors.append("join_controllers: is for a node that joins by a token; set join_token_file too")
    errors += [
        f"join_controllers: '{address}' is not HOST:PORT"
        for address in config.join_controllers
        if split_address(address) is None
    ]
    for name in ("data_dir", "runtime_dir"):
        path: str = getattr(config, name)
        if path and not path.startswith("/"):
            errors.append(f"{name}: '{path}' is not an absolute path")
    return errors


def _address_problem(config: NodedConfig, name: str, address: str) -> str:
    if address == OFF and name == "metrics_listen":
        return ""
    parts = split_address(address)
    if parts is None:
        return f"{name}: '{address}' is not HOST:PORT"
    if config.insecure or is_loopback(parts[0]):
        return ""
    if name == "metrics_listen":
        return (
            f"{name}: {address} can be reached from other machines; listen on 127.0.0.1 and let a local agent forward"
            " it, or say --insecure"
        )
    if config.tls.ca is None and not config.join_token_file:
        return (
            f"{name}: {address} is another machine, and without TLS whoever answers there could run commands on this"
            " node; set tls.ca, tls.certificate and tls.key, or join by a token (join_token_file), or say --insecure"
            " in a network you trust"
        )
    return ""


def _tls_problems(tls: TlsConfig) -> list[str]:
    errors: list[str] = []
    if (tls.certificate is None) != (tls.key is None):
        missing = "tls.key" if tls.key is None else "tls.certificate"
        errors.append(f"{missing}: is missing: a certificate and its key come together")
    if tls.certificate is not None and tls.ca is None:
        errors.append("tls.ca: is missing: a certificate is shown to controllers over TLS only")
    for name, path in (("ca", tls.ca), ("certificate", tls.certificate), ("key", tls.key)):
        if path is not None and not Path(path).is_file():
            errors.append(f"tls.{name}: {path} is not a file")
    return errors


def join_addresses(config: NodedConfig) -> tuple[str, ...]:
    """Where to ask for the first certificate: as set, else port JOIN_PORT of each controller's host."""
    if config.join_controllers:
        return config.join_controllers
    hosts = dict.fromkeys(address.rpartition(":")[0] for address in config.controllers)
    return tuple(f"{host}:{JOIN_PORT}" for host in hosts)


def split_address(address: str) -> tuple[str, int] | None:
    """(host, port) of HOST:PORT or [V6]:PORT; None when it is neither."""
    try:
        return parse_address(address)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has; CPU and memory are what its control group allows. None: it could not be read."""

    hostname: str
    address: str
    cpu_millis: int | None
    memory_bytes: int | None
    temp_dir: str


def resolved(config: NodedConfig, machine: Machine) -> NodedConfig:
    """The settings with everything filled in that is found out on the machine. Raises ConfigError."""
    errors: list[str] = []

    def offered(name: str, wanted: int | None, there: int | None, show: Callable[[int], str]) -> int:
        if wanted is None and there is None:
            errors.append(f"{name}: cannot be read from this machine; set it")
        elif wanted is not None and there is not None and wanted > there:
            errors.append(f"{name}: {show(wanted)} is more than this machine has ({show(there)})")
        return wanted or there or 0

    cpu_millis = offered("cpu", config.cpu_millis, machine.cpu_millis, format_cpu_millis)
    memory_bytes = offered("memory", config.memory_bytes, machine.memory_bytes, format_bytes)
    name = config.name or re.sub(r"[^a-z0-9.-]+", "-", machine.hostname.lower()).strip("-.")
    if not name:
        errors.append(f"name: the host name '{machine.hostname}' gives none; set it")
    runtime_dir = config.runtime_dir or default_runtime_dir(config.data_dir, machine.temp_dir)
    if _too_long(runtime_dir):
        errors.append(
            f"runtime_dir: '{runtime_dir}' is too long: its sockets would have"
            f" {len(os.fsencode(runtime_dir + _LONGEST_SOCKET))} bytes, unix sockets allow {_UNIX_PATH_BYTES_MAX};"
            " choose a shorter one"
        )
    if errors:
        raise ConfigError(errors)
    return replace(
        config,
        name=name,
        cpu_millis=cpu_millis,
        memory_bytes=memory_bytes,
        runtime_dir=runtime_dir,
        advertise_address=config.advertise_address or machine.address,
    )


def default_runtime_dir(data_dir: str, temp_dir: str) -> str:
    """`run` in the data directory; where that is too long for sockets, a directory of its own among temporary files."""
    inside = str(Path(data_dir) / "run")
    if not _too_long(inside):
        return inside
    mark = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
    return str(Path(temp_dir) / f"virial-{os.geteuid()}-{mark}")


def _too_long(runtime_dir: str) -> bool:
    return len(os.fsencode(runtime_dir + _LONGEST_SOCKET)) > _UNIX_PATH_BYTES_MAX
