"""Full collections walk only what is new; what is garbage later is still found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from controld import heap


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def collector() -> Iterator[None]:
    callbacks, thresholds = list(gc.callbacks), gc.get_threshold()
    gc.unfreeze()
    gc.disable()
    yield
    gc.enable()
    gc.callbacks[:] = callbacks
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("collector")
def test_what_survived_a_full_collection_is_not_walked_again() -> None:
    heap.keep_survivors()
    heap.keep_survivors()
    assert gc.callbacks.count(heap._freeze_survivors) == 1  # pyright: ignore[reportPrivateUsage]
    alive = Knot()
    gc.collect(1)
    assert any(each is alive for each in gc.get_objects()), "a young collection changes nothing"
    gc.collect()
    assert not any(each is alive for each in gc.get_objects())
    assert gc.get_freeze_count() > 0


@pytest.mark.usefixtures("collector")
def test_garbage_that_is_made_later_is_collected() -> None:
    heap.keep_survivors()
    gc.collect()
    there = weakref.ref(Knot())
    gc.collect()
    assert there() is None


@pytest.mark.usefixtures("collector")
def test_a_load_finds_what_became_garbage_since() -> None:
    heap.keep_survivors()
    alive = Knot()
    gc.collect()
    there = weakref.ref(alive)
    del alive
    gc.collect()
    assert there() is not None
    heap.keep_loaded()
    assert there() is None
