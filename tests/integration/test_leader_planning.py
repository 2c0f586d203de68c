"""Plans become commits; lost planners lose no question; refused grants starve nobody."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from controld.core.commands import SubmitJob
from controld.core.ids import JobId
from controld.core.invariants import check
from controld.core.model import Inventory
from controld.core.spec import SECOND_NS
from controld.matching.engine import plan
from controld.matching.port import Grant, Pending, Plan, PlannerLostError, Snapshot
from controld.reconcile.limits import Limits
from controld.replica.observe import LogName
from tests.support_core import incarnation, spec
from tests.support_replica import Peer, Rig, hello, lead, quick, run
from virialpb.reasons import Unfit


class Asked:
    """A planner that counts, and can be lost, slow, or wrong."""

    def __init__(self) -> None:
        self.questions: list[tuple[Snapshot, tuple[Pending, ...]]] = []
        self.lost = 0
        self.takes_seconds = 0.0
        # Jobs whose grants name a life of the node that is gone: refused at every verification.
        self.spoilt: set[JobId] = set()
        self.at_once = 0

    async def plan(self, snapshot: Snapshot, pending: tuple[Pending, ...]) -> Plan:
        assert not self.at_once, "one plan at a time"
        self.at_once += 1
        try:
            if not pending:
                return Plan(snapshot.revision, (), ())  # it is only being started
            self.questions.append((snapshot, pending))
            await asyncio.sleep(self.takes_seconds)
            if self.lost:
                self.lost -= 1
                raise PlannerLostError("killed")
            made = plan(snapshot, pending)
            return replace(made, grants=tuple(self._spoil(g) for g in made.grants))
        finally:
            self.at_once -= 1

    def _spoil(self, grant: Grant) -> Grant:
        if grant.job not in self.spoilt:
            return grant
        seats = tuple(replace(s, incarnation=s.incarnation._replace(boot_id="gone")) for s in grant.seats)
        return replace(grant, seats=seats)

    async def close(self) -> None:
        return


async def rig_with(planner: Asked, nodes: int) -> tuple[Rig, list[Peer]]:
    # These peers beat and obey nothing, for minutes: here that is no reason to plan anew.
    rig = await lead(planner=planner, settings=quick(limits=Limits(unheard_ns=3_600 * SECOND_NS)))
    peers = [await Peer.connect(rig.leader, hello(incarnation(f"n{i}"), f"n{i}")) for i in range(nodes)]
    for peer in peers:
        await peer.session.report_inventory(Inventory())
    return rig, peers


async def beats(peers: list[Peer], seconds: int, *, start: int = 2) -> None:
    for seq in range(start, start + seconds):
        await asyncio.sleep(1)
        for peer in peers:
            peer.beat(seq)


def test_what_is_submitted_is_placed() -> None:
    async def main() -> None:
        rig, peers = await rig_with(Asked(), 3)
        for n in range(5):
            await rig.submit(SubmitJob(f"r{n}", spec(ranks=3), f"job-{n}"))
        await beats(peers, 3)
        state = rig.leader.state
        assert {job.generation for job in state.jobs.values()} == {1}
        assert check(state) == ()
        generation = state.current(JobId("job-0"))
        assert generation is not None
        assert generation.cause_id.startswith("plan.")
        await rig.stop()

    run(main)


def test_a_lost_planner_loses_no_question() -> None:
    async def main() -> None:
        asked = Asked()
        asked.lost = 5
        rig, peers = await rig_with(asked, 1)
        await rig.submit(SubmitJob("r1", spec(ranks=1), "a"))
        await beats(peers, 10)
        assert len(rig.log.of(LogName.PLANNER_LOST)) == 5
        assert rig.leader.state.jobs[JobId("a")].generation == 1
        await rig.stop()

    run(main)


def test_a_slow_planner_stalls_nobody_and_is_asked_one_question_at_a_time() -> None:
    async def main() -> None:
        asked = Asked()
        asked.takes_seconds = 5.0
        rig, peers = await rig_with(asked, 2)
        await rig.submit(SubmitJob("r1", spec(ranks=2), "a"))
        loop = asyncio.get_running_loop()
        before = loop.time()
        for n in range(10):
            await rig.submit(SubmitJob(f"s{n}", spec(ranks=2, cpu_millis=300), f"b-{n}"))
        assert loop.time() - before < 1
        await beats(peers, 30)
        assert peers[0].acknowledged[-1] >= 30
        assert {job.generation for job in rig.leader.state.jobs.values()} == {1}
        await rig.stop()

    run(main)


@pytest.mark.row("B11", defect="refused_grant_is_tried_again_at_once")
@pytest.mark.row("C19", defect="refused_grant_is_tried_again_at_once")
def test_case_b11_a_grant_that_is_always_refused_backs_off_and_starves_nobody() -> None:
    """The first job wins every plan and is refused at every verification; the others fit beside it."""

    async def main() -> None:
        asked = Asked()
        asked.spoilt = {JobId("a")}
        rig, peers = await rig_with(asked, 1)
        # Only one of the two fits: as long as "a" is in the plan, "b" is not.
        await rig.submit(SubmitJob("r1", spec(ranks=1, cpu_millis=3_000), "a"))
        await rig.submit(SubmitJob("r2", spec(ranks=1, cpu_millis=3_000), "b"))
        await beats(peers, 50)
        jobs = rig.leader.state.jobs
        assert jobs[JobId("a")].generation == 0
        assert jobs[JobId("b")].generation == 1
        refused = rig.log.of(LogName.GRANT_REFUSED)
        assert 1 <= len(refused) <= 7, "1 s, 2 s, 4 s ... between tries"
        reasons = rig.leader.view.explain[JobId("a")].reasons
        assert reasons
        await rig.stop()

    run(main)


def test_a_job_that_backs_off_says_so_and_comes_back() -> None:
    async def main() -> None:
        asked = Asked()
        asked.spoilt = {JobId("a")}
        rig, peers = await rig_with(asked, 1)
        await rig.submit(SubmitJob("r1", spec(ranks=1), "a"))
        await beats(peers, 20)
        unplaced = rig.leader.view.explain[JobId("a")]
        assert [r.reason for r in unplaced.reasons] == [Unfit.BACK_OFF]
        assert dict(unplaced.reasons[0].numbers)["refusals"] >= 4
        asked.spoilt = set()
        await beats(peers, 40, start=22)
        assert rig.leader.state.jobs[JobId("a")].generation == 1
        await rig.stop()

    run(main)


def test_the_same_hopeless_question_is_asked_once() -> None:
    async def main() -> None:
        asked = Asked()
        rig, peers = await rig_with(asked, 1)
        await rig.submit(SubmitJob("r1", spec(ranks=9), "a"))
        await beats(peers, 5)
        count = len(asked.questions)
        await beats(peers, 60, start=7)
        assert len(asked.questions) == count
        assert rig.leader.view.explain[JobId("a")].reasons
        more = [await Peer.connect(rig.leader, hello(incarnation(f"m{i}"), f"m{i}")) for i in range(8)]
        for peer in more:
            await peer.session.report_inventory(Inventory())
        await beats([*peers, *more], 5, start=100)
        assert rig.leader.state.jobs[JobId("a")].generation == 1
        await rig.stop()

    run(main)


def test_a_refused_command_of_the_loop_is_held_back_and_not_fatal() -> None:
    async def main() -> None:
        rig = await lead(settings=quick(tick_gap_seconds=0.001))
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        await asyncio.sleep(30)
        peer.session.close()
        for n in range(50):
            await asyncio.sleep(0.01)
            await rig.submit(SubmitJob(f"r{n}", spec()))
        assert len(rig.log.of(LogName.COMMAND_REFUSED)) <= 2
        assert not rig.leader.lost.is_set()
        await rig.stop()

    run(main)
