"""Three controllers and their members, hurt in every way that a machine or a network can: what clients saw is
linearizable, nothing acknowledged is lost, one leader writes in an epoch, and all goes on after the heal."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable

import pytest

from tests.chaos.netns import GUEST
from tests.chaos.rack import LONG, SEED
from tests.chaos.replicas import AGENTS, CONTROLLERS, DISK_HOST, HANG_SECONDS, PEER, Racks, racks
from tests.chaos.traffic import Traffic
from virial import Client
from virial.models import JobSpec, JobState, Resources, TaskSpec

pytestmark = [pytest.mark.root, pytest.mark.timeout(1800)]

Fault = Callable[[Racks, int, random.Random], Awaitable[None]]
"""Of the leading controller's host. Returns when it is over; whatever is dead then is started again."""


async def kill_controller(made: Racks, leader: int, rng: random.Random) -> None:
    made.signal_controller(leader, signal.SIGKILL)
    await asyncio.sleep(rng.uniform(0.5, 1.5))


async def kill_etcd_leader(made: Racks, leader: int, rng: random.Random) -> None:
    made.signal_etcd(await made.etcd_leader(), signal.SIGKILL)
    await asyncio.sleep(rng.uniform(0.5, 1.5))


async def kill_both(made: Racks, leader: int, rng: random.Random) -> None:
    made.signal_etcd(leader, signal.SIGKILL)
    made.signal_controller(leader, signal.SIGKILL)
    await asyncio.sleep(rng.uniform(0.5, 1.5))


async def pause_controller(made: Racks, leader: int, rng: random.Random) -> None:
    """It goes on in the belief that it leads."""
    made.signal_controller(leader, signal.SIGSTOP)
    await asyncio.sleep(rng.uniform(1.0, 2.5))
    made.signal_controller(leader, signal.SIGCONT)


async def pause_etcd_leader(made: Racks, leader: int, rng: random.Random) -> None:
    host = await made.etcd_leader()
    made.signal_etcd(host, signal.SIGSTOP)
    await asyncio.sleep(rng.uniform(1.0, 2.5))
    made.signal_etcd(host, signal.SIGCONT)


async def pause_both(made: Racks, leader: int, rng: random.Random) -> None:
    made.signal_controller(leader, signal.SIGSTOP)
    made.signal_etcd(leader, signal.SIGSTOP)
    await asyncio.sleep(rng.uniform(1.0, 2.5))
    made.signal_controller(leader, signal.SIGCONT)
    await asyncio.sleep(rng.uniform(0, 0.5))
    made.signal_etcd(leader, signal.SIGCONT)


async def cut_leader(made: Racks, leader: int, rng: random.Random) -> None:
    """From its peers; clients and agents reach it all the same."""
    made.lab.cut(leader, made.others(leader))
    await asyncio.sleep(rng.uniform(1.5, 3.5))
    made.lab.heal()


async def cut_leader_off(made: Racks, leader: int, rng: random.Random) -> None:
    made.lab.cut(leader, [*made.others(leader), AGENTS, GUEST])
    await asyncio.sleep(rng.uniform(1.5, 3.5))
    made.lab.heal()


async def cut_member(made: Racks, leader: int, rng: random.Random) -> None:
    """Only the leader's member: the pings of the leader still flow."""
    made.lab.cut_port(leader, made.others(leader), PEER)
    await asyncio.sleep(rng.uniform(1.5, 3.5))
    made.lab.heal()


async def cut_one_way(made: Racks, leader: int, rng: random.Random) -> None:
    """Either what the leader's host says is lost, or what it is told."""
    for source, targets in rng.choice([[(leader, made.others(leader))], [(o, [leader]) for o in made.others(leader)]]):
        made.lab.cut_way(source, targets)
    await asyncio.sleep(rng.uniform(1.5, 3.5))
    made.lab.heal()


async def cut_everyone(made: Racks, leader: int, rng: random.Random) -> None:
    """There is no majority at all for a while."""
    for host in CONTROLLERS:
        made.lab.cut(host, made.others(host))
    await asyncio.sleep(rng.uniform(1.0, 2.0))
    made.lab.heal()


async def fill_disk(made: Racks, leader: int, rng: random.Random) -> None:
    """Of the member that leads the others; etcd ends by it, and is started again for when there is room."""
    await made.lead_etcd(DISK_HOST)
    await asyncio.to_thread(made.disk.fill)
    await asyncio.sleep(rng.uniform(1.5, 3.0))
    made.disk.empty()


