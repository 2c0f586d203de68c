"""Several controllers and the members of their store, in a line each: who leads, who follows, who is missing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from virial.models import Controllers

# (of one, of several), in the order in which they are told.
_ROLES: Final = {
    "LEADS": ("leads", "lead"),
    "FOLLOWS": ("follows", "follow"),
    "VOTES": ("votes", "vote"),
    "LOADING": ("loads its copy", "load their copies"),
    "LEARNS": ("has no vote yet", "have no vote yet"),
    "SILENT": ("does not answer", "do not answer"),
}


def rows(found: Controllers) -> list[tuple[str, str]]:
    """(label, text) of each line; an embedded store has no members, and so no line."""
    controllers = _sentence((c.role, c.identity or c.address) for c in found.controllers)
    members = _sentence((m.role, m.name or m.peer_url) for m in found.members)
    return [row for row in (("controllers", controllers), ("members", members)) if row[1]]


def _sentence(roles: Iterable[tuple[str, str]]) -> str:
    names: dict[str, list[str]] = {}
    for role, name in roles:
        names.setdefault(role, []).append(name)
    known = sorted(names, key=lambda role: list(_ROLES).index(role) if role in _ROLES else len(_ROLES))
    return "; ".join(
        f"{', '.join(sorted(names[role]))} {_ROLES.get(role, (role, role))[len(names[role]) > 1]}" for role in known
    )
