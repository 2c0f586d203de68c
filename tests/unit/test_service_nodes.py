"""A node as callers see it."""

from __future__ import annotations

from dataclasses import replace

from controld.core.agent import Beat, Sample
from controld.core.ids import NodeUid
from controld.core.spec import SECOND_NS
from controld.service.convert.node import node_to_proto
from tests.support_core import World

UID = NodeUid("uid-n0")


def test_a_reading_grows_older_until_the_next_sweep_though_beats_come() -> None:
    world = World(1)
    world.run(2)
    seq = world.view.sessions[UID].beat_seq
    sample = Sample("temperature_max", 41_000, "millidegrees_celsius", "ok", 159)
    world.view.beat(UID, Beat(seq + 1, readings=(sample,)), world.now_ns)
    later = replace(world.now, boottime_ns=world.now_ns + 9 * SECOND_NS)
    world.view.beat(UID, Beat(seq + 2), later.boottime_ns)
    [reading] = node_to_proto(world.state.nodes[UID], [], world.state, world.view, later).readings
    assert (reading.value, reading.age_ms) == (41_000, 9_159)
