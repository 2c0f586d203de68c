"""Rows of public failures about wall clocks: each scenario, and the defects under which it must fail. In virtual time.

Nothing alive may die of a clock that was set, and nothing dead may live on by it: a step back is as bad as one ahead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from controld.core.commands import SubmitJob
from controld.core.ids import JobId
from controld.core.model import JobState, Liveness
from controld.core.spec import SECOND_NS
from controld.replica import election
from controld.replica.election import Timings, Verdict, counts
from controld.replica.elector import Elector
from controld.replica.leader import Leader
from controld.replica.peers import Ping
from controld.replica.replica import Replica
from tests.support_agents import Agent
from tests.support_core import spec
from tests.support_election import Cluster, Member, submit
from tests.support_replica import LoopClock, quick, run
from tests.support_rows import Defect, Rows, each_defect, each_row

Patch = pytest.MonkeyPatch
HOUR_NS = 3600 * SECOND_NS
DAY_NS = 24 * HOUR_NS
FENCE_S = 20.0
SUSPECT_S = 8.0  # the latest that a silence becomes suspicion
JOB = JobId("train-1")


class Rack:
    """Three controllers on machines that were started on different days, three nodes, and a gang on two of them."""

    def __init__(self) -> None:
        base = quick()
        limits = replace(base.limits, session_fence_after_ns=int(FENCE_S * SECOND_NS))
        # Silence is due in the middle of two pings, not at the same moment as one.
        self.cluster = Cluster(settings=replace(base, limits=limits), timings=Timings(takeover_ns=450_000_000))
        for number, member in enumerate(self.cluster.members):
            member.clock = LoopClock((3 - number) * 10 * DAY_NS)
        self.agents = [Agent(self.cluster, name, FENCE_S) for name in ("n0", "n1", "n2")]

    async def start(self) -> Rack:
        try:
            return await self._start()
        except TimeoutError as error:
            raise RuntimeError("no defect: the rack did not come up") from error

    async def _start(self) -> Rack:
        await self.cluster.start()
        for agent in self.agents:
            agent.start()
        await self.cluster.until(lambda: all(a.renewed_s is not None for a in self.agents) or None)
        await submit(await self.cluster.leader(), SubmitJob("r1", spec(2)))
        await self.cluster.until(lambda: self.job_state() is JobState.RUNNING or None)
        await self.cluster.settled()
        return self

    async def end(self) -> None:
        for agent in self.agents:
            await agent.stop()
        await self.cluster.stop()

    def leader(self) -> Member:
        leaders = [m for m in self.cluster.members if m.leads]
        assert len(leaders) == 1
        return leaders[0]

    def job_state(self) -> JobState:
        replica = self.leader().replica
        assert replica is not None
        return replica.state.jobs[JOB].state

    def liveness(self, agent: Agent) -> Liveness:
        replica = self.leader().replica
        assert replica is not None
        return replica.state.nodes[agent.uid].liveness

    def untouched(self, *, takeovers: int) -> None:
        """Nobody led but who should, no node was thought silent, and the gang that ran at first still runs."""
        assert self.cluster.takeovers() == takeovers
        replica = self.leader().replica
        assert replica is not None
        kinds = {event.kind for event in replica.state.events.values()}
        assert not kinds & {"node.suspect", "node.expired", "lease.expired", "generation.stopping"}
        assert {self.liveness(agent) for agent in self.agents} == {Liveness.LIVE}
        assert (self.job_state(), replica.state.jobs[JOB].generation) == (JobState.RUNNING, 1)
        now_s = asyncio.get_running_loop().time()
        assert all(agent.deadline_s > now_s + FENCE_S / 2 for agent in self.agents), "renewals are acknowledged"


def set_clocks(members: list[Member], by_ns: int) -> None:
    for member in members:
        member.clock.wall_offset_ns += by_ns


# F5: the clock was set an hour ahead, a standby took over, and the old leader was active for two seconds more.


def a_clock_that_is_set_changes_nothing() -> None:
    async def main() -> None:
        rack = await Rack().start()
        for pause_s in (*(0.37,) * 30, *(0.23,) * 30, *(0.11,) * 30):  # at any moment between two pings, or two proofs
            set_clocks(rack.cluster.members, HOUR_NS)
            await asyncio.sleep(pause_s)
        set_clocks(rack.cluster.members, -90 * HOUR_NS)
        rack.untouched(takeovers=1)
        for by_ns in (HOUR_NS, -2 * HOUR_NS, HOUR_NS):
            for members in ([rack.leader()], rack.cluster.followers(), rack.cluster.followers()[:1]):
                set_clocks(members, by_ns)
                await asyncio.sleep(SUSPECT_S)
                rack.untouched(takeovers=1)
        await rack.end()

    run(main)


def what_is_dead_is_dead_whatever_the_clock_says() -> None:
    async def main() -> None:
        rack = await Rack().start()
        cluster, idle = rack.cluster, rack.agents[2]
        assert not idle.slots
        set_clocks(cluster.members, -HOUR_NS)
        idle.silent = True
        await asyncio.sleep(SUSPECT_S)
        assert rack.liveness(idle) is Liveness.SUSPECT
        await asyncio.sleep(FENCE_S)
        assert rack.liveness(idle) is Liveness.EXPIRED
        leader = rack.leader()
        set_clocks(cluster.followers(), -HOUR_NS)
        await leader.kill()
        await cluster.leader(but=leader, within_s=2)
        await rack.end()

    run(main)


class WallClock:
    """What was taken for a clock that nobody sets: it starts where that one is, and then follows the wall clock."""

    def __init__(self, clock: LoopClock) -> None:
        self._clock = clock
        self._ahead_ns = clock.boottime_ns() - clock.unix_ns()

    def boottime_ns(self) -> int:
        return self._clock.unix_ns() + self._ahead_ns

    def unix_ns(self) -> int:
        return self._clock.unix_ns()


def on_the_wall_clock(patch: Patch, kind: type[Elector | Leader]) -> None:
    real = kind.__init__

    def init(part: object, **given: object) -> None:
        clock = given["clock"]
        real(part, **{**given, "clock": WallClock(clock)})  # type: ignore[arg-type]

    patch.setattr(kind, "__init__", init)


def elections_by_the_wall_clock(patch: Patch) -> None:
    on_the_wall_clock(patch, Elector)


def elections_by_a_wall_clock_that_is_believed(patch: Patch) -> None:
    """Two more rules hide the defect above: a step ahead looks like a stall of the whole process, which is no silence,
    and the leader is asked as well."""
    elections_by_the_wall_clock(patch)
    patch.setattr(Elector, "_notice_stall", lambda elector, now_ns: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    nobody_is_asked(patch)


def nobody_is_asked(patch: Patch) -> None:
    """Of those who would deny that the leader is gone, which it would itself."""
    patch.setattr(election, "DENIALS", frozenset[Verdict]())


def leases_by_the_wall_clock(patch: Patch) -> None:
    on_the_wall_clock(patch, Leader)


# F6: the backup took over because the two machines' clocks were apart.


def clocks_that_are_apart_make_nobody_take_over() -> None:
    async def main(ahead_ns: int) -> None:
        rack = Rack()
        for number, member in enumerate(rack.cluster.members):
            member.clock.wall_offset_ns = number * ahead_ns
        await rack.start()
        set_clocks(rack.cluster.followers(), ahead_ns)
        await asyncio.sleep(3 * FENCE_S)
        rack.untouched(takeovers=1)
        leader = rack.leader()
        await leader.kill()
        await rack.cluster.leader(but=leader, within_s=2)
        await asyncio.sleep(2 * FENCE_S)
        rack.untouched(takeovers=2)
        await rack.end()

    for ahead_ns in (HOUR_NS, -HOUR_NS):
        run(lambda ahead_ns=ahead_ns: main(ahead_ns))


def silence_from_when_the_leader_says_it_spoke(patch: Patch, clock: str) -> None:
    """A ping says when it was sent, and its listener counts from then, by another machine's clock."""
    real = Replica.pings

    async def pings(replica: Replica, listener: str) -> AsyncGenerator[Ping]:
        async with aclosing(real(replica, listener)) as sent:
            async for ping in sent:
                yield replace(ping, proof_age_ns=getattr(replica._clock, clock)())

    def heard(elector: Elector, ping: Ping) -> None:
        if counts(ping.epoch, elector._incumbent):
            age_ns = getattr(elector._clock, clock)() - ping.proof_age_ns
            elector._heard_ns = elector._clock.boottime_ns() - age_ns

    patch.setattr(Replica, "pings", pings)
    patch.setattr(Elector, "heard", heard)


