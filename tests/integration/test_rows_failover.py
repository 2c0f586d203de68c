"""Row F7: fail-over back and forth, each time with other settings; in virtual time, and with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from controld.core.commands import SubmitJob
from controld.core.ids import Epoch
from controld.core.model import JobState, Liveness
from controld.core.spec import SECOND_NS
from controld.replica import election
from controld.replica.election import MS_NS, Knowledge, TakeOver, Timings, Why
from controld.replica.leader import Leader, Term
from controld.replica.observe import LogName
from controld.replica.replica import Replica
from controld.store import guard
from controld.store.memory import MemoryDisk
from tests import support_etcd
from tests.support_agents import SUSPECT_S, cluster_with, end, events, job_generation, job_state, liveness
from tests.support_controllers import CONTROLD, HANG_SECONDS, JOB, Controllers
from tests.support_core import spec
from tests.support_election import Cluster, Member, submit
from tests.support_replica import run
from tests.support_rows import Defect, Rows, each_defect, each_row
from virial import Client

Patch = pytest.MonkeyPatch

# F7: a backup that was told to take a new configuration led beside the leader, and a second takeover failed.


def fail_over_back_and_forth() -> None:
    """Whoever restarts does so with other settings than the rest; none of it is felt by an agent or a gang."""

    async def main() -> None:
        cluster, agents = await cluster_with("n0", "n1")
        leader = await cluster.leader()
        await submit(leader, SubmitJob("r1", spec(2)))
        await cluster.until(lambda: job_state(leader) is JobState.RUNNING or None)
        epochs = [Epoch(0, 0)]
        for turn in range(6):
            reconfigure(cluster, turn)
            standby = cluster.followers()[turn % 2]
            await standby.stop()
            await standby.start()
            await cluster.settled()
            assert cluster.takeovers() == 1 + turn, "no standby takes over because it was started"
            leader = await cluster.leader()
            if turn % 3 == 0:
                await leader.stop()
            elif turn % 3 == 1:
                await leader.kill()
            else:  # it goes on, as a standby
                assert leader.replica is not None
                assert await leader.replica.hand_over()
            successor = await cluster.leader(but=leader)
            if leader.replica is None:
                await leader.start()
            await cluster.settled()
            await asyncio.sleep(SUSPECT_S)
            assert [m.leads for m in cluster.members].count(True) == 1
            assert cluster.takeovers() == 2 + turn
            assert successor.replica is not None
            epochs.append(successor.replica.epoch)
            assert epochs[-1] > epochs[-2]
            await submit(successor, SubmitJob(f"more-{turn}", spec(9)))
            assert {liveness(successor, agent) for agent in agents} == {Liveness.LIVE}
            assert (job_state(successor), job_generation(successor)) == (JobState.RUNNING, 1)
            assert not {"node.suspect", "node.expired"} & set(events(successor))
        await end(cluster, agents)

    run(main)


def reconfigure(cluster: Cluster, turn: int) -> None:
    """For those that start from here on."""
    base = cluster.settings
    limits = replace(base.limits, grace_ns=(1 + turn % 3) * SECOND_NS, resend_ns=base.limits.resend_ns + turn)
    cluster.settings = replace(base, limits=limits, renew_interval_ms=1000 + 100 * turn, events_max=9000 + turn)
    cluster.timings = Timings(ping_interval_ns=(100 + 10 * turn) * MS_NS, takeover_ns=(400 + 40 * turn) * MS_NS)


def a_standby_with_the_name_of_another_store_begins_no_cluster_beside() -> None:
    """The new configuration names a store that is empty: a typing error in store.prefix."""

    async def main() -> None:
        cluster, agents = await cluster_with("n0")
        leader = await cluster.leader()
        strayed = cluster.followers()[0]
        await strayed.stop()
        strayed.own_disk = MemoryDisk()
        await strayed.start()
        await asyncio.sleep(30)
        assert [m.name for m in cluster.members if m.leads] == [leader.name]
        assert strayed.log.of(LogName.STORE_DOUBTED) == [{"peers": ", ".join(others_of(cluster, strayed))}]
        await leader.kill()
        successor = await cluster.leader(but=leader)
        assert successor is not strayed
        await asyncio.sleep(30)
        assert [m.name for m in cluster.members if m.leads] == [successor.name]
        await strayed.stop()
        strayed.own_disk = None
        await strayed.start()
        await leader.start()
        await cluster.settled()
        await end(cluster, agents)

    run(main)


def others_of(cluster: Cluster, member: Member) -> list[str]:
    return sorted(other.address for other in cluster.members if other is not member)


def begins_a_cluster_in_any_empty_store(patch: Patch) -> None:
    patch.setattr(election, "_begin", lambda now_ns, known, timings: TakeOver(0, Why.VACANT))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


def takes_itself_for_the_leader_at_its_start(patch: Patch) -> None:
    patch.setattr(Knowledge, "own", property(lambda known: known.incumbent is not None and known.heard_ns is None))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType, reportUnknownMemberType]


def one_that_led_never_follows_again(patch: Patch) -> None:
    real = Replica._lead

    async def lead(replica: Replica, term: Term) -> None:
        await real(replica, term)
        await asyncio.Event().wait()

    patch.setattr(Replica, "_lead", lead)


def keeps_what_it_handed_over(patch: Patch) -> None:
    patch.setattr(Leader, "step_down", lambda leader, error: leader.release())  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType, reportUnknownMemberType]
    patch.setattr(guard, "require_leadership", lambda head, leadership: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    patch.setattr(guard, "already_applied", lambda head, leadership, seq: False)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


ROWS: Rows = {
    "F7": (
        fail_over_back_and_forth,
        (
            Defect("takes_itself_for_the_leader_at_its_start", takes_itself_for_the_leader_at_its_start),
            Defect("one_that_led_never_follows_again", one_that_led_never_follows_again),
            Defect("keeps_what_it_handed_over", keeps_what_it_handed_over),
        ),
    ),
}
OTHER_HALVES: Rows = {
    "F7": (
        a_standby_with_the_name_of_another_store_begins_no_cluster_beside,
        (Defect("begins_a_cluster_in_any_empty_store", begins_a_cluster_in_any_empty_store),),
    ),
}


@each_row(ROWS)
def test_the_row_holds(row: str) -> None:
    ROWS[row][0]()


@each_defect(ROWS)
def test_the_row_catches(row: str, defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    defect.seed(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        ROWS[row][0]()


@each_row(OTHER_HALVES)
def test_the_other_half_holds(row: str) -> None:
    OTHER_HALVES[row][0]()


@each_defect(OTHER_HALVES)
def test_the_other_half_catches(row: str, defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    defect.seed(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        OTHER_HALVES[row][0]()


# -- with processes


TAKES_ITSELF_FOR_THE_LEADER = f"""
from controld.replica.election import Knowledge
Knowledge.own = property(lambda known: known.incumbent is not None and known.heard_ns is None)
{CONTROLD}"""
# A busy machine is no silence here.
PATIENT = ("--election-takeover", "3s")


async def back_and_forth(controllers: Controllers) -> None:
    names = controllers.names
    for name in names:
        controllers.start(name, *PATIENT)
    await controllers.listened_to()
    leader = await controllers.acked_by(*names)
    before = sorted(controllers.leaderships())
    # A standby first: nothing of what it is told may make it lead.
    standby = next(name for name in names if name != leader)
    await restart(controllers, standby, *PATIENT, "--election-ping-interval", "150ms", "--keep-events", "500")
    await controllers.listened_to()
    assert sorted(controllers.leaderships()) == before, "a standby took over because it was started"
    for flags in (
        (*PATIENT, "--lease-fence-after", "30s", "--lease-grace", "3s"),
        ("--election-takeover", "2s", "--lease-renew-interval", "2s"),
        (*PATIENT, "--peers", ",".join(reversed(controllers.addresses.values()))),
        (*PATIENT, "--keep-requests", "2d"),
    ):
        await controllers.listened_to()
        leader = await controllers.acked_by(*names)
        await restart(controllers, leader, *flags)
        successor = await controllers.acked_by(*(name for name in names if name != leader))
        assert successor != leader
        one_at_a_time(controllers)


async def restart(controllers: Controllers, name: str, *flags: str) -> None:
    """As an operator does to have it read its configuration."""
    process = controllers.processes[name]
    async with asyncio.timeout(HANG_SECONDS):
        while not controllers.serves(name):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, HANG_SECONDS) == 0
    controllers.start(name, *flags)


def one_at_a_time(controllers: Controllers) -> None:
    """Commits are in the order of their leaderships: none comes between two of another's."""
    left = iter(leader for _, leader in sorted(controllers.leaderships()))
    for leader in controllers.leaders():
        assert leader in left, "two led at a time"


