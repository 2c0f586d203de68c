"""What a controller commits: commands with real transitions, from the leader's queue to the store and back.

    python -m benchmarks.commit --store etcd --inflight 256 --seconds 5 --json

A command places a hold on a node, or releases it: its transition is decided, and node, request, event and counter are
written in the one transaction of all commands that waited. With etcd, three members run on this machine, and the same
client puts records of --record-bytes into them, one a call, in the same run (`raw_etcd_puts_s`): what the group commit
is worth is their `ratio`. `one_*` are the figures with a single command in flight. `rpc_ops_s` is the same through
gRPC: a controld process on the same kind of store, jobs submitted and cancelled by this one. Without --directory the
data lies in a temporary folder, which may be on another disk than a real data directory would be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.backends import Backend, backend
from benchmarks.clients import Call, Figures, drive
from benchmarks.controller import rpc_figures
from controld.clock import SystemClock
from controld.core.commands import AdmitNode, PlaceHold, ReleaseHold
from controld.core.ids import Incarnation, NodeUid
from controld.core.model import Hold
from controld.heap import keep_survivors
from controld.matching.engine import plan
from controld.replica.leader import Leader
from controld.replica.planner import InlinePlanner
from controld.replica.settings import LeaderSettings

NODES = 64


@dataclass
class Holds:
    """Every client holds and releases one node in turn. `number` makes every request id another one."""

    leader: Leader
    number: int = 0
    placed: set[int] = field(default_factory=set[int])

    async def admit(self) -> None:
        for number in range(NODES):
            incarnation = Incarnation(NodeUid(f"node-{number}"), "boot", "guardian")
            await self.leader.submit(AdmitNode(incarnation, f"n{number}", "127.0.0.1", "pidns", 64_000, 64 << 30))

    async def call(self, client: int, turn: int) -> None:
        del turn  # of this round: a client goes on where its last one ended
        self.number += 1
        request, node, owner = str(self.number), NodeUid(f"node-{client % NODES}"), f"client-{client}"
        placed = client in self.placed
        (self.placed.discard if placed else self.placed.add)(client)
        if not placed:
            await self.leader.submit(PlaceHold(request, node, Hold(owner=owner, reason="benchmark")))
        else:
            await self.leader.submit(ReleaseHold(request, node, owner))


@asynccontextmanager
async def leading(made: Backend) -> AsyncGenerator[Holds]:
    store = made.store()
    await store.open()
    leader = Leader(
        store=store,
        clock=SystemClock(),
        rng=random.Random(1),
        planner=InlinePlanner(plan),
        settings=LeaderSettings(),
        identity="benchmark",
    )
    await leader.start()
    holds = Holds(leader)
    await holds.admit()
    try:
        yield holds
    finally:
        await leader.stop()
        await store.close()


async def measure(made: Backend, options: argparse.Namespace) -> dict[str, object]:
    """Ours and raw puts in turn, so that what else this machine does meanwhile meets both."""
    ours, one, raw, raw_one = Figures(), Figures(), Figures(), Figures()
    seconds = options.seconds / options.rounds
    one_seconds = min(2.0, options.seconds) / options.rounds

    async def rounds(call: Call, many: Figures, single: Figures) -> None:
        await drive(call, inflight=options.inflight, seconds=seconds, store_cpu=made.cpu_s, into=many)
        await drive(call, inflight=1, seconds=one_seconds, store_cpu=made.cpu_s, into=single)

    async with leading(made) as holds, AsyncExitStack() as stack:
        put = made.raw(options.record_bytes)
        call = None if put is None else await stack.enter_async_context(put)
        for _ in range(options.rounds):
            await rounds(holds.call, ours, one)
            if call is not None:
                await rounds(call, raw, raw_one)
    rpc = await rpc_figures(made, inflight=options.inflight, seconds=options.seconds) if options.rpc else None
    measured = call is not None
    return {
        "store": options.store,
        "inflight": options.inflight,
        "one_p50_ms": round(one.quantile_ms(0.5), 3),
        "raw_one_p50_ms": round(raw_one.quantile_ms(0.5), 3) if measured else None,
        "one_ratio": round(one.quantile_ms(0.5) / raw_one.quantile_ms(0.5), 2) if measured else None,
        "cpu_us": round(ours.cpu_us, 1),
        "raw_cpu_us": round(raw.cpu_us, 1) if measured else None,
        "store_cpu_us": round(ours.store_cpu_us, 1) if measured else None,
        "raw_store_cpu_us": round(raw.store_cpu_us, 1) if measured else None,
        "cpu_ratio": cpu_ratio(ours, raw) if measured else None,
        "load": round(os.getloadavg()[0], 1),
        "raw_p50_ms": round(raw.quantile_ms(0.5), 3) if measured else None,
        "ours_ops_s": round(ours.ops_s),
        "raw_etcd_puts_s": round(raw.ops_s) if measured else None,
        "ratio": round(ours.ops_s / raw.ops_s, 2) if raw.ops_s else None,
        "rpc_ops_s": None if rpc is None else round(rpc.ops_s),
        "p50_ms": round(ours.quantile_ms(0.5), 3),
        "p99_ms": round(ours.quantile_ms(0.99), 3),
    }


def cpu_ratio(ours: Figures, raw: Figures) -> float:
    """What `ratio` would be if every processor had something to do all the time; steadier on a machine in use."""
    return round((raw.cpu_us + raw.store_cpu_us) / (ours.cpu_us + ours.store_cpu_us), 2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commit", description="Measure what is committed.")
    parser.add_argument("--store", choices=["sqlite", "etcd", "memory"], default="sqlite")
    parser.add_argument("--inflight", type=int, default=256, help="commands waiting at any time")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=4, help="in which ours and raw puts take turns")
    parser.add_argument("--record-bytes", type=int, default=500, help="of a raw put")
    parser.add_argument("--members", type=int, choices=(1, 3, 5), default=3, help="of etcd")
    parser.add_argument("--no-rpc", dest="rpc", action="store_false", help="leave out the controld process")
    parser.add_argument("--directory", type=Path, help="an empty folder on the disk to be measured")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    keep_survivors()  # as controld does
    result = asyncio.run(run(options))
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<18}{value!s:>14}")


async def run(options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="vb-", dir=options.directory) as folder:
        async with backend(options.store, Path(folder), options.members) as made:
            return await measure(made, options)


if __name__ == "__main__":
    main()
