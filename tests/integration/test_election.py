"""Three replicas on one store, in virtual time: who leads after what, and how soon."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count

import pytest

from controld.core.commands import SubmitJob
from controld.replica.errors import NotLeaderError
from controld.replica.observe import LogName
from controld.store.port import StoreError
from tests.support_core import spec
from tests.support_election import Cluster, Member, submit
from tests.support_replica import run
from virialpb.reasons import Reason


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_of_three_that_start_one_leads_and_the_others_have_what_it_commits() -> None:
    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        assert [m.leads for m in cluster.members].count(True) == 1
        await submit(leader, SubmitJob("r1", spec()))
        await asyncio.sleep(0.1)
        assert leader.replica is not None
        for follower in cluster.followers():
            assert follower.replica is not None
            assert follower.replica.state.jobs == leader.replica.state.jobs
            assert follower.replica.state.created == leader.replica.state.created
            with pytest.raises(NotLeaderError) as refused:
                await submit(follower, SubmitJob("r2", spec()))
            assert (refused.value.leader, refused.value.reason) == (leader.address, Reason.NOT_LEADER)
        await asyncio.sleep(120)
        assert cluster.takeovers() == 1, "a healthy leader is left alone"
        await cluster.stop()

    run(main)


def test_a_killed_leader_is_replaced_within_half_a_second_and_nothing_is_lost() -> None:
    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        for i in range(5):
            await submit(leader, SubmitJob(f"r{i}", spec()))
        await asyncio.sleep(0.33)
        began_s = now_s()
        await leader.kill()
        successor = await cluster.leader(but=leader)
        assert now_s() - began_s < 0.5
        assert successor.log.of(LogName.TAKEOVER_BEGAN)[-1]["why"] == "AGREED"
        assert not successor.log.of(LogName.STANDBY_DROPPED), "without a reload"
        assert successor.replica is not None
        assert sorted(successor.replica.state.jobs) == [f"train-{i}" for i in range(1, 6)]
        assert (await submit(successor, SubmitJob("r3", spec()))).subject == "train-4", "answered once, ever"
        assert (await submit(successor, SubmitJob("r9", spec()))).subject == "train-6"
        await leader.start()
        await asyncio.sleep(1)
        assert leader.replica is not None
        assert leader.replica.state.jobs == successor.replica.state.jobs
        assert cluster.takeovers() == 2
        await cluster.stop()

    run(main)


def test_calls_that_come_during_an_election_wait_for_its_outcome() -> None:
    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        await leader.kill()
        await asyncio.sleep(0.25)
        began_s = now_s()
        calls = [asyncio.ensure_future(submit(m, SubmitJob(f"r{m.name}", spec()))) for m in cluster.followers()]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        successor = await cluster.leader(but=leader)
        assert now_s() - began_s < 0.3
        (refused,) = [one for one in outcomes if isinstance(one, NotLeaderError)]
        assert refused.leader == successor.address, "sent on to who leads by now"
        assert successor.replica is not None
        assert len(successor.replica.state.jobs) == 1, "the other was served"
        await cluster.stop()

    run(main)


def test_a_leader_whose_member_is_gone_does_not_hold_on_to_its_name() -> None:
    """Else its last proof would count until it is old, and the silence of it only then begin."""

    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        leader.store.gone = True
        began_s = now_s()
        await cluster.leader(but=leader)
        assert now_s() - began_s < 0.8
        leader.store.gone = False
        await cluster.settled()
        assert cluster.takeovers() == 2
        await cluster.stop()

    run(main)


def test_a_leader_that_commits_is_kept_for_a_second_without_a_read() -> None:
    """After an election of etcd its member may answer writes sooner than reads; but who proves nothing else for long
    renews no agent's lease, and another does better."""

    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        leader.store.no_reads = True
        for turn in range(30):
            await submit(leader, SubmitJob(f"r{turn}", spec()))
            await asyncio.sleep(0.05)
        assert leader.leads
        assert cluster.takeovers() == 1
        writing = asyncio.ensure_future(go_on(leader))
        await cluster.leader(but=leader)
        writing.cancel()
        await cluster.stop()

    async def go_on(leader: Member) -> None:
        with suppress(StoreError):
            for turn in count():
                await submit(leader, SubmitJob(f"s{turn}", spec()))
                await asyncio.sleep(0.05)

    run(main)


