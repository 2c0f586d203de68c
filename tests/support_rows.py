"""Rows of public failures on the pure core: a scenario, and the defects under which it must fail.

A scenario is a function that raises AssertionError when the row's promise is broken. The same function runs on the
real core and on the core with one rule replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from controld.core.ids import JobId
from controld.core.model import JobState
from tests.support_core import World, spec


@dataclass(frozen=True)
class Defect:
    """One rule of the core, replaced by what went wrong elsewhere."""

    name: str
    seed: Callable[[pytest.MonkeyPatch], None]

    def __str__(self) -> str:
        return self.name


Rows = Mapping[str, tuple[Callable[[], None], tuple[Defect, ...]]]


def running(ranks: int = 3, nodes: int = 4, **options: object) -> tuple[World, JobId]:
    """A world with one job that runs."""
    world = World(nodes)
    job = world.submit(spec(ranks, **options))  # pyright: ignore[reportArgumentType]
    world.run(4)
    assert world.job(job).state is JobState.RUNNING
    return world, job


def nodes_of(world: World, job: JobId) -> list[str]:
    """Node names of the current generation, in order of rank."""
    generation = world.state.current(job)
    assert generation is not None
    return [world.state.nodes[m.node].name for m in generation.ranks]


def each_row(rows: Rows) -> pytest.MarkDecorator:
    """Parametrize a test over `row`."""
    params = [pytest.param(row, marks=pytest.mark.row(row), id=f"case_{row.lower()}") for row in rows]
    return pytest.mark.parametrize("row", params)


def each_defect(rows: Rows) -> pytest.MarkDecorator:
    """Parametrize a test over `row` and `defect`."""
    params = [
        pytest.param(row, d, marks=pytest.mark.row(row, defect=d.name), id=f"case_{row.lower()}_{d.name}")
        for row, (_, defects) in rows.items()
        for d in defects
    ]
    return pytest.mark.parametrize(("row", "defect"), params)