async def play(directory: Path, program: str) -> Controllers:
    member = support_etcd.shared()
    await member.ready()
    controllers = Controllers(directory, member.processes[0].config.endpoint, program)
    controllers.writing = [asyncio.create_task(controllers.write(name)) for name in controllers.names]
    try:
        await back_and_forth(controllers)
        async with Client([*controllers.addresses.values()], timeout_s=HANG_SECONDS) as client:
            there = {job.id for job in await client.list_jobs()}
        assert {f"{JOB}-{ack.number}" for ack in controllers.acks} <= there, "nothing acknowledged is lost"
        assert len({ack.number for ack in controllers.acks}) == len(controllers.acks), "and each made a job of its own"
    finally:
        for task in controllers.writing:
            task.cancel()
        controllers.end()
    return controllers


@pytest.mark.row("F7")
async def test_processes_fail_over_back_and_forth_with_other_settings_each_time(tmp_path: Path) -> None:
    support_etcd.require_etcd()
    controllers = await play(tmp_path, CONTROLD)
    assert len(controllers.leaderships()) >= 5
    for name in controllers.names:
        assert "Traceback" not in controllers.log_file(name).read_text()


@pytest.mark.skipif(not os.environ.get("VIRIAL_LONG"), reason="long: VIRIAL_LONG=1")
@pytest.mark.row("F7", defect="takes_itself_for_the_leader_at_its_start")
async def test_the_processes_catch_one_that_takes_itself_for_the_leader(tmp_path: Path) -> None:
    support_etcd.require_etcd()
    with pytest.raises(AssertionError, match="because it was started"):
        await play(tmp_path, TAKES_ITSELF_FOR_THE_LEADER)
