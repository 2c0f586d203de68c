"""How long nothing is acknowledged after a SIGKILL, and whether anything acknowledged is lost.

    python -m benchmarks.failover --json

Three controllers with their etcd members run on this machine as they are deployed, each a process of its own. A client
of the SDK submits one job after another. Killed are, in turn: the controller that leads, the etcd member that leads
(beside the leading controller, and beside another one), and both at once on one host; then whatever is dead is started
again. A figure is the longest time between two acknowledgements from just before the kill on. During each kill of a
member another client puts records into a member that survives, one after another: `raw_etcd_kill_ms` and
`raw_both_kill_ms` are what etcd itself needed. `acked_lost`: jobs that were acknowledged, submitted or cancelled, and
are not so at the end, after all kills. `loop_stall_ms_max`: by how much a timer of a leader's loop was late at most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.backends import PUT
from benchmarks.rack import CONTROLLERS, Rack, StuckError, rack
from benchmarks.writers import now_ns, writing
from controld.store.etcd_client import GrpcWire
from controld.store.etcd_session import EtcdTimes
from controld.store.etcd_wire import WireError
from virial import Client
from virial.models import JobSpec, JobState, Resources, TaskSpec
from virialpb.etcd.v1 import etcd_pb2 as pb

JOB = JobSpec(name="w", resources=Resources(cpu_millis=100, memory_bytes=1 << 20), task=TaskSpec(("true",)))
RECORD_BYTES = 500
WARM_ACKS = 20
RECOVERED_ACKS = 50
WATCHED_SECONDS_MIN = 1.0
RECOVERED_SECONDS_MAX = 60.0
CANCELS = 16


@dataclass
class Acked:
    """What was acknowledged, to be looked for at the end."""

    submitted: list[str] = field(default_factory=list[str])
    cancelled: set[str] = field(default_factory=set[str])
    turns: int = 0

    async def submit(self, client: Client) -> None:
        self.turns += 1
        self.submitted.append((await client.submit_job(JOB, request_id=f"w-{self.turns}")).id)

    async def cancel_all(self, client: Client) -> None:
        """So that the control loop has nothing to look at but what is measured."""
        waiting = [job for job in self.submitted if job not in self.cancelled]

        async def work() -> None:
            while waiting:
                job = waiting.pop()
                await client.cancel_job(job)
                self.cancelled.add(job)

        await asyncio.gather(*(work() for _ in range(CANCELS)))

    async def lost(self, client: Client) -> int:
        """Also counts jobs that two submissions were answered with."""
        jobs = {job.id: job.state for job in await client.list_jobs()}
        gone = sum(job not in jobs for job in self.submitted)
        revived = sum(jobs.get(job, JobState.CANCELLED) is not JobState.CANCELLED for job in self.cancelled)
        return gone + revived + len(self.submitted) - len(set(self.submitted))


@dataclass(frozen=True, slots=True)
class Kill:
    """`member`: of the leading member, so many hosts beyond the leading controller's; None: no member."""

    name: str
    controller: bool
    member: int | None


KILLS = (
    Kill("controld_kill_ms", controller=True, member=None),
    Kill("etcd_kill_ms", controller=False, member=1),
    Kill("etcd_kill_ms", controller=False, member=0),
    Kill("both_kill_ms", controller=True, member=0),
)
BESIDE = "etcd_beside_kill_ms"


async def run_kill(made: Rack, acked: Acked, kill: Kill, gaps_ms: dict[str, list[float]]) -> float:
    """The gap of our client. Leaves everything started again."""
    host = await made.settled()
    leading = (host + (kill.member or 0)) % CONTROLLERS
    await made.lead_etcd(leading)
    if await made.settled() != host:  # the controllers moved too: once more
        return await run_kill(made, acked, kill, gaps_ms)
    made.note_stalls()
    survivor = made.wires[(leading + 1) % CONTROLLERS]
    async with (
        Client(made.cluster.address, timeout_s=RECOVERED_SECONDS_MAX) as client,
        writing(lambda: acked.submit(client)) as acks,
        writing(lambda: put(survivor)) as raw,
    ):
        await until(lambda: len(acks.times_ns) >= WARM_ACKS)
        begin_ns = now_ns()
        if kill.controller:
            made.kill_controller(host)
        if kill.member is not None:
            made.kill_member(leading)
        await asyncio.sleep(WATCHED_SECONDS_MIN)
        await until(lambda: acks.since(begin_ns) >= RECOVERED_ACKS and raw.since(begin_ns) >= RECOVERED_ACKS)
    gap_ms = round(acks.longest_gap_ms(begin_ns), 1)
    gaps_ms.setdefault(kill.name, []).append(gap_ms)
    if kill.member is not None:
        gaps_ms.setdefault(f"raw_{kill.name}", []).append(round(raw.longest_gap_ms(begin_ns), 1))
    if kill.member == 0 and not kill.controller:
        gaps_ms.setdefault(BESIDE, []).append(gap_ms)
    made.cluster.restart_dead()
    await acked.cancel_all(made.client)
    return gap_ms


async def put(wire: GrpcWire) -> None:
    """One record, repeated as the store repeats a commit that is not answered."""
    times = EtcdTimes()
    seconds = times.attempt
    while True:
        try:
            await wire.call(PUT, pb.PutRequest(key=b"raw", value=bytes(RECORD_BYTES)), seconds)
        except WireError:
            seconds = min(2 * seconds, times.attempt_max)
            await asyncio.sleep(times.pause)
        else:
            return


async def until(condition: Callable[[], bool]) -> None:
    """Raises StuckError."""
    try:
        async with asyncio.timeout(RECOVERED_SECONDS_MAX):
            while not condition():  # noqa: ASYNC110 - what the writers do
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise StuckError(f"too little was acknowledged in {RECOVERED_SECONDS_MAX:g} s") from None


async def measure(made: Rack, kills: int, *, quiet: bool) -> dict[str, object]:
    gaps_ms: dict[str, list[float]] = {}
    acked = Acked()
    for turn in range(kills):
        for kill in KILLS:
            if kill.name == "etcd_kill_ms" and (kill.member == 0) is not (turn % 2 == 1):
                continue  # beside the leading controller every other time
            gap_ms = await run_kill(made, acked, kill, gaps_ms)
            if not quiet:
                print(f"{turn + 1:>3} {kill.name:<18}{gap_ms:>9.1f}", file=sys.stderr, flush=True)
    await made.settled()
    made.note_stalls()
    return {
        **{f"{name.removesuffix('_ms')}_median_ms": statistics.median(each) for name, each in gaps_ms.items()},
        "acked": len(acked.submitted) + len(acked.cancelled),
        "kills": 3 * kills,
        **gaps_ms,
        "acked_lost": await acked.lost(made.client),
        "loop_stall_ms_max": round(made.stall_ms_max, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failover", description="Kill leaders, and measure.")
    parser.add_argument("--kills", type=int, default=20, help="of each kind (default: 20)")
    parser.add_argument("--directory", type=Path, help="where the data lies, of a short path")
    parser.add_argument("--json", action="store_true", help="one line of JSON, and nothing else")
    options = parser.parse_args()
    try:
        result = asyncio.run(run(options))
    except StuckError as error:
        sys.exit(f"benchmarks.failover: {error}")
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<28}{value!s:>14}")


async def run(options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="vf-", dir=options.directory) as folder:
        async with rack(Path(folder)) as made:
            return await measure(made, options.kills, quiet=options.json)


if __name__ == "__main__":
    main()
