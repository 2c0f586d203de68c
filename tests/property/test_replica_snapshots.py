"""The incremental snapshot is the whole one, whatever happened between."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from controld.core.agent import Hello
from controld.core.commands import PlaceHold, ReleaseHold
from controld.core.model import Hold
from controld.core.spec import SECOND_NS
from controld.reconcile.snapshot import snapshot
from controld.replica.snapshots import Snapshots
from tests.support_core import World, incarnation, spec

ACTIONS = st.tuples(
    st.sampled_from(
        ["submit", "run", "hold", "device_hold", "release", "cut", "hello", "reborn", "guardian", "report"]
    ),
    st.integers(0, 3),
)


def act(world: World, action: str, which: int, count: int) -> None:
    name = f"n{which}"
    agent = world.agents[name]
    uid = agent.incarnation.node_uid
    match action:
        case "submit":
            world.submit(spec(ranks=1 + which), f"r{count}")
        case "run":
            world.run(1 + 5 * which)
        case "hold":
            hold = Hold("op", "test", expire_time_unix_ns=world.now.unix_ns + 3 * SECOND_NS)
            world.do(PlaceHold(f"r{count}", uid, hold))
        case "device_hold":
            world.do(PlaceHold(f"r{count}", uid, Hold("op", "test", device_key="gpu0")))
        case "release":
            world.do(ReleaseHold(f"r{count}", uid, "op", "gpu0"))
        case "cut":
            agent.cut = True
            world.view.disconnected(uid)
        case "hello":
            agent.cut = False
            world.hello(agent)
        case "reborn":
            world.view.hello(_hello_of(world, name, f"g{count}"), world.now_ns)
        case "guardian":
            session = world.view.sessions[uid]
            session.guardian_ok = not session.guardian_ok
        case _:
            world.view.mark_reported(uid)


def _hello_of(world: World, name: str, nonce: str) -> Hello:
    agent = world.agents[name]
    return Hello(incarnation(name, nonce), name, "addr", "pidns", 1000, 1 << 32, agent.beat())


@settings(max_examples=60)
@given(st.lists(ACTIONS, max_size=25))
def test_incremental_equals_whole(actions: list[tuple[str, int]]) -> None:
    async def main() -> None:
        world = World(4, devices=2)
        snapshots = Snapshots()
        for count, (action, which) in enumerate(actions):
            act(world, action, which, count)
            taken = await snapshots.take(world.state, world.view, world.now)
            assert taken == snapshot(world.state, world.view, world.now), (action, which)
        node = next(iter(world.state.nodes.values()))
        world.state.nodes[node.uid] = replace(node, labels=(("rack", "r9"),))
        assert await snapshots.take(world.state, world.view, world.now) == snapshot(world.state, world.view, world.now)

    asyncio.run(main())
