"""Row F7: fail-over back and forth, each time with other settings; in virtual time, and with real processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from controld.core.commands import SubmitJob
from controld.core.ids import Epoch
from controld.core.model import JobState, Liveness
from controld.core.spec import SECOND_NS
from controld.replica.election import MS_NS, Knowledge, Timings
from controld.replica.leader import Leader, Term
from controld.replica.replica import Replica
from controld.store import guard
from tests.support_agents import SUSPECT_S, cluster_with, end, events, job_generation, job_state, liveness
from tests.support_core import spec
from tests.support_election import Cluster, submit
from tests.support_replica import run
from tests.support_rows import Defect, Rows, each_defect, each_row

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


@each_row(ROWS)
def test_the_row_holds(row: str) -> None:
    ROWS[row][0]()


@each_defect(ROWS)
def test_the_row_catches(row: str, defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    defect.seed(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        ROWS[row][0]()
