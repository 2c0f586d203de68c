"""Who someone is in a cluster: the SPIFFE URI in a certificate, `spiffe://CLUSTER/ROLE/NAME`.

Standard library only. How certificates are made and read is `virialpb.certificates`; what each role may do is decided
by the controller (`controld.service.roles`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SCHEME: Final = "spiffe://"
# A SPIFFE ID may have 2,048 bytes, a segment of its path letters, digits and these three; nodes have host names.
_CLUSTER: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")
NODE_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


class Role(StrEnum):
    """What a certificate is for. `admin` may do all that `user` may; the two daemons only what is theirs."""

    CONTROLLER = "controller"
    NODE = "node"
    USER = "user"
    ADMIN = "admin"


class IdentityError(ValueError):
    """No identity of a Virial cluster. The message says what is wrong and what one looks like."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`cluster` is the SPIFFE trust domain."""

    cluster: str
    role: Role
    name: str

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.cluster}/{self.role}/{self.name}"


def make_identity(cluster: str, role: Role, name: str) -> Identity:
    """Raises IdentityError for a name that cannot stand in a URI."""
    check_cluster(cluster)
    if not _NAME.fullmatch(name):
        raise IdentityError(
            f"the name '{name[:80]}' must be 1 to 253 letters, digits, '.', '_' and '-', first and last no sign"
        )
    if role is Role.NODE and not NODE_NAME.fullmatch(name):
        raise IdentityError(
            f"the name '{name[:80]}' is not a node's: at most 253 lower-case letters, digits, '.' and '-', a letter or "
            "digit first and last; noded takes no other"
        )
    return Identity(cluster, role, name)


def check_cluster(cluster: str) -> None:
    """Raises IdentityError."""
    if not _CLUSTER.fullmatch(cluster):
        raise IdentityError(
            f"the cluster name '{cluster[:80]}' must be 1 to 63 lower-case letters, digits, '.' and '-', such as rack-7"
        )


def parse_identity(uri: str) -> Identity:
    """Inverse of `Identity.uri`, and nothing more lenient. Raises IdentityError."""
    parts = uri.removeprefix(SCHEME).split("/")
    if not uri.startswith(SCHEME) or len(parts) != 3 or parts[1] not in set(Role):
        roles = "|".join(Role)
        raise IdentityError(f"'{uri[:200]}' is no identity: one is {SCHEME}CLUSTER/({roles})/NAME")
    return make_identity(parts[0], Role(parts[1]), parts[2])
