"""Who gets a session: one life of a node at a time, from a leader that is not behind its agents."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from controld.core.agent import Hello, SlotState, SlotStatus, Welcome
from controld.core.commands import SubmitJob
from controld.core.ids import NO_EPOCH, Epoch, JobId, NodeUid, SlotId, Token
from controld.core.model import Device, Inventory, Liveness
from controld.replica.errors import SessionClosedError, SessionRefusedError
from controld.store.memory import MemoryDisk
from controld.store.port import DeposedError
from tests.support_core import incarnation, spec
from tests.support_replica import Gates, Peer, hello, lead, run
from virialpb.reasons import Reason


def test_the_second_of_two_clones_is_refused_and_the_first_is_kept() -> None:
    async def main() -> None:
        rig = await lead()
        first = await Peer.connect(rig.leader, hello(incarnation("n0", "g1"), "n0"))
        seq = 1
        for _ in range(40):
            await asyncio.sleep(1)
            first.beat(seq := seq + 1)
            with pytest.raises(SessionRefusedError) as refused:
                await rig.leader.open_session(hello(incarnation("n0", "g2"), "n0"))
            assert refused.value.reason is Reason.DUPLICATE_NODE
            assert "data directory" in refused.value.message
        await asyncio.sleep(0.5)
        assert first.acknowledged[-1] == seq
        assert rig.leader.state.nodes[NodeUid("uid-n0")].incarnation == incarnation("n0", "g1")
        told = [e for e in rig.leader.state.events.values() if e.kind == "node.duplicate"]
        assert len(told) == 1, "told once in a while, not at every attempt"
        # The first falls silent: after three missed beats the other life is taken.
        await asyncio.sleep(4)
        await Peer.connect(rig.leader, hello(incarnation("n0", "g2"), "n0"))
        assert rig.leader.state.nodes[NodeUid("uid-n0")].incarnation == incarnation("n0", "g2")
        assert first.session.closed
        await rig.stop()

    run(main)


def test_of_two_clones_that_come_at_once_one_is_refused() -> None:
    async def main() -> None:
        rig = await lead()
        came = await asyncio.gather(
            *(rig.leader.open_session(hello(incarnation("n0", f"g{i}"), "n0")) for i in range(5)),
            return_exceptions=True,
        )
        assert [type(c).__name__ for c in came] == ["NodeSession"] + ["SessionRefusedError"] * 4
        await rig.stop()

    run(main)


def test_the_same_life_reconnecting_takes_its_session_over() -> None:
    async def main() -> None:
        rig = await lead()
        first = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        second = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0", seq=7))
        await asyncio.sleep(1)
        assert first.session.closed
        first.session.close()  # its stream is noticed to be gone only now
        first.beat(99)
        await asyncio.sleep(1)
        assert second.acknowledged == [7]
        assert isinstance(second.orders[0], Welcome)
        assert rig.leader.view.sessions[NodeUid("uid-n0")].connected
        await rig.stop()

    run(main)


@pytest.mark.parametrize("nonce", ["g1", "g2"])
def test_a_hello_that_took_long_does_not_time_leases_from_before_later_beats(nonce: str) -> None:
    """The former stream's beats came, and were acknowledged, while the new hello waited for its commit."""

    async def main() -> None:
        disk = MemoryDisk()
        store = Gates(disk)
        rig = await lead(disk, store=store)
        first = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        await asyncio.sleep(5)
        store.commits.clear()
        again = replace(hello(incarnation("n0", nonce), "n0", seq=3), version="2")  # a change, so it needs a commit
        opening = asyncio.ensure_future(rig.leader.open_session(again))
        await asyncio.sleep(5)
        first.beat(2)
        heard_ns = rig.clock.boottime_ns()
        await asyncio.sleep(1)
        assert first.acknowledged[-1] == 2
        store.commits.set()
        await opening
        seen = rig.leader.view.sessions[NodeUid("uid-n0")]
        assert seen.last_receipt_ns == heard_ns
        assert seen.since_ns == heard_ns or nonce == "g1"
        await rig.stop()

    run(main)


def test_inventory_is_committed_and_marks_the_node_reported() -> None:
    async def main() -> None:
        rig = await lead()
        peer = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        uid = NodeUid("uid-n0")
        assert not rig.leader.view.sessions[uid].reported
        await peer.session.report_inventory(Inventory((Device("gpu0", "accelerator"),)))
        assert rig.leader.view.sessions[uid].reported
        assert [d.key for d in rig.leader.state.nodes[uid].inventory.devices] == ["gpu0"]
        peer.session.close()
        assert not rig.leader.view.sessions[uid].connected
        with pytest.raises(SessionClosedError):
            await peer.session.report_inventory(Inventory())
        await rig.stop()

    run(main)


def newer_hello(*, seen: Epoch | None = None, token_epoch: Epoch | None = None) -> Hello:
    slots: tuple[SlotStatus, ...] = ()
    if token_epoch is not None:
        token = Token(JobId("j"), 1, token_epoch)
        slots = (SlotStatus(SlotId("j.1.0"), token, SlotState.RUNNING),)
    return replace(hello(incarnation("n0"), "n0", slots=slots), leader_epoch_seen=seen or NO_EPOCH)


@pytest.mark.parametrize("token", [False, True])
def test_a_leader_that_is_behind_its_agents_steps_down_unless_it_can_prove_itself(token: bool) -> None:
    async def main() -> None:
        disk = MemoryDisk()
        store = Gates(disk)
        rig = await lead(disk, store=store)
        store.barriers.clear()  # it cannot notice by itself yet
        rival = await lead(disk)
        await rival.submit(SubmitJob("r1", spec()))
        epoch = rival.leader.epoch
        greeting = newer_hello(token_epoch=epoch) if token else newer_hello(seen=epoch)
        opening = asyncio.ensure_future(rig.leader.open_session(greeting))
        await asyncio.sleep(1)
        assert not opening.done()
        store.barriers.set()
        with pytest.raises(DeposedError):
            await opening
        assert rig.leader.lost.is_set()
        # The real leader takes the agent; one that makes an epoch up is refused, and deposes nobody.
        await rival.leader.open_session(newer_hello(seen=epoch))
        with pytest.raises(SessionRefusedError) as refused:
            await rival.leader.open_session(newer_hello(seen=Epoch(9, 9)))
        assert refused.value.reason is Reason.FENCED
        assert not rival.leader.lost.is_set()
        await rig.stop()
        await rival.stop()

    run(main)


def test_a_session_ends_when_its_node_is_replaced_by_another_of_its_name() -> None:
    """A host that was imaged anew comes back with another uid; the record of the old one is gone."""

    async def main() -> None:
        rig = await lead()
        old = await Peer.connect(rig.leader, hello(incarnation("n0"), "n0"))
        await asyncio.sleep(70)
        assert rig.leader.state.nodes[NodeUid("uid-n0")].liveness is Liveness.EXPIRED
        await Peer.connect(rig.leader, hello(incarnation("other"), "n0"))
        assert NodeUid("uid-n0") not in rig.leader.state.nodes
        assert old.session.closed
        old.beat(9)
        await asyncio.sleep(1)
        assert 9 not in old.acknowledged
        await rig.stop()

    run(main)
