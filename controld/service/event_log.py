"""Every committed event as a log entry: what was decided can be followed in the log of whoever led."""

from __future__ import annotations

from controld.replica.hub import WatchHub
from controld.service.telemetry import StructLog
from controld.store.port import CompactedError, StoreError


async def write_events(hub: WatchHub, log: StructLog) -> None:
    """Until the leadership ends. What falls out of the window is left out: the log never holds up the leader."""
    try:
        while True:
            subscription = hub.subscribe()
            try:
                async for batch in subscription:
                    for event in batch.events:
                        log.committed(event, batch.revision)
            except CompactedError:
                continue
    except StoreError:
        return
