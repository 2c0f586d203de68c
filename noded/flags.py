"""noded's command line: each setting with what it is for."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from noded.config import DEFAULT_FILE, PREFIX, NodedConfig
from virialpb.layered import describe, load, settings
from virialpb.version import Version

# (metavar, what it is for, what stands in for it where it is not set)
HELP: Final[Mapping[str, tuple[str, str, str]]] = {
    "name": ("NAME", "the node's name in the cluster", "the host name"),
    "data_dir": ("DIR", "what must outlive a restart, and the tasks' logs", ""),
    "runtime_dir": ("DIR", "sockets", "`run` in the data directory"),
    "controllers": ("HOST:PORT,...", "every controller of the cluster", ""),
    "advertise_address": (
        "ADDRESS",
        "where ranks on other nodes reach this one",
        "of the route to the controller",
    ),
    "bind_address": ("ADDRESS", "where the rendezvous port of rank 0 listens", ""),
    "cpu": ("CORES", "cores offered, such as 16 or 500m", "all there are"),
    "memory": ("SIZE", "memory offered, such as 80GiB", "all there is"),
    "labels": ("NAME=VALUE,...", "for node_constraints of jobs", "none"),
    "allow_root_tasks": ("true|false", "jobs without task.user run as root", ""),
    "fencing": ("HOW", "how tasks are contained: auto (the best the host allows), pidns, weak", ""),
    "rdl": ("FILE", "devices and links declared by hand", "only what is found"),
    "metrics_listen": ("HOST:PORT", "Prometheus metrics; port 0 takes a free one (see ports.json), off for none", ""),
    "log_format": ("FORMAT", "auto (text on a terminal, else json), json, text", ""),
    "log_level": ("LEVEL", "debug, info, warning, error", ""),
    "insecure": ("true|false", "go without TLS to other machines, in a network you trust", ""),
    "tls.ca": ("FILE", "PEM of the authority that signed the controllers' certificates", "no TLS"),
    "tls.certificate": ("FILE", "PEM of this node's certificate", "none"),
    "tls.key": ("FILE", "PEM of its key", "none"),
    "join_token_file": ("FILE", "of `virial admin token create`; read while this node has no certificate", "none"),
    "join_controllers": ("HOST:PORT,...", "where nodes join", "port 7702 of each controller"),
    "collect.inventory_period": ("DURATION", "how often devices are looked for", ""),
    "collect.readings_period": ("DURATION", "how often temperatures, links and use are read", ""),
}
EPILOG: Final = f"""\
Every setting may also stand in the --config file (TOML) or in the environment, as {PREFIX}__NAME, and a flag wins.
Tasks and their guardian outlive noded: start it again and it finds them.

exit status: 0 stopped, 1 cannot start or go on, 2 settings

examples:
  noded --controllers ctl-1:7700 --tls-ca ca.pem --tls-certificate node.pem --tls-key node.key
  noded --controllers ctl-1:7700 --join-token-file node-7.join  # the first start of a new node
  noded --data-dir ~/noded --controllers 127.0.0.1:7700        # without root
"""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="noded",
        description="Node agent: reports what a node has, runs the tasks it is given a lease for.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    found.add_argument("--version", action=Version)
    found.add_argument(
        "--config", metavar="FILE", type=Path, help=f"TOML file with settings [default: {DEFAULT_FILE} where it exists]"
    )
    found.add_argument("--check-config", action="store_true", help="check the settings and exit")
    found.add_argument("--print-config", action="store_true", help="print each setting, and where it came from")
    found.add_argument(
        "--kill-tasks-on-exit", action="store_true", help="on SIGTERM stop the tasks and their guardian too"
    )
    group = found.add_argument_group("settings")
    built_in = load(NodedConfig, toml_text=None, toml_name="", environ={}, prefix="", flags={})
    defaults = {name: value for name, value, _ in describe(built_in)}
    for setting in settings(NodedConfig):
        metavar, what, otherwise = HELP.get(setting.name, ("VALUE", "", ""))
        text = f"{what} [default: {otherwise or defaults[setting.name]}]"
        if setting.switch:
            group.add_argument(setting.flag, dest=setting.name, nargs="?", const="true", metavar=metavar, help=text)
        else:
            group.add_argument(setting.flag, dest=setting.name, metavar=metavar, help=text)
    return found
