"""An agent's link among three controllers: it is told who leads, and goes there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support_apps import Controllers, controllers
from tests.support_link import node
from virialpb.reasons import Reason


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[Controllers]:
    async with controllers(tmp_path) as found:
        yield found


@pytest.mark.parametrize("seed", range(3))
async def test_wherever_it_dials_first_its_session_is_the_leader_s(three: Controllers, seed: int) -> None:
    leader = await three.leader()
    async with node(three.addresses, seed=seed) as agent:
        await three.until(lambda: agent.acknowledged or None)
        assert agent.sessions == [(leader.address, leader.replica.epoch)]


async def test_after_the_leader_s_death_its_beats_are_acknowledged_by_the_next(three: Controllers) -> None:
    leader = await three.leader()
    async with node(three.addresses) as agent:
        await three.until(lambda: agent.acknowledged or None)
        await leader.kill()
        successor = await three.leader(but=leader)
        before = agent.seq
        await three.until(lambda: (agent.acknowledged[-1] > before) or None)
        assert agent.sessions[-1] == (successor.address, successor.replica.epoch)
        assert agent.sessions[-1][1] > agent.sessions[0][1]


async def test_a_leader_that_hands_over_sends_its_agents_to_the_successor(three: Controllers) -> None:
    leader = await three.leader()
    async with node(three.addresses) as agent:
        await three.until(lambda: agent.acknowledged or None)
        dials = agent.link.counters["connected"]
        await leader.stop()
        successor = await three.leader()
        await three.until(lambda: len(agent.sessions) == 2 or None)
        assert agent.sessions[1] == (successor.address, successor.replica.epoch)
        assert [(r.reason, r.leader) for r in agent.refusals] == [(Reason.NOT_LEADER, successor.address)]
        assert agent.link.counters["connected"] == dials + 1, "one dial, to the right place"


async def test_it_waits_out_a_time_without_a_leader(three: Controllers) -> None:
    async with node(three.addresses) as agent:
        await three.until(lambda: agent.acknowledged or None)
        for controller in three.all:
            await controller.kill()
        await asyncio.sleep(1)
        assert not agent.welcomed
        for controller in three.all:
            await controller.start()
        leader = await three.leader()
        await three.until(lambda: agent.welcomed or None)
        assert agent.sessions[-1] == (leader.address, leader.replica.epoch)
