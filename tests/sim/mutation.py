"""A defect put into the real code, and the worlds in which a checker must catch it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tests.sim.several import SEVERAL
from tests.sim.world import Shape

Patch = tuple[object, str, object]
_AT_THE_END = frozenset({"progress", "books", "copy"})
SEEDS_MAX = 12
SEVERAL_COMMANDS = SEVERAL.commands // SEVERAL.faults


@dataclass(frozen=True, slots=True)
class Mutation:
    """`checkers` that may catch it, in worlds with these `faults` (none: the usual mix); `seed` is tried first."""

    name: str
    checkers: tuple[str, ...]
    patches: Callable[[], tuple[Patch, ...]]
    faults: tuple[str, ...] = ()
    faults_count: int = 12
    seed: int = 1
    # Of the public failures (tests/rows.py).
    rows: tuple[str, ...] = ()
    # In the world of three controllers.
    several: bool = False

    def __str__(self) -> str:
        return self.name

    def seeds(self) -> tuple[int, ...]:
        """In the order in which they are tried."""
        return (self.seed, *(seed for seed in range(1, SEEDS_MAX + 1) if seed != self.seed))

    @property
    def shape(self) -> Shape:
        seconds = 25.0 * self.faults_count
        heals = not _AT_THE_END.isdisjoint(self.checkers)
        shape = Shape(seconds, 0.0, 3 * self.faults_count, self.faults_count, self.faults, self.checkers, heals)
        return replace(shape, commands=SEVERAL_COMMANDS * self.faults_count, several=True) if self.several else shape

    @contextmanager
    def applied(self) -> Generator[None]:
        patches = self.patches()
        former = [(place, name, _own(place, name)) for place, name, _ in patches]
        for place, name, defect in patches:
            setattr(place, name, defect)
        try:
            yield
        finally:
            for place, name, real in former:
                if real is _ABSENT:
                    delattr(place, name)
                else:
                    setattr(place, name, real)


_ABSENT = object()


def _own(place: object, name: str) -> object:
    """As it stands in `place` itself: a static method stays one."""
    return vars(place).get(name, _ABSENT)
