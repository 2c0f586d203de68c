"""Where a started controller listens, told to local programs in a file of its data directory."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

PORTS_FILE: Final = "ports.json"


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a started controller listens, HOST:PORT; an address that is empty: nowhere."""

    grpc_address: str
    metrics_address: str
    join_address: str = ""


def write_ports(directory: Path, ports: Ports) -> None:
    """Tell local programs where the controller listens. Whole or not at all. Raises OSError."""
    content = {**asdict(ports), "pid": os.getpid()}
    descriptor, name = tempfile.mkstemp(prefix=f".{PORTS_FILE}.", dir=directory)  # made with mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)
        Path(name).replace(directory / PORTS_FILE)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def forget_ports(directory: Path) -> None:
    """Nobody shall find the ports of a former life, which may be another program's by now."""
    with suppress(OSError):
        (directory / PORTS_FILE).unlink(missing_ok=True)