def test_a_leader_that_is_restarted_at_once_leads_again_without_asking_anyone() -> None:
    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        await leader.kill()
        began_s = now_s()
        await leader.start()
        await cluster.until(lambda: leader.leads or None)
        assert now_s() - began_s < 0.1
        assert leader.log.of(LogName.TAKEOVER_BEGAN)[-1]["why"] == "FORMER_LIFE"
        await cluster.settled()
        await asyncio.sleep(10)
        assert cluster.takeovers() == 2
        await cluster.stop()

    run(main)


def test_a_lone_standby_with_a_bad_link_cannot_depose_a_healthy_leader() -> None:
    """It asks, the others hear the leader; alone for good it asks nobody, and the store shows the leader alive."""

    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        lone, other = cluster.followers()
        cluster.network.part(lone.address, leader.address)
        await asyncio.sleep(60)
        assert cluster.takeovers() == 1
        assert {entry["why"] for entry in lone.log.of(LogName.LEADER_SILENT)} == {"SILENCE", "DENIED"}
        cluster.network.part(lone.address, other.address)
        await asyncio.sleep(60)
        await other.kill()
        await asyncio.sleep(60)
        assert cluster.takeovers() == 1
        assert leader.leads
        cluster.network.heal()
        await asyncio.sleep(60)
        assert cluster.takeovers() == 1
        await cluster.stop()

    run(main)


@pytest.mark.parametrize("outward", [True, False])
def test_a_way_cut_in_one_direction_deposes_nobody_either(outward: bool) -> None:
    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        lone = cluster.followers()[0]
        pair = (lone.address, leader.address)
        cluster.network.cut.add(pair if outward else (pair[1], pair[0]))
        await asyncio.sleep(60)
        assert cluster.takeovers() == 1
        await cluster.stop()

    run(main)


def test_a_leader_that_nobody_hears_is_replaced_though_its_member_works() -> None:
    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        began_s = now_s()
        cluster.network.isolate(leader.address)
        successor = await cluster.leader(but=leader)
        assert now_s() - began_s < 0.6
        await submit(successor, SubmitJob("r1", spec()))
        await cluster.until(lambda: not leader.leads or None, 0.3)
        with pytest.raises(NotLeaderError):
            await submit(leader, SubmitJob("r2", spec()))
        cluster.network.heal()
        await asyncio.sleep(5)
        assert cluster.takeovers() == 2
        assert leader.replica is not None
        assert leader.replica.leader_address == successor.address
        await cluster.stop()

    run(main)


def test_a_leader_whose_member_is_cut_off_stops_its_pings_and_is_replaced() -> None:
    """It runs on and can be reached; but it can prove nothing."""

    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        began_s = now_s()
        leader.store.cut = True
        successor = await cluster.leader(but=leader)
        # 750 ms until the pings stop, 400 ms of silence, and a question.
        assert 0.75 < now_s() - began_s < 1.4
        assert successor.log.of(LogName.TAKEOVER_BEGAN)[-1]["why"] == "AGREED"
        await cluster.until(lambda: not leader.leads or None, 4)
        with pytest.raises(NotLeaderError):
            await submit(leader, SubmitJob("r2", spec()))
        leader.store.cut = False
        await asyncio.sleep(2)
        assert leader.replica is not None
        assert leader.replica.leader_address == successor.address
        assert cluster.takeovers() == 2
        await cluster.stop()

    run(main)


def test_one_replica_alone_takes_over_when_the_store_says_that_the_leader_is_gone() -> None:
    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        lone, other = cluster.followers()
        await other.kill()
        began_s = now_s()
        await leader.kill()
        await cluster.leader(but=leader)
        assert 2.7 < now_s() - began_s < 3.5
        assert lone.log.of(LogName.TAKEOVER_BEGAN)[-1]["why"] == "NO_EVIDENCE"
        await cluster.stop()

    run(main)


