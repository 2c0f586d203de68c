"""FakeCluster: what a test does to the cluster, as opposed to what its program asks of it."""

from __future__ import annotations

from collections.abc import Mapping

from controld.core.commands import BeginCheckpoint, PrepareShard
from controld.core.ids import CheckpointId, Incarnation, JobId, NodeUid, SlotId
from controld.core.model import Device, Generation, TaskExit
from controld.core.spec import SECOND_NS
from controld.reconcile.limits import Limits
from virial.testing.agent import FakeAgent
from virial.testing.client import FakeClient
from virial.testing.world import World
from virialpb.reasons import ExitReason

GIB = 1 << 30


class FakeCluster:
    """A controller and nodes in memory. Time stands still until `run`, or a client that waits, moves it."""

    def __init__(self, nodes: int = 0, *, limits: Limits | None = None) -> None:
        self._world = World(limits or Limits())
        if nodes:
            self.add_nodes(nodes)

    def client(self) -> FakeClient:
        """A client of this cluster; as many as you like."""
        return FakeClient(self._world)

    @property
    def time_s(self) -> float:
        """Virtual seconds since some moment before the cluster began."""
        return self._world.now_ns / SECOND_NS

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        self._world.run(int(seconds * SECOND_NS))

    # Nodes

    def add_nodes(
        self,
        count: int = 1,
        *,
        cpu_millis: int = 4_000,
        memory_bytes: int = 8 * GIB,
        devices: Mapping[str, int] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Nodes that join at once; their names. `devices`: how many of each kind, such as {"accelerator": 8}."""
        names: list[str] = []
        for _ in range(count):
            name = f"node-{len(self._world.agents)}"
            incarnation = Incarnation(NodeUid(f"uid-{name}"), "boot-1", "guardian-1")
            made = tuple(Device(f"{kind}-{i}", kind) for kind, n in (devices or {}).items() for i in range(n))
            label_pairs = tuple(sorted((labels or {}).items()))
            self._world.join(FakeAgent(name, incarnation, cpu_millis, memory_bytes, made, label_pairs))
            names.append(name)
        return names

    def lose_node(self, node: str) -> None:
        """Kill a node outright: nothing is heard of it any more. What follows takes virtual time."""
        agent = self._agent(node)
        agent.cut = True
        self._world.view.disconnected(agent.incarnation.node_uid)

    def return_node(self, node: str) -> None:
        """A lost node is back after a reboot, and nothing of what ran there is."""
        agent = self._agent(node)
        agent.reboot()
        self._world.join(agent)

    # Tasks

    def progress(self, job: str, step: int, **metrics: float) -> None:
        """Every running rank reports a step, at its next beat."""
        for agent, slot in self._running(job):
            agent.progress(slot, step, metrics)

    def checkpoint(self, job: str, step: int, *, bytes_per_rank: int = 1 << 20) -> str:
        """Every rank saves: a checkpoint is begun, prepared by each and so committed; its id."""
        generation = self._generation(job)
        epoch = self._world.state.epoch_of(generation)
        id_ = CheckpointId("")
        for member in generation.ranks:
            begin = BeginCheckpoint(generation.job, generation.number, epoch, member.rank or 0, step)
            id_ = CheckpointId(self._world.ask(begin).subject)
        for member in generation.ranks:
            rank = member.rank or 0
            self._world.ask(
                PrepareShard(
                    job=generation.job,
                    generation=generation.number,
                    epoch=epoch,
                    rank=rank,
                    node=member.node,
                    checkpoint=id_,
                    step=step,
                    size_bytes=bytes_per_rank,
                    digest="fake",
                    file=f"rank-{rank:05d}.shard",
                )
            )
        return id_

    def finish(self, job: str) -> None:
        """Every rank exits with code 0."""
        for agent, slot in self._running(job):
            agent.end(slot, TaskExit(ExitReason.EXITED))

    def fail(self, job: str, rank: int = 0, *, code: int = 1, stderr: str = "") -> None:
        """One rank exits with a code that is not 0."""
        agent, slot = self._rank(job, rank)
        agent.end(slot, TaskExit(ExitReason.EXITED, code, stderr_tail=stderr))

    def write_log(self, job: str, text: str, rank: int = 0, *, stream: str = "stdout") -> None:
        """A rank of the current generation writes to its standard output or error."""
        agent, slot = self._rank(job, rank)
        agent.logs[slot, stream] = agent.logs.get((slot, stream), b"") + text.encode()

    def _agent(self, node: str) -> FakeAgent:
        found = self._world.agents.get(node)
        if found is None:
            raise ValueError(f"there is no node {node!r}; there are {', '.join(self._world.agents) or 'none'}")
        return found

    def _generation(self, job: str) -> Generation:
        generation = self._world.state.current(JobId(job))
        if generation is None:
            raise ValueError(f"job {job!r} has no generation yet; let time pass with run()")
        return generation

    def _running(self, job: str) -> list[tuple[FakeAgent, SlotId]]:
        """The ranks of the current generation, in order, on nodes that are still there. Raises ValueError for none."""
        by_uid = {agent.incarnation.node_uid: agent for agent in self._world.agents.values()}
        members = self._generation(job).ranks
        found = [(by_uid[m.node], m.slot) for m in members if m.node in by_uid and not by_uid[m.node].cut]
        running = [(agent, slot) for agent, slot in found if slot in agent.slots]
        if not running:
            raise ValueError(f"no rank of job {job!r} runs; let time pass with run()")
        return running

    def _rank(self, job: str, rank: int) -> tuple[FakeAgent, SlotId]:
        generation = self._generation(job)
        member = next((m for m in generation.ranks if m.rank == rank), None)
        found = [pair for pair in self._running(job) if member is not None and pair[1] == member.slot]
        if not found:
            raise ValueError(f"rank {rank} of job {job!r} does not run")
        return found[0]
