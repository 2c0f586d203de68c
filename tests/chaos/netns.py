"""Hosts as network namespaces on a bridge that has a namespace of its own, and the means to cut what is between them.

Host 1 to N are 10.201.X.1 to N; the test itself is 10.201.X.254, so its clients are guests of the same network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

TOOLS = ("ip", "nft", "nsenter", "setpriv")
PREFIX = "vc"
GUEST = 254
RULES = """
table bridge lab {
  set ways { type ipv4_addr . ipv4_addr; }
  set services { type ipv4_addr . ipv4_addr . inet_service; }
  chain cutter {
    type filter hook forward priority 0
    ip saddr . ip daddr @ways drop
    ip saddr . ip daddr . tcp dport @services drop
    ip saddr . ip daddr . tcp sport @services drop
  }
}
"""


@dataclass(frozen=True, slots=True)
class Lab:
    """`mark` keeps several of them on one machine apart."""

    mark: int
    hosts: int

    def address(self, host: int) -> str:
        return f"10.201.{self.mark % 250}.{host}"

    def enter(self, host: int) -> list[str]:
        """Before a command: run it on this host. The process that is started is the command itself."""
        return ["nsenter", f"--net=/run/netns/{self._name(str(host))}"]

    def cut(self, host: int, others: Iterable[int]) -> None:
        """Nothing passes in either direction, and nobody is told."""
        for other in others:
            self._drop("ways", host, other)
            self._drop("ways", other, host)

    def cut_way(self, host: int, others: Iterable[int]) -> None:
        """What `host` sends does not arrive; what it is sent does."""
        for other in others:
            self._drop("ways", host, other)

    def cut_port(self, host: int, others: Iterable[int], port: int) -> None:
        """Only what is from or to this port of either, in both directions."""
        for other in others:
            self._drop("services", host, other, port)
            self._drop("services", other, host, port)

    def heal(self) -> None:
        for name in ("ways", "services"):
            self._switch("nft", "flush", "set", "bridge", "lab", name)

    def _drop(self, name: str, source: int, target: int, *port: int) -> None:
        element = " . ".join([self.address(source), self.address(target), *map(str, port)])
        self._switch("nft", "add", "element", "bridge", "lab", name, f"{{ {element} }}")

    def _name(self, part: str) -> str:
        return f"{PREFIX}{self.mark}-{part}"

    def _switch(self, *command: str, text: str | None = None) -> None:
        run(["nsenter", f"--net=/run/netns/{self._name('s')}", *command], text)

    def up(self) -> None:
        switch = self._name("s")
        run(["ip", "netns", "add", switch])
        self._switch("ip", "link", "add", "br0", "type", "bridge")
        self._switch("ip", "link", "set", "br0", "up")
        self._switch("nft", "-f", "-", text=RULES)
        for host in range(1, self.hosts + 1):
            name = self._name(str(host))
            run(["ip", "netns", "add", name])
            run(
                [
                    "ip",
                    "link",
                    "add",
                    "eth0",
                    "netns",
                    name,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"p{host}",
                    "netns",
                    switch,
                ]
            )
            run(["ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0"])
            run(["ip", "-n", name, "link", "set", "lo", "up"])
            run(["ip", "-n", name, "link", "set", "eth0", "up"])
            run(["ip", "-n", switch, "link", "set", f"p{host}", "master", "br0", "up"])
        guest = f"{PREFIX}{self.mark}"
        run(["ip", "link", "add", guest, "type", "veth", "peer", "name", "pg", "netns", switch])
        run(["ip", "addr", "add", f"{self.address(GUEST)}/24", "dev", guest])
        run(["ip", "link", "set", guest, "up"])
        run(["ip", "-n", switch, "link", "set", "pg", "master", "br0", "up"])

    def down(self) -> None:
        """With the last namespace of a pair its other end goes, too."""
        for part in ("s", *(str(host) for host in range(1, self.hosts + 1))):
            with contextlib.suppress(subprocess.CalledProcessError):
                run(["ip", "netns", "del", self._name(part)])


def run(command: list[str], text: str | None = None) -> None:
    subprocess.run(command, input=text, text=True, capture_output=True, check=True, timeout=30)


def require_namespaces() -> None:
    """Skip, with the reason, where hosts cannot be made."""
    if os.geteuid():
        pytest.skip("network namespaces need root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (apt-get install iproute2 nftables util-linux)")


@contextlib.contextmanager
def lab(hosts: int) -> Generator[Lab]:
    """Skips where the kernel does not let us."""
    require_namespaces()
    _remove_left()
    made = Lab(os.getpid(), hosts)
    try:
        made.up()
    except subprocess.CalledProcessError as error:
        made.down()
        pytest.skip(f"no network of namespaces here: {' '.join(error.cmd)}: {error.stderr.strip()}")
    try:
        yield made
    finally:
        made.down()


def _remove_left() -> None:
    """Of runs that were killed."""
    for path in Path("/run/netns").glob(f"{PREFIX}*-*"):
        mark = path.name.removeprefix(PREFIX).partition("-")[0]
        if mark.isdecimal() and not Path(f"/proc/{mark}").exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                run(["ip", "netns", "del", path.name])
