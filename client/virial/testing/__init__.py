"""A cluster in memory for tests of programs that use Virial: no processes, no network, no waiting.

    from virial.testing import FakeCluster

    cluster = FakeCluster(nodes=4)
    client = cluster.client()  # a SyncClient, as far as your program can tell
    job = client.submit_job(spec)
    cluster.run(3)  # three seconds of virtual time
    cluster.lose_node("node-1")

It decides with the controller's own code (transitions, reconciliation, matching), so that jobs wait, start, restart
and end here for the reasons for which they do so in a cluster. Needs the extra: `pip install 'virial[testing]'`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from virial.testing.client import FakeClient as FakeClient
    from virial.testing.cluster import FakeCluster as FakeCluster
    from virial.testing.world import StalledError as StalledError

_HOMES = {
    "FakeClient": "virial.testing.client",
    "FakeCluster": "virial.testing.cluster",
    "StalledError": "virial.testing.world",
}

__all__ = ["FakeClient", "FakeCluster", "StalledError"]


if not TYPE_CHECKING:  # to a type checker, a name that is not imported above does not exist

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'virial.testing' has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(home), name)
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.split(".")[0] == "virial":
                raise
            message = (
                f"virial.testing needs the extra 'testing' ({error.name} is missing): pip install 'virial[testing]'"
            )
            raise ModuleNotFoundError(message, name=error.name) from error
