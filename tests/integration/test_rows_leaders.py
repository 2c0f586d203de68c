"""Rows of public failures about changes of leader: each scenario, and the defects under which it must fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from controld.core.agent import SlotState, SlotStatus, Stop
from controld.core.commands import SubmitJob
from controld.core.ids import Epoch, JobId, SlotId, Token
from controld.core.model import JobState, Liveness
from controld.core.spec import SECOND_NS
from controld.core.state import State
from controld.health.view import View
from controld.replica.agents import Agents
from controld.replica.futures import ignore_outcome
from controld.replica.sightings import Sightings
from controld.replica.standby import Standby
from controld.store import guard
from noded.core import messages as m
from noded.core.epochs import Admission, LeaderEpoch
from tests.support_agents import FENCE_S, SUSPECT_S, cluster_with, end, events, job_state, liveness, now_s
from tests.support_core import spec
from tests.support_election import Cluster, Member, submit
from tests.support_replica import run
from tests.support_rows import Defect, Rows, each_defect, each_row
from tests.unit.noded_builders import SLOT, START, TOKEN, order, running, silent, state
from virialpb.reasons import StopReason

Patch = pytest.MonkeyPatch
GRACE_S = 1.0


# C6: a leader stuck on a slow disk counted leases down and revoked all of them when it came back.


def stalled_leader_revokes_nothing() -> None:
    async def main() -> None:
        cluster, agents = await cluster_with("n0", fence_s=5)
        leader, agent = await cluster.leader(), agents[0]
        agent.silent = True  # to this leader: it will want to expire the node
        await cluster.until(lambda: liveness(leader, agent) is Liveness.SUSPECT or None)
        commit_hangs(leader)
        await asyncio.sleep(2)  # the expiry is decided, and its commit hangs
        leader.store.hung = True
        successor = await cluster.leader(but=leader)
        agent.silent, agent.avoids = False, leader
        await asyncio.sleep(10)
        assert liveness(successor, agent) is Liveness.LIVE
        leader.store.hung = False  # now it arrives
        await asyncio.sleep(2)
        assert liveness(successor, agent) is Liveness.LIVE
        assert "node.expired" not in events(successor)
        assert not expired_commits(cluster)
        assert agent.deadline_s > now_s()
        assert [m.leads for m in cluster.members].count(True) == 1
        await end(cluster, agents)

    run(main)


def commit_hangs(member: Member) -> None:
    """Its commits, not yet its barriers, wait until `hung` was on and is over; given up, they still arrive."""
    store = member.store
    real = store.commit
    under_way: list[asyncio.Future[int]] = []

    async def late(*given: object) -> int:
        while not store.hung:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
        return await real(*given)  # type: ignore[arg-type]

    async def commit(*given: object) -> int:
        under_way.append(asyncio.ensure_future(late(*given)))
        ignore_outcome(under_way[-1])
        return await asyncio.shield(under_way[-1])

    store.commit = commit  # type: ignore[method-assign]


def expired_commits(cluster: Cluster) -> list[int]:
    """Revisions of commits that expired a node."""
    return [
        commit.revision for commit in cluster.disk.log for c in commit.changes if b"node.expired" in (c.value or b"")
    ]


def late_commits_pass(patch: Patch) -> None:
    patch.setattr(guard, "already_applied", lambda head, leadership, seq: False)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


# C7: a deposed leader's revoke was forwarded, and carried out.


def orders_of_a_deposed_leader_are_refused() -> None:
    agent = running()
    agent.handle(order(m.BeatAck(0), Epoch(1, 9)), START)  # a later leader has spoken
    for stale in (m.Stop(SLOT, TOKEN, 0, StopReason.SUPERSEDED), m.Release(SLOT, TOKEN)):
        assert silent(agent.handle(order(stale, Epoch(1, 7)), START)) == []
    assert state(agent) == "RUNNING"


def any_leader_is_obeyed(patch: Patch) -> None:
    patch.setattr(LeaderEpoch, "admit", lambda self, epoch: Admission.CURRENT)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


# C8: the lease began anew at each election, so that with enough of them it never ended.


def a_dead_node_s_lease_ends_over_five_elections() -> None:
    async def main() -> None:
        cluster, agents = await cluster_with("n0", "n1")
        dead = agents[0]
        await asyncio.sleep(10)
        dead.silent = True
        began_s = now_s()
        await asyncio.sleep(SUSPECT_S)
        for number in range(5):
            leader = await cluster.leader()
            assert liveness(leader, dead) is Liveness.SUSPECT
            leader.store.cut = True  # deposed, and another time resigned: it goes on in the same process
            if number % 2:
                leader.store.cut = False
                assert leader.replica is not None
                assert await leader.replica.hand_over()
            await cluster.leader(but=leader)
            leader.store.cut = False
            await asyncio.sleep(2)
        assert cluster.takeovers() == 6
        assert now_s() - began_s < FENCE_S
        leader = await cluster.leader()
        await cluster.until(lambda: liveness(leader, dead) is Liveness.EXPIRED or None)
        assert dead.deadline_s < now_s()
        assert now_s() - began_s < SUSPECT_S + FENCE_S + GRACE_S + 1
        assert liveness(leader, agents[1]) is Liveness.LIVE
        await end(cluster, agents)

    run(main)


def each_election_begins_anew(patch: Patch) -> None:
    patch.setattr(Sightings, "all", lambda _: {})  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


def what_was_seen_is_forgotten_with_the_copy(patch: Patch) -> None:
    real = Sightings.loaded

    def loaded(sightings: Sightings, state: State, now_ns: int) -> None:
        sightings.__init__()
        real(sightings, state, now_ns)

    patch.setattr(Sightings, "loaded", loaded)


def a_suspect_s_beats_are_never_acknowledged_beyond_the_next_leader_s_expiry() -> None:
    """The other half of C8: what the next leader counts from must not be before what the former acknowledged."""

    async def main() -> None:
        cluster, agents = await cluster_with("n0")
        leader, agent = await cluster.leader(), agents[0]
        agent.silent = True
        await asyncio.sleep(SUSPECT_S + 6)
        assert liveness(leader, agent) is Liveness.SUSPECT
        commit_hangs(leader)  # it comes back, and the commit that says so hangs
        agent.silent = False
        await asyncio.sleep(2.5)
        agent.silent = True
        await leader.kill()
        successor = await cluster.leader(but=leader)
        await cluster.until(lambda: (liveness(successor, agent) is Liveness.EXPIRED) or None, 60)
        assert agent.deadline_s < now_s(), "its tasks are gone before its devices are granted again"
        await end(cluster, agents)

    run(main)


def suspects_are_acknowledged(patch: Patch) -> None:
    real: Callable[..., Liveness | None] = Agents._renewable

    def renewable(agents: Agents, session: object) -> Liveness | None:
        return Liveness.LIVE if real(agents, session) is Liveness.SUSPECT else real(agents, session)

    patch.setattr(Agents, "_renewable", renewable)


# G14: the servers were rebooted, and every client's lease expired at once.


def an_outage_of_all_controllers_expires_nobody() -> None:
    async def main() -> None:
        cluster, agents = await cluster_with(*(f"n{n}" for n in range(20)))
        for member in cluster.members:
            await member.kill()
        await asyncio.sleep(3 * FENCE_S)
        for member in cluster.members:
            await member.start()
        leader = await cluster.leader()
        await asyncio.sleep(FENCE_S)
        assert {liveness(leader, agent) for agent in agents} == {Liveness.LIVE}
        assert not {"node.suspect", "node.expired"} & set(events(leader))
        await end(cluster, agents)

    run(main)


def deadlines_of_before_the_outage(patch: Patch) -> None:
    real = View.__init__

    def old(view: View, *given: object, **named: object) -> None:
        real(view, *given, **named)  # type: ignore[arg-type]
        view.started_ns = 0

    patch.setattr(View, "__init__", old)


# G16: after a restart of the control store nobody knew of the tasks that ran on.


def every_running_task_is_adopted_or_stopped() -> None:
    async def main() -> None:
        cluster, agents = await cluster_with("n0", "n1")
        leader = await cluster.leader()
        await submit(leader, SubmitJob("r1", spec(2)))
        await cluster.until(lambda: job_state(leader) is JobState.RUNNING or None)
        before = {agent.name: dict(agent.slots) for agent in agents}
        zombie = SlotId("gone-9.1.0")
        token = Token(JobId("gone-9"), 1, Epoch(1, 1))
        for member in cluster.members:
            await member.kill()
        agents[0].slots[zombie] = SlotStatus(zombie, token, SlotState.RUNNING, port=1)
        await asyncio.sleep(5)
        agents[0].orders.clear()
        for member in cluster.members:
            await member.start()
        leader = await cluster.leader()
        await asyncio.sleep(10)
        assert job_state(leader) is JobState.RUNNING
        assert leader.replica is not None
        assert leader.replica.state.jobs[JobId("train-1")].generation == 1, "adopted, not started again"
        assert zombie in {order.slot for order in agents[0].orders if isinstance(order, Stop)}
        assert {agent.name: dict(agent.slots) for agent in agents} == before, "the zombie is gone, nothing else"
        await end(cluster, agents)

    run(main)


def forgets_what_it_did_not_start(patch: Patch) -> None:
    patch.setattr("controld.reconcile.tick._stale_slots", lambda p, uid: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


# H1: a new leader marked 192 live nodes down from stale heartbeats, and jobs ran twice.


def a_new_leader_is_not_hasty() -> None:
    async def main() -> None:
        names = [f"n{n:03}" for n in range(192)]
        cluster, agents = await cluster_with(*names, fence_s=60)
        leader = await cluster.leader()
        await submit(leader, SubmitJob("r1", spec(2)))
        await cluster.until(lambda: job_state(leader) is JobState.RUNNING or None)
        for number, agent in enumerate(agents):
            agent.reconnect_s = 0.3 + 6 * number / len(agents)  # the last finds it after six seconds
        await leader.kill()
        successor = await cluster.leader(but=leader)
        await asyncio.sleep(15)
        assert {liveness(successor, agent) for agent in agents} == {Liveness.LIVE}
        assert not {"node.suspect", "node.expired"} & set(events(successor))
        assert job_state(successor) is JobState.RUNNING
        assert successor.replica is not None
        assert successor.replica.state.jobs[JobId("train-1")].generation == 1, "runs once"
        await end(cluster, agents)

    run(main)


def takes_its_own_silence_for_theirs(patch: Patch) -> None:
    """It counts from before its own time, when nobody could have been heard by it."""
    real = View.__init__

    def init(view: View, *given: object, **named: object) -> None:
        real(view, *given, **named)  # type: ignore[arg-type]
        view.started_ns -= 20 * SECOND_NS

    patch.setattr(View, "__init__", init)


def a_new_leader_is_not_blind() -> None:
    """What the former leader committed last is known to the next before it decides anything."""

    async def main() -> None:
        cluster, agents = await cluster_with("n0", "n1")
        leader = await cluster.leader()
        await submit(leader, SubmitJob("r1", spec(2)))
        await asyncio.sleep(5)
        for member in cluster.followers():
            member.store.lag_s = 0.7
        await submit(leader, SubmitJob("r2", spec(2)))
        await leader.kill()
        successor = await cluster.leader(but=leader)
        assert (await submit(successor, SubmitJob("r3", spec(2)))).subject == "train-3"
        assert (await submit(successor, SubmitJob("r2", spec(2)))).subject == "train-2"
        await end(cluster, agents)

    run(main)


def decides_on_a_copy_that_is_behind(patch: Patch) -> None:
    async def at_once(standby: Standby, revision: int) -> object:
        del revision
        return standby.state

    patch.setattr(Standby, "reached", at_once)


ROWS: Rows = {
    "C6": (stalled_leader_revokes_nothing, (Defect("late_commits_pass", late_commits_pass),)),
    "C7": (orders_of_a_deposed_leader_are_refused, (Defect("any_leader_is_obeyed", any_leader_is_obeyed),)),
    "C8": (
        a_dead_node_s_lease_ends_over_five_elections,
        (
            Defect("each_election_begins_anew", each_election_begins_anew),
            Defect("what_was_seen_is_forgotten_with_the_copy", what_was_seen_is_forgotten_with_the_copy),
        ),
    ),
    "G14": (
        an_outage_of_all_controllers_expires_nobody,
        (Defect("deadlines_of_before_the_outage", deadlines_of_before_the_outage),),
    ),
    "G16": (
        every_running_task_is_adopted_or_stopped,
        (Defect("forgets_what_it_did_not_start", forgets_what_it_did_not_start),),
    ),
    "H1": (a_new_leader_is_not_hasty, (Defect("takes_its_own_silence_for_theirs", takes_its_own_silence_for_theirs),)),
}
OTHER_HALVES: Rows = {
    "C8": (
        a_suspect_s_beats_are_never_acknowledged_beyond_the_next_leader_s_expiry,
        (Defect("suspects_are_acknowledged", suspects_are_acknowledged),),
    ),
    "H1": (
        a_new_leader_is_not_blind,
        (Defect("decides_on_a_copy_that_is_behind", decides_on_a_copy_that_is_behind),),
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