def test_a_planned_hand_over_takes_milliseconds_and_asks_nobody() -> None:
    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        writes = [asyncio.ensure_future(submit(leader, SubmitJob(f"r{i}", spec()))) for i in range(20)]
        stopping = asyncio.ensure_future(leader.stop())
        await asyncio.sleep(0)
        late = asyncio.ensure_future(submit(leader, SubmitJob("late", spec())))
        began_s = now_s()
        successor = await cluster.leader(but=leader)
        assert now_s() - began_s < 0.05
        assert successor.log.of(LogName.TAKEOVER_BEGAN)[-1]["why"] == "INVITED"
        outcomes = await asyncio.gather(*writes, late, return_exceptions=True)
        refused = [one for one in outcomes if isinstance(one, NotLeaderError)]
        assert outcomes[-1] in refused
        assert {error.leader for error in refused} == {successor.address}, "told where to go"
        answered = [one.subject for one in outcomes if not isinstance(one, BaseException)]
        assert successor.replica is not None
        assert sorted(successor.replica.state.jobs) == sorted(answered)
        await stopping
        await asyncio.sleep(10)
        assert cluster.takeovers() == 2
        await cluster.stop()

    run(main)


def test_a_leader_that_nobody_can_replace_resigns_and_the_next_need_not_wait_for_evidence() -> None:
    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        others = cluster.followers()
        for other in others:
            await other.kill()
        await leader.stop()
        assert leader.log.of(LogName.LEADER_RESIGNED)
        began_s = now_s()
        for other in others:
            await other.start()
        successor = await cluster.leader(but=leader)
        assert now_s() - began_s < 0.1
        assert successor.log.of(LogName.TAKEOVER_BEGAN)[-1]["why"] == "VACANT"
        await submit(successor, SubmitJob("r1", spec()))
        await cluster.stop()

    run(main)


def test_a_successor_whose_answer_is_lost_leads_all_the_same() -> None:
    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        cluster.network.cut |= {(other.address, leader.address) for other in cluster.followers()}
        began_s = now_s()
        await leader.stop()
        assert now_s() - began_s < 3
        assert not leader.log.of(LogName.LEADER_RESIGNED), "what another took over is not given up for it"
        await asyncio.sleep(10)
        assert cluster.takeovers() == 2
        await cluster.stop()

    run(main)


def test_a_hand_over_that_fails_leaves_the_leader_in_place() -> None:
    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        assert leader.replica is not None
        write = asyncio.ensure_future(submit(leader, SubmitJob("r1", spec())))
        for follower in cluster.followers():
            follower.store.cut = True
        assert await leader.replica.hand_over() == ""
        await write
        for follower in cluster.followers():
            follower.store.cut = False
        await submit(leader, SubmitJob("r2", spec()))
        await asyncio.sleep(5)
        follower = cluster.followers()[1]
        assert await leader.replica.hand_over([follower.address]) == follower.address
        assert follower.leads
        await cluster.stop()

    run(main)


def test_a_takeover_whose_answer_is_lost_is_carried_on() -> None:
    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        for follower in cluster.followers():
            follower.store.lose_answers = True
        await leader.kill()
        await asyncio.sleep(2)
        for member in cluster.members:
            member.store.lose_answers = False
        successor = await cluster.leader(but=leader, within_s=5)
        await submit(successor, SubmitJob("r1", spec()))
        await asyncio.sleep(10)
        assert len([m for m in cluster.members if m.leads]) == 1
        await cluster.stop()

    run(main)


def test_without_the_store_nobody_leads_and_afterwards_somebody_does() -> None:
    """Quorum lost for a while: no answers, no takeover, and no process ends."""

    async def main() -> None:
        cluster = Cluster()
        leader = await cluster.start()
        await cluster.settled()
        await submit(leader, SubmitJob("r1", spec()))
        for member in cluster.members:
            member.store.cut = True
        await asyncio.sleep(30)
        assert not any(m.leads for m in cluster.members)
        for member in cluster.members:
            with pytest.raises(NotLeaderError):
                await submit(member, SubmitJob("r2", spec()))
            member.store.cut = False
        successor = await cluster.leader(within_s=2)
        await submit(successor, SubmitJob("r2", spec()))
        assert successor.replica is not None
        assert len(successor.replica.state.jobs) == 2
        await asyncio.sleep(10)
        await cluster.stop()

    run(main)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_other_sizes_lead_too(size: int) -> None:
    async def main() -> None:
        cluster = Cluster(size)
        leader = await cluster.start()
        await cluster.settled()
        await submit(leader, SubmitJob("r1", spec()))
        await leader.kill()
        if size == 1:
            await leader.start()
        successor = await cluster.leader(within_s=4)
        await submit(successor, SubmitJob("r2", spec()))
        await cluster.stop()

    run(main)
