"""What a new node is given to join a cluster: one file with a secret, and whom to believe. Standard library only.

virial-join-1 CLUSTER NODE SECRET
-----BEGIN CERTIFICATE-----
...
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

MARK: Final = "virial-join-1"
BYTES_MAX: Final = 256 << 10
_SECRET: Final = re.compile(r"[A-Za-z0-9_-]{20,256}")


class JoinFileError(ValueError):
    """Not a join file. The message never holds any of it: it may be a secret."""


@dataclass(frozen=True, slots=True)
class JoinFile:
    """`ca`: PEM of the cluster's authorities."""

    cluster: str
    node: str
    secret: str = field(repr=False)
    ca: str

    @property
    def text(self) -> str:
        return f"{MARK} {self.cluster} {self.node} {self.secret}\n{self.ca.strip()}\n"


def parse_join_file(text: str) -> JoinFile:
    """Raises JoinFileError."""
    first, _, rest = text.strip().partition("\n")
    words = first.split()
    if len(words) != 4 or words[0] != MARK or not _SECRET.fullmatch(words[3]):
        raise JoinFileError(f"its first line is not '{MARK} CLUSTER NODE SECRET'")
    if "-----BEGIN CERTIFICATE-----" not in rest:
        raise JoinFileError("no certificate follows its first line; copy the whole file that `virial` wrote")
    return JoinFile(words[1], words[2], words[3], rest.strip() + "\n")
