"""Scenario scripts and what the control loop makes of them, kept in one file each.

A file is a list of blocks: lines of commands, `----`, then the output that was recorded. `VIRIAL_REWRITE=1` records
anew; read the diff as you would read code. Commands:

    nodes N                            N nodes n0, n1, ... of 1000 thousandths of a core
    submit ID ranks=R spares=S writes=token|shared fence_after_s=F max=M
    run SECONDS                        time passes; agents obey at once
    cut NODE | heal NODE               the node's beats stop, or come again
    fail JOB RANK                      the rank exits with 1
    finish JOB                         every rank exits with 0
    save JOB STEP                      every rank saves a checkpoint
    step JOB STEP                      every rank reports progress
    drain NODE | cancel JOB | new_guardian NODE | new_leader
    orders JOB                         how often each rank was asked to save
    show JOB                           phase, members and leases of its generations
    explain JOB
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from controld.core.agent import SaveNow
from controld.core.commands import AdmitNode, BeginCheckpoint, CancelJob, DrainNode, PrepareShard, SubmitJob
from controld.core.ids import CheckpointId, JobId
from controld.core.model import Event, Generation, TaskExit
from controld.core.spec import RestartSpec, Writes
from controld.health.view import View
from controld.reconcile.explain import explain
from tests.support_core import GIB, Agent, World, incarnation, spec
from virialpb.reasons import ExitReason

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
SEPARATOR = "----"


class Scenario:
    """One world, driven line by line; `take` gives what happened since it was last asked."""

    def __init__(self) -> None:
        self.world = World(0)
        self.requests = 0
        self._seen = 0
        self._shown: list[str] = []

    def do(self, line: str) -> None:
        verb, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        arguments = [word for word in words if "=" not in word]
        handler: Callable[..., None] = getattr(self, f"do_{verb}")
        handler(*arguments, **options)

    def take(self) -> str:
        new = self.world.events[self._seen :]
        self._seen = len(self.world.events)
        lines = [_line(event) for event in new] + self._shown
        self._shown = []
        return "\n".join(lines)

    def _request(self) -> str:
        self.requests += 1
        return f"r{self.requests}"

    def _agent(self, name: str) -> Agent:
        return self.world.agents[name]

    def _current(self, job: str) -> Generation:
        generation = self.world.state.current(JobId(job))
        assert generation is not None
        return generation

    def do_nodes(self, count: str) -> None:
        for i in range(int(count)):
            self.world.join(f"n{i}")

    def do_submit(
        self,
        job: str,
        ranks: str = "3",
        spares: str = "0",
        writes: str = "token",
        fence_after_s: str = "60",
        max: str = "3",  # noqa: A002 - the word of the job specification
    ) -> None:
        wanted = spec(
            int(ranks),
            int(spares),
            writes=Writes(writes.upper()),
            fence_after_s=int(fence_after_s),
            cpu_millis=1000,
            restart=RestartSpec(max=int(max)),
        )
        self.world.reply(SubmitJob(self._request(), wanted, job_id=job))

    def do_run(self, seconds: str) -> None:
        self.world.run(float(seconds))

    def do_cut(self, node: str) -> None:
        self._agent(node).cut = True

    def do_heal(self, node: str) -> None:
        self._agent(node).cut = False

    def _exit(self, job: str, code: int, rank: str = "") -> None:
        for member in self._current(job).ranks:
            if rank in ("", str(member.rank)):
                agent = next(a for a in self.world.agents.values() if a.incarnation.node_uid == member.node)
                agent.exit(member.slot, TaskExit(ExitReason.EXITED, code=code))

    def do_fail(self, job: str, rank: str) -> None:
        self._exit(job, 1, rank)

    def do_finish(self, job: str) -> None:
        self._exit(job, 0)

    def do_step(self, job: str, step: str) -> None:
        for member in self._current(job).ranks:
            agent = next(a for a in self.world.agents.values() if a.incarnation.node_uid == member.node)
            agent.progress(int(step))

    def do_save(self, job: str, step: str) -> None:
        generation = self._current(job)
        epoch = self.world.state.epoch_of(generation)
        for commit in (False, True):
            for member in generation.ranks:
                rank = member.rank or 0
                begun = BeginCheckpoint(JobId(job), generation.number, epoch, rank, int(step))
                id_ = CheckpointId(self.world.reply(begun).subject)
                if commit:
                    prepared = PrepareShard(
                        JobId(job), generation.number, epoch, rank, member.node, id_, int(step), 1, "d", f"{rank}.shard"
                    )
                    self.world.reply(prepared)

    def do_drain(self, node: str) -> None:
        self.world.reply(DrainNode(self._request(), self._agent(node).incarnation.node_uid, "maintenance"))

    def do_cancel(self, job: str) -> None:
        self.world.reply(CancelJob(self._request(), JobId(job)))

    def do_new_guardian(self, node: str) -> None:
        agent = self._agent(node)
        gone = tuple(agent.slots)
        agent.slots.clear()
        agent.incarnation = incarnation(node, f"g{self._request()}")
        self.world.reply(AdmitNode(agent.incarnation, node, f"addr-{node}", "pidns", 1000, 4 * GIB, gone_slots=gone))
        self.world.hello(agent)
        self.world.view.mark_reported(agent.incarnation.node_uid)

    def do_new_leader(self) -> None:
        self.world.view = View(started_ns=self.world.now_ns)
        for agent in self.world.agents.values():
            if not agent.cut:
                self.world.hello(agent)
                self.world.view.mark_reported(agent.incarnation.node_uid)

    def do_orders(self, job: str) -> None:
        for agent in self.world.agents.values():
            asked = [o for o in agent.orders if isinstance(o, SaveNow) and o.token.job == job]
            if asked:
                self._shown.append(f"{agent.name}: asked to save {len(asked)} times, for {asked[0].reason}")

    def do_show(self, job: str) -> None:
        record = self.world.job(JobId(job))
        self._shown.append(f"{job}: {record.state}, restarts {record.restarts}")
        for number, generation in sorted(self.world.state.generations.get(JobId(job), {}).items()):
            self._shown.append(f"  generation {number}: {generation.phase}")
            for member in generation.members:
                who = "spare" if member.rank is None else f"rank {member.rank}"
                self._shown.append(f"    {who} on {self.world.state.nodes[member.node].name}: {member.lease}")

    def do_explain(self, job: str) -> None:
        for reason in explain(self.world.state, self.world.view, JobId(job)).reasons:
            facts = " ".join(f"{k}={v}" for k, v in (*reason.numbers, *reason.details))
            self._shown.append(f"{reason.reason}: {reason.nodes} nodes {facts}".rstrip())


def _line(event: Event) -> str:
    facts = [f"{k}={v}" for k, v in (*event.numbers, *event.details)]
    words = [event.kind, event.job and f"{event.job}.{event.generation}", event.node, event.reason, *facts]
    return " ".join(word for word in words if word)


def play(text: str) -> str:
    """The file as it would be recorded now."""
    scenario = Scenario()
    blocks: list[str] = []
    for block in text.strip().split("\n\n"):
        commands, _, _ = block.partition(f"\n{SEPARATOR}")
        for line in commands.splitlines():
            if not line.startswith("#"):
                scenario.do(line)
        output = scenario.take()
        blocks.append(f"{commands}\n{SEPARATOR}\n{output}".rstrip())
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda p: p.stem)
def test_scenario(path: Path) -> None:
    recorded = path.read_text(encoding="utf-8")
    now = play(recorded)
    if os.environ.get("VIRIAL_REWRITE"):
        path.write_text(now, encoding="utf-8")
    assert now == recorded


def test_there_are_scenarios_and_a_changed_line_is_noticed() -> None:
    assert len(SCENARIOS) >= 5
    for path in SCENARIOS:
        recorded = path.read_text(encoding="utf-8")
        assert play(recorded.replace("ranks=3", "ranks=2")) != recorded
