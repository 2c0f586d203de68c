"""The settings of a controller on a command line: a flag for each, and what the layers say together."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from controld.config import DEFAULT_FILE, Config, load_config
from virialpb.layered import ConfigError, Loaded, describe, load

CONFIG_VARIABLE = "VIRIAL_CONTROLD_CONFIG"
# (metavar, what it is for) of each setting.
HELP: Final[Mapping[str, tuple[str, str]]] = {
    "data_dir": ("DIR", "the state; keep it on a disk that keeps what fsync promised"),
    "listen": ("HOST:PORT", "for agents, commands and the SDK; port 0 takes a free one (see ports.json)"),
    "metrics_listen": ("HOST:PORT", "Prometheus metrics; off for none"),
    "insecure": ("true|false", "serve other machines without TLS, in a network you trust"),
    "identity": ("NAME", "this controller's name in `virial status` [default: the host name]"),
    "peers": ("HOST:PORT,...", "the other controllers of this cluster"),
    "advertise": ("HOST:PORT", "by which they, agents and clients reach this one [default: listen]"),
    "store.kind": ("KIND", "sqlite, etcd, or memory (forgets everything at the end)"),
    "store.size_max": ("SIZE", "refuse new work rather than grow beyond it"),
    "store.member_dir": ("DIR", "of the etcd member beside this controller (`controld member`)"),
    "store.endpoints": ("ENDPOINT,...", "an etcd by themselves: https://HOST:PORT or unix:/PATH"),
    "store.prefix": ("PREFIX", "keeps several clusters apart in one etcd"),
    "store.open_timeout": ("DURATION", "how long a start waits for a member with a majority"),
    "store.ca": ("FILE", "PEM of the authority that signed etcd's certificate"),
    "store.certificate": ("FILE", "PEM of the certificate shown to etcd"),
    "store.key": ("FILE", "PEM of its key"),
    "tls.certificate": ("FILE", "PEM of the certificate shown to agents and clients"),
    "tls.key": ("FILE", "PEM of its key"),
    "tls.client_ca": ("FILE", "PEM of the authority that must have signed theirs"),
    "tls.issuer_certificate": ("FILE", "PEM of the issuer that signs certificates of nodes"),
    "tls.issuer_key": ("FILE", "PEM of its key"),
    "tls.join_listen": ("HOST:PORT", "where new nodes join by a token, such as 0.0.0.0:7702; off for nowhere"),
    "lease.renew_interval": ("DURATION", "how often agents beat"),
    "lease.grace": ("DURATION", "waited after a lease's end before its devices are granted again"),
    "lease.fence_after": ("DURATION", "a task unheard of for so long is stopped, where its job names no other time"),
    "lease.recovery": ("DURATION", "how long agents may be without a controller when it restarts"),
    "election.ping_interval": ("DURATION", "how often the leader shows its peers that it is there"),
    "election.takeover": ("DURATION", "after so long a silence of the leader another may take its place"),
    "election.proof_max": ("DURATION", "the leader is silent when its last proof of leadership is older"),
    "loop.prepare_timeout": ("DURATION", "for a rank to get ready"),
    "loop.reconnect": ("DURATION", "for agents to find a new leader before they are suspect"),
    "loop.plan_deadline": ("DURATION", "for one plan of the planner"),
    "keep.requests": ("DURATION", "how long a retried request is answered as the first time"),
    "keep.events": ("COUNT", "how many events are kept"),
    "keep.ended_jobs": ("COUNT", "how many ended jobs are kept"),
    "log.level": ("LEVEL", "debug, info, warning, error"),
    "log.format": ("FORMAT", "auto (text on a terminal, else json), json, text"),
}


def add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help=f"TOML file (default: {DEFAULT_FILE} where it exists)")
    group = parser.add_argument_group("settings")
    for name, default in _settings().items():
        flag = "--" + name.replace(".", "-").replace("_", "-")
        metavar, what = HELP.get(name, ("VALUE", ""))
        text = f"{what} [default: {default}]" if default else what
        if default in ("true", "false"):
            group.add_argument(flag, dest=_destination(name), nargs="?", const="true", metavar=metavar, help=text)
        else:
            group.add_argument(flag, dest=_destination(name), metavar=metavar, help=text)


def load_settings(options: argparse.Namespace) -> Loaded[Config]:
    """Raises ConfigError."""
    given: str | None = options.config or os.environ.get(CONFIG_VARIABLE)
    path = Path(given or DEFAULT_FILE)
    text: str | None = None
    if given is not None or path.exists():
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError([f"cannot read the configuration file {path}: {reason}"]) from error
    flags = {name: getattr(options, _destination(name)) for name in _settings()}
    return load_config(toml_text=text, toml_name=str(path), environ=os.environ, flags=flags)


def _settings() -> dict[str, str]:
    """Every setting by its dotted name, with its default as it would be written."""
    defaults = load(Config, toml_text=None, toml_name="", environ={}, prefix="", flags={})
    return {name: value for name, value, _ in describe(defaults)}


def _destination(name: str) -> str:
    return "set_" + name.replace(".", "__")
