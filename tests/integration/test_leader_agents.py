"""When a renewal is acknowledged, when a session expires, and what an agent that hangs costs."""

from __future__ import annotations

import asyncio

import pytest

from controld.core.agent import DropDone, Prepare, SlotState, SlotStatus, Stop
from controld.core.commands import MarkExpired, SubmitJob
from controld.core.ids import CheckpointId, Epoch, JobId, NodeUid, SlotId, Token
from controld.core.model import Inventory, Liveness
from controld.core.spec import SECOND_NS
from controld.replica.clock import now
from controld.replica.observe import UNOBSERVED, LogName
from controld.replica.stall import StallWatch
from controld.replica.ticker import Ticker
from controld.store.faults import Fault, FaultKind, Operation
from controld.store.memory import MemoryDisk
from controld.store.port import DeposedError
from tests.support_core import incarnation, spec
from tests.support_replica import Gates, Peer, hello, lead, quick, run
from virialpb.reasons import Reason


def test_a_renewal_is_acknowledged_only_by_a_barrier_that_started_after_it() -> None:
    async def main() -> None:
        disk = MemoryDisk()
        store = Gates(disk)
        rig = await lead(disk, store=store)
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        await asyncio.sleep(1)
        assert peer.acknowledged == [1]
        store.barriers.clear()
        await asyncio.sleep(1)  # one barrier is under way now
        asked = store.asked
        peer.beat(2)
        store.barriers.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert store.asked == asked
        assert peer.acknowledged == [1], "the barrier under way started before the beat"
        await asyncio.sleep(0.3)
        assert store.asked > asked
        assert peer.acknowledged == [1, 2]
        await rig.stop()

    run(main)


def test_without_barriers_nothing_is_acknowledged_and_afterwards_the_newest_says_all() -> None:
    async def main() -> None:
        disk = MemoryDisk()
        store = Gates(disk)
        rig = await lead(disk, store=store)
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        await asyncio.sleep(1)
        store.barriers.clear()
        for seq in range(2, 10):
            await asyncio.sleep(1)
            peer.beat(seq)
        assert peer.acknowledged == [1]
        store.barriers.set()
        await asyncio.sleep(1)
        assert peer.acknowledged[-1] == 9
        await rig.stop()

    run(main)


def test_barriers_that_fail_do_not_lose_a_renewal() -> None:
    class Flaky:
        def __init__(self) -> None:
            self.failing = False

        def next(self, operation: Operation) -> Fault:
            lost = self.failing and operation is Operation.BARRIER
            return Fault(FaultKind.LOST_BEFORE if lost else FaultKind.NONE)

    async def main() -> None:
        flaky = Flaky()
        rig = await lead(faults=flaky)
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        await asyncio.sleep(1)
        flaky.failing = True
        peer.beat(2)
        await asyncio.sleep(1)
        assert peer.acknowledged == [1]
        assert rig.log.of(LogName.BARRIER_FAILED)
        flaky.failing = False
        await asyncio.sleep(1)
        assert peer.acknowledged == [1, 2]
        await rig.stop()

    run(main)


def test_a_deposed_leader_acknowledges_nothing_and_ends_every_session() -> None:
    async def main() -> None:
        rig = await lead()
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        await asyncio.sleep(1)
        rival = await lead(rig.disk)
        peer.beat(2)
        await asyncio.wait_for(rig.leader.lost.wait(), 1)
        await asyncio.sleep(1)
        assert peer.acknowledged == [1]
        assert peer.closed is not None
        assert peer.closed.reason is Reason.NOT_LEADER
        with pytest.raises(DeposedError):
            await rig.leader.open_session(hello(incarnation("n0"), "n0"))
        await rig.stop()
        await rival.stop()

    run(main)


def test_silence_makes_suspect_then_expired_and_a_beat_makes_live() -> None:
    async def main() -> None:
        rig = await lead()
        uid = NodeUid("uid-n0")
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        for seq in range(2, 30):
            await asyncio.sleep(1)
            peer.beat(seq)
        nodes = rig.leader.state.nodes
        await asyncio.sleep(20)
        assert nodes[uid].liveness is Liveness.SUSPECT
        peer.beat(30)
        await asyncio.sleep(1)
        assert nodes[uid].liveness is Liveness.LIVE
        await asyncio.sleep(0.5)
        assert peer.acknowledged[-1] == 30
        await asyncio.sleep(65)
        assert nodes[uid].liveness is Liveness.EXPIRED
        await rig.stop()

    run(main)


