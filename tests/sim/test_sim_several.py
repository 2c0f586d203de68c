"""Three controllers in the simulation: a crash at every await of a commit, and a fake etcd held against a real one."""

from __future__ import annotations

import asyncio

from controld.core.commands import PlaceHold, ReleaseHold
from controld.core.ids import NodeUid
from controld.core.model import Hold
from tests.sim.patches import simulated_machine
from tests.sim.several import FollowingUser, SeveralWorld
from tests.sim.world import Shape, World

QUIET = Shape(faults=0, commands=0, several=True)
STEPS = 45
"""So many callbacks after a commit began its answer is long on its way."""


def test_a_crash_at_every_await_of_a_commit_loses_and_doubles_nothing() -> None:
    crashes: list[int] = []

    async def play(world: World) -> None:
        assert isinstance(world, SeveralWorld)
        world.begin()
        user = FollowingUser(world, "user", 0, 0)
        await asyncio.sleep(5)
        node = NodeUid(next(iter(world.hosts.values())).disk.node_uid)
        for steps in range(1, STEPS + 1):
            reign = world.judge.reign
            assert reign is not None
            leader = world.replica(reign.identity)
            leader.crash_steps = steps
            held = steps % 2
            hold = PlaceHold(user.next_id(), node, Hold("user", "test"), expire_after_ns=0)
            assert await user.ask(hold if held else ReleaseHold(user.next_id(), node, "user"))
            await asyncio.sleep(4)
            crashes.append(leader.died_s > 0)
            leader.died_s = 0.0
            assert bool(world.checkers.state.nodes[node].holds) is bool(held)
            world.judge.compare_copies(at_the_end=True)

    with simulated_machine():
        result = SeveralWorld(1, QUIET, script=play).run()
    assert result.violations == ()
    assert sum(crashes) == STEPS
