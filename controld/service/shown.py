"""What watches show of one commit, made once for all of them: a hundred terminals cost as much as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from controld.core.state import State

K = TypeVar("K")
V = TypeVar("V")
KEPT_MAX: Final = 512
"""A gang of thousands changes what is free on as many nodes; its readers go through them side by side."""


class Shown(Generic[K, V]):
    """`make(key, state)` once a key and commit. What it takes from elsewhere is as of when it was made.

    What was made for an earlier commit, or for the state of another leadership, is not given again. Who gets it must
    not change it: the others have the same one.
    """

    def __init__(self, make: Callable[[K, State], V]) -> None:
        self._make = make
        self._made: dict[K, V] = {}
        self._state: State | None = None
        self._revision = -1

    def of(self, key: K, state: State) -> V:
        if state is not self._state or state.revision != self._revision:
            self._made.clear()
            self._state, self._revision = state, state.revision
        found = self._made.get(key)
        if found is None:
            found = self.anew(key, state)
            while len(self._made) >= KEPT_MAX:
                del self._made[next(iter(self._made))]
            self._made[key] = found
        return found

    def anew(self, key: K, state: State) -> V:
        """Only for the one who asks."""
        return self._make(key, state)
