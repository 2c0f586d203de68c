"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from controld.store.port import Store
from tests.support_store import KINDS, Kind


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kind]:
    """Each kind of store in turn, empty."""
    kind = KINDS[request.param](tmp_path)
    with kind.stack:
        yield kind


@pytest.fixture
async def store(kind: Kind) -> AsyncIterator[Store]:
    """An open handle on an empty store of each kind."""
    store = kind.make()
    await store.open()
    yield store
    await store.close()
