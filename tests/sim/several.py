"""The world of three controllers: each with a member of etcd beside it, and agents and users that find the leader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace

from controld.replica.election import Timings
from controld.replica.errors import NotLeaderError
from controld.replica.settings import LeaderSettings
from tests.sim.client import User
from tests.sim.etcd.raft import Raft
from tests.sim.fabric import Fabric
from tests.sim.faults import Faults
from tests.sim.judge import Judge
from tests.sim.readers import Reader, Watcher
from tests.sim.replicas import SimReplica
from tests.sim.several_faults import SeveralFaults
from tests.sim.world import Controller, Shape, World

SEVERAL = Shape(trouble_s=540.0, length_s=620.0, commands=190, faults=18, several=True)
"""Pressing a key twice makes well over 200 commands of it."""
TIMINGS = Timings(*(2 * ns for ns in astuple(Timings())))
"""Twice the defaults, as barriers are half as frequent: an election is the same, and a second of it costs half."""


READERS = 2


class FollowingUser(User):
    """Asks the controller that answered last, or the one that was named; where that fails, another."""

    shares = (15, 6, 36, 36, 2)
    work_s = (5.0, 30.0)
    _address = ""

    def _controller(self) -> Controller:
        controllers = self.world.controllers
        named = next((c for c in controllers if c.name == self._address), None)
        chosen = named or self.rng.choice(controllers)
        self._address = chosen.name
        return chosen

    def _failed(self, error: Exception) -> None:
        self._address = error.leader if isinstance(error, NotLeaderError) else ""


class SeveralWorld(World):
    addresses = ("c0", "c1", "c2")
    host_counts = (3, 3, 4)

    def _make_faults(self) -> Faults:
        return SeveralFaults(self)

    def _make_controllers(self, settings: LeaderSettings) -> None:
        # History is compacted under the feet of whoever is away, and few commands make a batch that is decided ahead.
        settings = replace(
            settings,
            cursor_window_seconds=20,
            compact_interval_seconds=10,
            barrier_interval_seconds=0.5,
            ahead_commands_min=1,
            slice_commands=2,
        )
        self.timings = TIMINGS
        self.network.refuses = True
        self.fabric = Fabric(self.loop, self.rng("fabric"))
        self.raft = Raft(self.loop, self.rng("raft"), self.fabric, self.addresses)
        self.judge = Judge(self)
        self.raft.on_commit = self.judge.committed
        self.replicas = [SimReplica(self, address, settings) for address in self.addresses]

    @property
    def controllers(self) -> Sequence[SimReplica]:
        return self.replicas

    def _begin_controllers(self) -> None:
        for controller in self.replicas:
            self.loop.after(self.rng(f"boot/{controller.name}").uniform(0, 2), controller.start)

    def replica(self, address: str) -> SimReplica:
        return next(replica for replica in self.replicas if replica.name == address)

    def make_user(self, name: str, count: int, seconds: float) -> User:
        return FollowingUser(self, name, count, seconds)

    async def troubled(self) -> None:
        readers = [Reader(self, f"r{number}") for number in range(READERS)]
        for each in (*readers, Watcher(self, "w0"), Watcher(self, "w1")):
            self.start(each.run())
        await super().troubled()

    def _ask_why(self) -> None:
        super()._ask_why()
        self.judge.compare_copies()

    def _judge_copies(self) -> None:
        self.judge.compare_copies(at_the_end=True)