async def slow_disk(made: Racks, leader: int, rng: random.Random) -> None:
    """Of the member that leads the others: each of its writes takes a tenth of a second."""
    await made.lead_etcd(DISK_HOST)
    pid = made.etcd(DISK_HOST)
    if pid is None or not made.disk.device:
        return
    made.disk.slow(pid, 10)
    await asyncio.sleep(rng.uniform(2.0, 4.0))
    made.disk.fast()


SHORT: tuple[Fault, ...] = (cut_member, kill_both, pause_controller, cut_one_way)
ALL: tuple[Fault, ...] = (
    *(kill_controller, kill_etcd_leader, kill_both, pause_controller, pause_etcd_leader, pause_both),
    *(cut_leader, cut_leader_off, cut_member, cut_one_way, cut_everyone, fill_disk, slow_disk),
)
ROUNDS = 4
KILLS_MAX = 6


async def hurt(made: Racks, traffic: Traffic, looking: Client, fault: Fault, rng: random.Random) -> None:
    """One fault, and then everything has to go on: every client is answered, every controller is heard."""
    leader = await made.settled(looking)
    await asyncio.sleep(rng.uniform(0, 0.3))
    await fault(made, leader, rng)
    made.restart_dead()
    await traffic.progress()
    await made.settled(looking)


async def gang_runs(client: Client) -> bool:
    job = await client.get_job("gang")
    return job.state is JobState.RUNNING and (job.generation, job.restarts) == (1, 0)


async def until_gang_runs(client: Client) -> None:
    spec = JobSpec(
        name="gang", resources=Resources(cpu_millis=100, memory_bytes=64 << 20), task=TaskSpec(("sleep", "86400"))
    )
    await client.submit_job(spec, job_id="gang", request_id="gang")
    async with asyncio.timeout(HANG_SECONDS):
        while not await gang_runs(client):  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.1)


async def test_what_clients_see_is_linearizable_whatever_befalls_three_controllers() -> None:
    rng = random.Random(SEED)
    faults = [f for _ in range(ROUNDS) for f in rng.sample(ALL, len(ALL))] if LONG else list(SHORT)
    async with racks() as made, Client(made.addresses, timeout_s=HANG_SECONDS) as looking:
        await until_gang_runs(looking)
        traffic = Traffic(made.addresses, SEED)
        traffic.start()
        await traffic.progress()
        for fault in faults:
            await hurt(made, traffic, looking, fault, rng)
        await traffic.stop()
        await traffic.read_all()
        violations = await asyncio.to_thread(traffic.violations)
        assert not violations, f"seed {SEED}:\n" + "\n".join(violations)
        epochs = made.epochs()
        assert len(epochs) == len(set(epochs)), f"two led in one epoch: {sorted(epochs)}"
        assert len(epochs) > 2, "the leadership has moved"
        assert await gang_runs(looking), "no gang is restarted for what befalls controllers"
        assert not made.tracebacks()
        assert traffic.operations > (5_000 if LONG else 500)


async def test_the_history_catches_a_leader_that_reads_without_a_proof() -> None:
    async with racks("tests.chaos.stale_controld") as made, Client(made.addresses, timeout_s=HANG_SECONDS) as looking:
        former = await made.settled(looking)
        others = [made.addresses[host - 1] for host in made.others(former)]
        made.lab.cut(former, made.others(former))
        await made.other_leader(former)
        writing = Traffic(others, SEED, clients=4, readers=0)
        reading = Traffic([made.addresses[former - 1]], SEED, clients=0, readers=4, holds=writing.holds)
        writing.start()
        reading.start()
        for _ in range(2):
            await writing.progress(5)
            await reading.progress(5)
        await writing.stop()
        await reading.stop()
        found = await asyncio.to_thread(writing.violations)
        assert any("none of these can be next" in one for one in found), found


async def test_the_history_catches_a_leader_that_answers_before_it_commits() -> None:
    rng = random.Random(SEED)
    async with racks("tests.chaos.hasty_controld") as made, Client(made.addresses, timeout_s=HANG_SECONDS) as looking:
        traffic = Traffic(made.addresses, SEED, readers=0, once=True)
        traffic.start()
        await traffic.progress()
        found: list[str] = []
        for _ in range(KILLS_MAX):  # one that hits between two commits loses nothing, nor one of who leads no more
            await hurt(made, traffic, looking, kill_controller, rng)
            await traffic.read_all()
            found = await asyncio.to_thread(traffic.violations)
            if found:
                break
        await traffic.stop()
        assert any("none of these can be next" in one for one in found), found
