"""What goes wrong among three controllers and their members: crashes, pauses, cuts, lost answers, bad disks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from controld.replica.errors import NotLeaderError
from controld.store.port import StoreError
from tests.sim.calls import Unreachable
from tests.sim.etcd.member import FULL_BYTES, Member
from tests.sim.fabric import Link, Port, links_of
from tests.sim.faults import Faults, Menu
from tests.sim.network import Way

if TYPE_CHECKING:
    from tests.sim.replicas import SimReplica
    from tests.sim.several import SeveralWorld

BOTH = (Port.RAFT, Port.PEERS)
CRASH_STEPS_MAX = 60


class SeveralFaults(Faults):
    def __init__(self, world: SeveralWorld) -> None:
        super().__init__(world)
        self._several = world

    def _of_controllers(self) -> Menu:
        return (
            (12, self.leader_crash),
            (14, self.leader_crash_in_commit),
            (5, self.leader_down),
            (6, self.follower_crash),
            (14, self.leader_paused),
            (5, self.follower_paused),
            (4, self.everyone_paused),
            (6, self.host_power_loss),
            (8, self.hand_over),
            (10, self.member_crash),
            (5, self.member_paused),
            (4, self.quorum_lost),
            (8, self.raft_leader_moves),
            (10, self.socket_cut),
            (12, self.store_trouble),
            (5, self.store_slow),
            (5, self.disk_slow),
            (4, self.disk_fails),
            (4, self.space_alarm),
            (6, self.watch_lags),
            (6, self.crash_before_a_watch),
            (10, self.leader_isolated),
            (6, self.host_one_way),
            (12, self.member_isolated),
            (8, self.peers_isolated),
            (6, self.pair_cut),
            (4, self.links_slow),
            (8, self.controller_cut_from_agents),
        )

    def _heal_controllers(self) -> None:
        world = self._several
        world.fabric.heal_everything()
        for controller in world.replicas:
            controller.crash_steps = 0
            controller.socket.heal()
            if controller.process is not None:
                controller.process.thaw()
            controller.start()
            world.raft.thaw(controller.member)
            world.raft.start(controller.member)
            controller.member.slow_disk_s = 0.0

    def _leader(self) -> SimReplica:
        """Whoever leads by the log; anyone where nobody does."""
        reign = self._several.judge.reign
        return self._rng.choice(self._several.replicas) if reign is None else self._several.replica(reign.identity)

    def _follower(self) -> SimReplica:
        leader = self._leader()
        return self._rng.choice([replica for replica in self._several.replicas if replica is not leader])

    def _anyone(self) -> SimReplica:
        """The leader more often than another."""
        chosen = self._leader() if self._rng.random() < 0.6 else self._follower()
        self._note(chosen.name)
        return chosen

    def _member(self) -> Member:
        """The leader's, or that of etcd's own leader."""
        own = self._several.raft.leader
        return own if own is not None and self._rng.random() < 0.5 else self._leader().member

    # -- controllers

    async def leader_crash(self) -> None:
        self._leader().kill()

    async def leader_crash_in_commit(self) -> None:
        """At one of the awaits of its next commit, and of what follows."""
        self._leader().crash_steps = self._rng.randint(1, CRASH_STEPS_MAX)

    async def leader_down(self) -> None:
        seconds = self._rng.choice((10.0, 40.0))
        self._leader().kill(restart_s=(seconds, seconds + 1))

    async def follower_crash(self) -> None:
        self._follower().kill(restart_s=(0.3, 20.0))

    async def _pause(self, replicas: Iterable[SimReplica], seconds: float) -> None:
        processes = [replica.process for replica in replicas if replica.process is not None]
        for process in processes:
            process.freeze()
        await asyncio.sleep(seconds)
        for process in processes:
            process.thaw()

    async def leader_paused(self) -> None:
        """As by SIGSTOP: clocks and its member go on."""
        await self._pause([self._leader()], self._rng.choice((0.5, 1.0, 3.0, 9.0, 20.0)))

    async def follower_paused(self) -> None:
        """Sometimes so long that the history it would go on in is gone, and so is its watch."""
        follower = self._follower()
        if self._rng.random() < 0.5:
            follower.member.watches.break_off()
        await self._pause([follower], self._rng.choice((0.5, 3.0, 50.0)))

    async def everyone_paused(self) -> None:
        await self._pause(self._several.replicas, self._rng.choice((0.5, 3.0, 20.0)))

    async def host_power_loss(self) -> None:
        """Controller and member at once."""
        replica = self._anyone()
        replica.kill(restart_s=(1.0, 20.0))
        replica.crash_member(restart_s=(1.0, 20.0))

    async def hand_over(self) -> None:
        try:
            await self._leader().hand_over()
        except (Unreachable, NotLeaderError, StoreError):
            return

    # -- members

    def _replica_of(self, member: Member) -> SimReplica:
        return self._several.replica(member.name)

    async def member_crash(self) -> None:
        self._replica_of(self._member()).crash_member(restart_s=(0.3, self._rng.choice((1.0, 20.0))))

    async def member_paused(self) -> None:
        member = self._member()
        self._several.raft.freeze(member)
        await asyncio.sleep(self._rng.choice((0.3, 2.0, 10.0)))
        self._several.raft.thaw(member)

    async def quorum_lost(self) -> None:
        for replica in self._rng.sample(self._several.replicas, 2):
            replica.crash_member(restart_s=(1.0, 15.0))

    async def raft_leader_moves(self) -> None:
        self._several.raft.move_leader()

    async def disk_slow(self) -> None:
        member = self._member()
        member.slow_disk_s = self._rng.choice((0.05, 0.5, 2.0))
        await asyncio.sleep(self._rng.uniform(3.0, 20.0))
        member.slow_disk_s = 0.0

    async def disk_fails(self) -> None:
        """A write to the log fails, and with it the member; again when it has started, and then no more."""
        replica = self._replica_of(self._member())
        replica.crash_member(restart_s=(0.1, 0.5))
        await asyncio.sleep(1.0)
        replica.crash_member(restart_s=(0.1, 10.0))

    async def space_alarm(self) -> None:
        """A member's file has reached the quota: nobody writes until somebody has won space back."""
        member = self._member()
        member.file_bytes = FULL_BYTES
        self._several.raft.full.add(member.id)

    async def watch_lags(self) -> None:
        for replica in self._several.replicas:
            replica.member.watches.lag(self._rng.choice((0.3, 2.0)))
        await asyncio.sleep(self._rng.uniform(0.0, 1.0))
        self._follower().member.watches.break_off()

    async def crash_before_a_watch(self) -> None:
        """The last commits of a leader are not yet known to those who take its place."""
        leader = self._leader()
        for replica in self._several.replicas:
            if replica is not leader:
                replica.member.watches.lag(self._rng.choice((2.0, 5.0)))
        await asyncio.sleep(self._rng.uniform(0.1, 2.0))
        leader.kill()

    # -- between a controller and its member

    async def socket_cut(self) -> None:
        """Its peers and agents hear it, and its member does not, or it does not hear its member."""
        replica = self._anyone()
        trouble = replica.socket.trouble
        trouble.deaf, trouble.mute = self._rng.choice(((True, True), (True, False), (False, True)))
        await asyncio.sleep(self._rng.choice((0.5, 2.0, 8.0, 30.0)))
        replica.socket.heal()

    async def store_trouble(self) -> None:
        trouble = self._leader().socket.trouble
        kind = self._rng.choice(("lost_request", "lost_answer", "lost_answer", "late"))
        setattr(trouble, kind, self._rng.choice((0.02, 0.2, 0.6)))
        await asyncio.sleep(self._rng.uniform(2.0, 20.0))
        setattr(trouble, kind, 0.0)

    async def store_slow(self) -> None:
        trouble = self._anyone().socket.trouble
        trouble.slow_s = self._rng.choice((0.05, 0.3, 1.0))
        await asyncio.sleep(self._rng.uniform(3.0, 20.0))
        trouble.slow_s = 0.0

    # -- between hosts

    async def _cut_links(self, links: list[Link], seconds: float | None = None) -> None:
        fabric = self._several.fabric
        fabric.cut(links)
        await asyncio.sleep(seconds or self._rng.choice((0.7, 2.0, 6.0, 20.0)))
        fabric.heal(links)

    async def leader_isolated(self) -> None:
        """From the other controllers and members; its agents reach it, or not."""
        replica, network = self._anyone(), self._several.network
        alone = self._rng.random() < 0.5
        if alone:
            network.cut(replica.name, Way.UP, Way.DOWN)
        await self._cut_links(links_of(replica.name, self._several.addresses, BOTH, out=True, back=True))
        if alone:
            network.heal(replica.name, Way.UP, Way.DOWN)

    async def host_one_way(self) -> None:
        replica = self._anyone()
        out = self._rng.random() < 0.5
        await self._cut_links(links_of(replica.name, self._several.addresses, BOTH, out=out, back=not out))

    async def member_isolated(self) -> None:
        """The leader's member is alone; its pings flow."""
        replica = self._anyone()
        await self._cut_links(links_of(replica.name, self._several.addresses, (Port.RAFT,), out=True, back=True))

    async def peers_isolated(self) -> None:
        """Its pings do not flow, and its store is well; or only one way."""
        replica = self._anyone()
        out, back = self._rng.choice(((True, True), (True, False), (False, True)))
        await self._cut_links(links_of(replica.name, self._several.addresses, (Port.PEERS,), out=out, back=back))

    async def pair_cut(self) -> None:
        one, other = self._rng.sample(self._several.addresses, 2)
        ports = self._rng.choice(((Port.RAFT,), (Port.PEERS,), BOTH))
        await self._cut_links(links_of(one, (other,), ports, out=True, back=True))

    async def links_slow(self) -> None:
        replica, fabric = self._anyone(), self._several.fabric
        fabric.slow_s[replica.name] = self._rng.choice((0.02, 0.2, 1.0))
        await asyncio.sleep(self._rng.uniform(3.0, 20.0))
        fabric.slow_s.pop(replica.name, None)

    async def controller_cut_from_agents(self) -> None:
        replica, network = self._anyone(), self._several.network
        ways = self._rng.choice(((Way.UP, Way.DOWN), (Way.UP,), (Way.DOWN,)))
        network.cut(replica.name, *ways)
        await asyncio.sleep(self._rng.choice((2.0, 8.0, 30.0)))
        network.heal(replica.name, *ways)