def test_an_expiry_is_dropped_when_a_beat_comes_first_and_bars_acknowledgement_when_it_does_not() -> None:
    """The commit of the expiry is held back: until its outcome is known, a renewal may not be acknowledged."""

    async def main() -> None:
        disk = MemoryDisk()
        store = Gates(disk)
        rig = await lead(disk, store=store, settings=quick(prune_interval_seconds=3600.0))
        uid = NodeUid("uid-n0")
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        await asyncio.sleep(50)
        assert rig.leader.state.nodes[uid].liveness is Liveness.SUSPECT
        # The barrier before an expiry is held back; the beat that comes meanwhile wins.
        await asyncio.sleep(10.5)
        store.barriers.clear()
        await asyncio.sleep(2)
        peer.beat(2)
        store.barriers.set()
        await asyncio.sleep(2)
        assert rig.leader.state.nodes[uid].liveness is Liveness.LIVE
        assert "node.expired" not in [e.kind for e in rig.leader.state.events.values()]
        assert peer.acknowledged[-1] == 2
        # Now the expiry is decided and its commit hangs; the beat comes too late.
        await asyncio.sleep(55)
        assert rig.leader.state.nodes[uid].liveness is Liveness.SUSPECT
        store.commits.clear()
        await asyncio.sleep(10)
        peer.beat(3)
        await asyncio.sleep(2)
        assert 3 not in peer.acknowledged
        store.commits.set()
        await asyncio.sleep(0.5)
        assert "node.expired" in [e.kind for e in rig.leader.state.events.values()]
        assert 3 not in peer.acknowledged
        for seq in (4, 5):
            await asyncio.sleep(1)
            peer.beat(seq)
        await asyncio.sleep(1)
        assert rig.leader.state.nodes[uid].liveness is Liveness.LIVE
        assert peer.acknowledged[-1] == 5
        await rig.stop()

    run(main)


def test_a_beat_that_comes_right_after_the_decision_to_expire_wins() -> None:
    """Found by the simulation: silence was noted when the expiry's task began, and a hello had come just before it."""

    async def main() -> None:
        rig = await lead()
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        office, agents = rig.leader._office, rig.leader._agents
        assert office is not None
        assert agents is not None
        stall = StallWatch(
            clock=rig.clock,
            settings=office.settings,
            view=office.view,
            state=lambda: office.state,
            observer=UNOBSERVED,
            log=rig.log,
        )
        ticker = Ticker(office, agents=agents, stall=stall, wake=asyncio.Event(), want=lambda _: None)
        await asyncio.sleep(1)
        ticker._submit(MarkExpired(peer.session.incarnation), now(rig.clock))
        peer.beat(2)
        await asyncio.sleep(1)
        assert "node.expired" not in [e.kind for e in rig.leader.state.events.values()]
        await asyncio.sleep(1)  # what was refused is held back for a while
        ticker._submit(MarkExpired(peer.session.incarnation), now(rig.clock))
        await asyncio.sleep(0.1)
        assert "node.expired" in [e.kind for e in rig.leader.state.events.values()]
        await rig.stop()

    run(main)


def test_a_suspect_is_acknowledged_only_once_it_is_live_for_everyone() -> None:
    """The commit that makes it LIVE hangs: a next leader would time it from its suspicion, and this ack be too long."""

    async def main() -> None:
        disk = MemoryDisk()
        store = Gates(disk)
        rig = await lead(disk, store=store, settings=quick(prune_interval_seconds=3600.0))
        uid = NodeUid("uid-n0")
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        await asyncio.sleep(20)
        assert rig.leader.state.nodes[uid].liveness is Liveness.SUSPECT
        store.commits.clear()
        peer.beat(2)
        await asyncio.sleep(2)
        assert peer.acknowledged == [1]
        store.commits.set()
        await asyncio.sleep(0.6)
        assert rig.leader.state.nodes[uid].liveness is Liveness.LIVE
        assert peer.acknowledged == [1, 2], "the beat itself is not lost"
        await rig.stop()

    run(main)


def test_an_expired_session_is_acknowledged_only_once_it_is_live_again() -> None:
    async def main() -> None:
        disk = MemoryDisk()
        store = Gates(disk)
        rig = await lead(disk, store=store)
        uid = NodeUid("uid-n0")
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        await asyncio.sleep(65)
        assert rig.leader.state.nodes[uid].liveness is Liveness.EXPIRED
        store.commits.clear()
        for seq in (2, 3, 4):
            peer.beat(seq)
            await asyncio.sleep(1)
        assert peer.acknowledged == [1]
        store.commits.set()
        await asyncio.sleep(0.1)
        peer.beat(5)
        await asyncio.sleep(1)
        assert peer.acknowledged == [1, 5]
        await rig.stop()

    run(main)


