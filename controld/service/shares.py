"""How much of what the server can do each caller may take: people take nothing from agents and controllers, who hold
leases by it, and nobody takes all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from controld.service.failures import CallError
from controld.service.gate import Caller
from virialpb.errors import details_for
from virialpb.identity import Role
from virialpb.reasons import Reason

# One person, or a script of theirs: a quarter of what all people have.
PERSON_PART: Final = 4
# An agent has two streams, twice that while it connects anew; a controller one to each of the others.
MACHINE_MAX: Final = 64
_PEOPLE: Final = frozenset({Role.USER, Role.ADMIN})


class Shares:
    """`what` is counted: "calls are under way"."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, caller: Caller, most: int) -> Generator[None]:
        """One more for the body, of `most` for all people, or for all machines. Raises CallError where there is none.

        Where nobody is asked who they are all share.
        """
        limits = _limits(caller, most)
        for share, limit in limits.items():
            if self._taken[share] >= limit:
                raise CallError(details_for(Reason.OVERLOADED, detail=f"{limit} {self._what}"))
        self._taken.update(limits.keys())
        try:
            yield
        finally:
            for share in limits:
                self._taken[share] -= 1
                if not self._taken[share]:
                    del self._taken[share]


def _limits(caller: Caller, most: int) -> dict[str, int]:
    if caller.identity is None:
        return {"": most}
    if caller.identity.role in _PEOPLE:
        return {"people": most, caller.identity.uri: most // PERSON_PART}
    return {"machines": most, caller.identity.uri: min(most, MACHINE_MAX)}