def silence_by_the_leader_s_wall_clock(patch: Patch) -> None:
    silence_from_when_the_leader_says_it_spoke(patch, "unix_ns")


def silence_by_the_leader_s_wall_clock_alone(patch: Patch) -> None:
    silence_by_the_leader_s_wall_clock(patch)
    nobody_is_asked(patch)


def silence_by_the_leader_s_boottime(patch: Patch) -> None:
    silence_from_when_the_leader_says_it_spoke(patch, "boottime_ns")


ROWS: Rows = {
    "F5": (
        a_clock_that_is_set_changes_nothing,
        (
            Defect("elections_by_a_wall_clock_that_is_believed", elections_by_a_wall_clock_that_is_believed),
            Defect("leases_by_the_wall_clock", leases_by_the_wall_clock),
        ),
    ),
    "F6": (
        clocks_that_are_apart_make_nobody_take_over,
        (
            Defect("silence_by_the_leader_s_wall_clock", silence_by_the_leader_s_wall_clock),
            Defect("silence_by_the_leader_s_wall_clock_alone", silence_by_the_leader_s_wall_clock_alone),
            Defect("silence_by_the_leader_s_boottime", silence_by_the_leader_s_boottime),
        ),
    ),
}
OTHER_HALVES: Rows = {
    "F5": (
        what_is_dead_is_dead_whatever_the_clock_says,
        (
            Defect("elections_by_the_wall_clock", elections_by_the_wall_clock),
            Defect("leases_by_the_wall_clock", leases_by_the_wall_clock),
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


@each_row(OTHER_HALVES)
def test_the_other_half_holds(row: str) -> None:
    OTHER_HALVES[row][0]()


@each_defect(OTHER_HALVES)
def test_the_other_half_catches(row: str, defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    defect.seed(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        OTHER_HALVES[row][0]()