def test_orders_wait_for_a_proof_of_leadership() -> None:
    """A deposed leader would order what its successor has started to be stopped."""

    async def main() -> None:
        disk = MemoryDisk()
        store = Gates(disk)
        rig = await lead(disk, store=store)
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        await asyncio.sleep(1)
        store.barriers.clear()
        token = Token(JobId("j"), 1, Epoch(1, 1))
        for seq in range(2, 12):
            peer.beat(seq, (SlotStatus(SlotId("j.1.0"), token, SlotState.RUNNING),))
            await asyncio.sleep(1)
        assert peer.tasks == []
        store.barriers.set()
        await asyncio.sleep(2)
        assert {type(o) for o in peer.tasks} == {Stop}
        await rig.stop()

    run(main)


def test_a_reader_is_served_by_a_barrier_that_started_after_it_came() -> None:
    async def main() -> None:
        disk = MemoryDisk()
        store = Gates(disk)
        rig = await lead(disk, store=store)
        await asyncio.sleep(1)  # the first tick has its own
        store.barriers.clear()
        await asyncio.sleep(1)
        asked, proved = store.asked, store.proved
        readers = [asyncio.ensure_future(rig.leader.barrier()) for _ in range(5)]
        await asyncio.sleep(1)
        assert store.asked == asked
        store.barriers.set()
        await asyncio.gather(*readers)
        assert store.proved == proved + 2, "not the one that was under way, but one for all of them"
        await rig.stop()

    run(main)


def test_a_leader_that_stood_still_times_everyone_anew() -> None:
    async def main() -> None:
        rig = await lead()
        uid = NodeUid("uid-n0")
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        for seq in range(2, 10):
            await asyncio.sleep(1)
            peer.beat(seq)
        rig.clock.offset_ns += 300 * SECOND_NS  # SIGSTOP, or a suspended machine
        await asyncio.sleep(2)
        assert rig.log.of(LogName.LEADER_STALLED)
        assert rig.leader.state.nodes[uid].liveness is Liveness.LIVE
        await asyncio.sleep(70)
        assert rig.leader.state.nodes[uid].liveness is Liveness.EXPIRED
        await rig.stop()

    run(main)


def test_a_beat_with_a_later_grant_makes_a_deposed_leader_notice() -> None:
    """It notices by the proof it has to give, not by the beat: one that makes a token up deposes nobody."""

    async def main() -> None:
        rig = await lead(settings=quick(barrier_interval_seconds=3600.0))
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        await asyncio.sleep(1)
        token = Token(JobId("j"), 1, Epoch(1, 10_000))
        peer.beat(2, (SlotStatus(SlotId("j.1.0"), token, SlotState.RUNNING),))
        await asyncio.sleep(3)
        assert 1 <= len(rig.log.of(LogName.LEADER_DOUBTED)) <= 4
        assert not rig.leader.lost.is_set()
        assert peer.tasks == [], "what a later leader may have started is not stopped"
        rival = await lead(rig.disk)
        await asyncio.sleep(3)
        assert rig.leader.lost.is_set()
        await rig.stop()
        await rival.stop()

    run(main)


@pytest.mark.row("H13", defect="unbounded_order_queue")
def test_case_h13_one_hung_agent_costs_its_own_queue_and_nothing_else() -> None:
    """It keeps beating and never reads: orders for it are turned away, everyone else is served."""

    async def main() -> None:
        rig = await lead(settings=quick(session_orders_max=6))
        hung = await Peer.connect(rig.leader, hello(incarnation("hung"), "hung"), reads=False)
        good = [await Peer.connect(rig.leader, hello(incarnation(f"n{i}"), f"n{i}")) for i in range(2)]
        peers = [hung, *good]
        for peer in peers:
            await peer.session.report_inventory(Inventory())
        for n in range(4):
            await rig.submit(SubmitJob(f"r{n}", spec(ranks=3, cpu_millis=900), f"job-{n}"))
        for seq in range(2, 200):
            await asyncio.sleep(1)
            for peer in peers:
                peer.beat(seq)
        await asyncio.sleep(0.5)
        assert len(hung.session.outbox) == 6 + 2, "its orders up to the bound, welcome and one acknowledgement"
        assert hung.session.outbox.turned_away > 0
        for peer in good:
            assert peer.acknowledged[-1] == 199
            prepared = {o.token.job for o in peer.orders if isinstance(o, Prepare)}
            assert prepared == {f"job-{n}" for n in range(4)}
        assert (await rig.submit(SubmitJob("more", spec()))).subject
        await rig.stop()

    run(main)


def test_files_dropped_everywhere_free_the_record_only_once_all_have_answered() -> None:
    async def main() -> None:
        rig = await lead()
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        peer.session.receive(DropDone(JobId("nope"), CheckpointId("c1")))
        await asyncio.sleep(1)
        assert not rig.leader.lost.is_set()
        await rig.stop()

    run(main)
