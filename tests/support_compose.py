"""What the compose file keeps to: docker-compose 1.29 and v2 read it; least privilege; nobody sees another's keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

Service = Mapping[str, Any]
Document = Mapping[str, Any]

# What both versions take; 1.29 refuses the whole file over one key it does not know.
TOP_KEYS: Final = frozenset({"services", "networks", "volumes"})
SERVICE_KEYS: Final = frozenset(
    {
        *("build", "cap_add", "cap_drop", "command", "cpu_shares", "depends_on", "environment", "healthcheck"),
        *("image", "init", "logging", "mem_limit", "networks", "pids_limit", "read_only", "restart", "security_opt"),
        *("stop_grace_period", "tmpfs", "ulimits", "user", "volumes"),
    }
)
HEALTH_KEYS: Final = frozenset({"test", "interval", "timeout", "retries", "start_period"})
# Of a controller and a member, against 1024 of a node.
CPU_SHARES_MIN: Final = 4_096
OPEN_FILES_MAX: Final = 20_000
# It ends by itself; and it only waits for someone who types.
_NO_DAEMON: Final = frozenset({"certs", "cli"})
_CERTS_ADDS: Final = frozenset({"CHOWN"})


def problems(document: Document) -> list[str]:
    """One sentence for each broken rule; empty when there is none."""
    found = [f"top level: {key} is not read by 1.29" for key in document if key not in TOP_KEYS and key[:2] != "x-"]
    services: Mapping[str, Service] = document["services"]
    networks: Mapping[str, Service | None] = document.get("networks", {})
    found += [
        f"network {name}: not internal" for name, network in networks.items() if not (network or {}).get("internal")
    ]
    for name, service in services.items():
        found += [f"{name}: {text}" for rule in _RULES for text in rule(name, service)]
    return found + list(_volume_problems(services))


def _keys(name: str, service: Service) -> Iterator[str]:
    yield from (f"key {key} is not allowed here" for key in service if key not in SERVICE_KEYS)
    yield from (f"healthcheck.{key}" for key in service.get("healthcheck", {}) if key not in HEALTH_KEYS)


def _privileges(name: str, service: Service) -> Iterator[str]:
    if service.get("cap_drop") != ["ALL"]:
        yield "does not drop all capabilities"
    if not set(service.get("cap_add", ())) <= (_CERTS_ADDS if name == "certs" else frozenset[str]()):
        yield f"adds {service['cap_add']}"
    if "no-new-privileges:true" not in service.get("security_opt", ()):
        yield "may gain privileges"
    if any("unconfined" in option for option in service.get("security_opt", ())):
        yield "is not confined"
    if service.get("read_only") is not True:
        yield "may write its own image"
    if service.get("user", "") and name != "certs":
        yield f"runs as {service['user']} and not as its image says"


def _bounds(name: str, service: Service) -> Iterator[str]:
    for key in ("mem_limit", "pids_limit", "logging"):
        if key not in service and (name, key) != ("certs", "mem_limit"):
            yield f"no {key}"
    for kind, limit in service.get("ulimits", {}).items():
        most = max(cast("Mapping[str, int]", limit).values()) if isinstance(limit, dict) else limit
        if kind == "nofile" and most > OPEN_FILES_MAX:
            yield f"{most} open files cannot be had everywhere"


def _life(name: str, service: Service) -> Iterator[str]:
    if name in _NO_DAEMON:
        return
    if service.get("restart") != "unless-stopped":
        yield "is not started again"
    health = service.get("healthcheck", {})
    if not health.get("test") or health["test"][0] != "CMD" or not set(health) >= HEALTH_KEYS:
        yield "no whole healthcheck"
    if service.get("depends_on", {}).get("certs", {}).get("condition") != "service_completed_successfully":
        yield "does not wait for its certificates"
    if not name.startswith("node-") and service.get("cpu_shares", 0) < CPU_SHARES_MIN:
        yield "may be starved by what computes"


_RULES: Final[tuple[Callable[[str, Service], Iterator[str]], ...]] = (_keys, _privileges, _bounds, _life)


def _volume_problems(services: Mapping[str, Service]) -> Iterator[str]:
    writers: dict[str, list[str]] = {}
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source, target, *mode = volume.split(":")
            readable_only = mode == ["ro"]
            if "docker.sock" in volume or source[:1] in "./~":
                yield f"{name}: {source} of the host is in it"
            if target.startswith("/etc/virial") and source != f"tls-{name}":
                yield f"{name}: has the certificates {source}"
            if target.startswith("/etc/virial") and not readable_only:
                yield f"{name}: may write {source}"
            if source.startswith("tls-") and not target.startswith("/etc/virial") and name != "certs":
                yield f"{name}: has the certificates {source} at {target}"
            if source == "authority" and name != "certs":
                yield f"{name}: has the authority's keys"
            if source.startswith("member-") and source.removeprefix("member-") != name.rpartition("-")[2]:
                yield f"{name}: has the store of another"
            if not readable_only and source != "train" and name != "certs":
                writers.setdefault(source, []).append(name)
    yield from (f"{source}: written by {names}" for source, names in writers.items() if len(names) > 1)


def given(script: str) -> dict[str, set[str]]:
    """The files that certs.sh puts into each volume, by the volume's name up to its number."""
    found: dict[str, set[str]] = {}
    for volume, files in re.findall(r'^ *give "?\S+?"? "?([a-z]+)[-$i"]* (.+)$', script, re.MULTILINE):
        found.setdefault(volume, set()).update(files.split())
    return found


def asked(service: Service) -> set[str]:
    """The files of its certificates that a service's command and environment name."""
    texts = [*map(str, service.get("command", ())), *map(str, service.get("environment", {}).values())]
    return {text.removeprefix("/etc/virial/") for text in texts if text.startswith("/etc/virial/")}
