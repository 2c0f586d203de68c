"""What a store alone can commit: clients with one command in flight each, all that wait going into one transaction.

    python -m benchmarks.commit --store sqlite --inflight 256 --seconds 5 --json

A command puts one record of --record-bytes under one of --keys keys. Without --directory the data lies in a temporary
folder, which may be on another disk than a real data directory would be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from itertools import count
from pathlib import Path

from controld.store.memory import MemoryStore
from controld.store.port import Store, StoredChange
from controld.store.sqlite import SqliteStore

OPERATIONS_MAX = 512  # of one transaction, as the leader's writer has it
WARM_UP_S = 0.5

Waiting = tuple[StoredChange, asyncio.Future[None]]


async def measure(
    store: Store, *, inflight: int, seconds: float, record_bytes: int, keys: int
) -> dict[str, float | int]:
    await store.open()
    leader = await store.campaign("benchmark")
    queue: asyncio.Queue[Waiting] = asyncio.Queue()
    latencies_s: list[float] = []
    batches = 0
    loop = asyncio.get_running_loop()
    begin = loop.time() + WARM_UP_S
    end = begin + seconds

    async def client(number: int) -> None:
        value = bytes(record_bytes)
        for turn in count():
            sent = loop.time()
            if sent >= end:
                return
            done: asyncio.Future[None] = loop.create_future()
            queue.put_nowait((StoredChange(f"k/{(number + turn * inflight) % keys:07d}", value), done))
            await done
            if sent >= begin:
                latencies_s.append(loop.time() - sent)

    async def writer() -> None:
        nonlocal batches
        for seq in count(1):
            batch: dict[str, StoredChange] = {}
            futures: list[asyncio.Future[None]] = []
            change, done = await queue.get()
            while True:
                batch[change.key] = change
                futures.append(done)
                if queue.empty() or len(batch) == OPERATIONS_MAX:
                    break
                change, done = queue.get_nowait()
            await store.commit(leader, seq, list(batch.values()))
            batches += loop.time() >= begin
            for done in futures:
                done.set_result(None)

    writing = asyncio.ensure_future(writer())
    await asyncio.gather(*(client(number) for number in range(inflight)))
    writing.cancel()
    loading = time.perf_counter()
    records = len((await store.load()).records)
    loading = time.perf_counter() - loading
    size_bytes = (await store.status()).size_bytes
    await store.close()
    cuts = statistics.quantiles(latencies_s, n=100)
    return {
        "commands_per_second": round(len(latencies_s) / seconds),
        "commits_per_second": round(batches / seconds),
        "latency_p50_ms": round(cuts[49] * 1e3, 3),
        "latency_p99_ms": round(cuts[98] * 1e3, 3),
        "load_records": records,
        "load_ms": round(loading * 1e3, 1),
        "size_bytes": size_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commit", description="Measure what a store can commit.")
    parser.add_argument("--store", choices=["sqlite", "memory"], default="sqlite")
    parser.add_argument("--inflight", type=int, default=256, help="commands waiting at any time")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--record-bytes", type=int, default=500)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--directory", type=Path, help="an empty folder on the disk to be measured")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        store = SqliteStore(Path(folder) / "data") if options.store == "sqlite" else MemoryStore()
        figures = asyncio.run(
            measure(
                store,
                inflight=options.inflight,
                seconds=options.seconds,
                record_bytes=options.record_bytes,
                keys=options.keys,
            )
        )
    result = {"store": options.store, "inflight": options.inflight, **figures}
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<22}{value:>14}")


if __name__ == "__main__":
    main()
