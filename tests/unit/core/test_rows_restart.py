"""Rows about restart and checkpoints that the controller's core keeps out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controld.core import checkpoints
from controld.core.commands import AdmitNode, BeginCheckpoint, DrainNode, PrepareShard
from controld.core.ids import CheckpointId, JobId
from controld.core.model import CheckpointState, JobState, Phase, TaskExit
from controld.core.spec import SECOND_NS, CheckpointSpec, Durability, RestartSpec, Writes
from controld.core.state import State
from controld.core.transitions import checkpoints as checkpoint_rules
from controld.core.transitions import endings, generations
from controld.health.phi import Arrivals
from controld.reconcile import gang
from tests.support_core import GIB, World, incarnation, spec
from tests.support_rows import Defect, Rows, each_defect, each_row, nodes_of, running
from virialpb.ids import Epoch
from virialpb.reasons import ExitReason, StopReason

Patch = pytest.MonkeyPatch


# G1: an agent misses its beats; survivors restart within suspicion (or lease + grace), not after half an hour.


def survivors_restart_in_time() -> None:
    for writes, bound_s in ((Writes.TOKEN, 6 + 4), (Writes.SHARED, 20 + 1 + 6)):
        world, job = running(3, 4, spares=1, writes=writes, fence_after_s=20)
        world.agents[nodes_of(world, job)[1]].cut = True
        world.run(bound_s)
        assert world.job(job).generation == 2
        assert world.job(job).state is JobState.RUNNING


def never_suspects(patch: Patch) -> None:
    patch.setattr(Arrivals, "suspect_after_ns", lambda _: 1800 * SECOND_NS)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    patch.setattr("controld.reconcile.liveness._expired", lambda *_: ([], []))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


# G2: generations come from the store: kill and rejoin 10 times with 4 ranks, and no stale state hangs the next one.


def ten_kills_and_rejoins() -> None:
    world = World(4)
    job = world.submit(spec(4, restart=RestartSpec(max=100)))
    world.run(4)
    epochs: list[Epoch] = []
    for kill in range(10):
        generation = world.state.current(job)
        assert generation is not None
        assert (generation.number, generation.phase) == (kill + 1, Phase.ACTIVE)
        epochs.append(world.state.epoch_of(generation))
        agent = world.agents["n0"]
        for running_agent in world.agents.values():
            running_agent.progress(kill + 1)
        old_slots = tuple(agent.slots)
        agent.slots.clear()
        agent.incarnation = incarnation("n0", f"g{kill + 2}")
        world.reply(AdmitNode(agent.incarnation, "n0", "addr-n0", "pidns", 1000, 4 * GIB, gone_slots=old_slots))
        world.hello(agent)
        world.view.mark_reported(agent.incarnation.node_uid)
        world.run(8)
    assert world.job(job).state is JobState.RUNNING
    assert epochs == sorted(set(epochs))


def one_epoch_for_all(patch: Patch) -> None:
    patch.setattr(State, "epoch_of", lambda *_: Epoch(1, 1))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


# G3: the budget is state; a node that comes back quickly cannot reset it.


def budget_survives_a_rejoin() -> None:
    world, job = running(3, 3, restart=RestartSpec(max=2))
    for life in range(2, 6):
        for agent in world.agents.values():
            for slot in list(agent.slots):
                agent.exit(slot, TaskExit(ExitReason.EXITED, code=1))
        world.run(1)
        for agent in world.agents.values():
            agent.incarnation = incarnation(agent.name, f"g{life}")
            slots = tuple(agent.slots)
            agent.slots.clear()
            world.reply(
                AdmitNode(agent.incarnation, agent.name, f"addr-{agent.name}", "pidns", 1000, 4 * GIB, gone_slots=slots)
            )
            world.hello(agent)
            world.view.mark_reported(agent.incarnation.node_uid)
        world.run(10)
    assert world.job(job).state is JobState.FAILED
    assert world.job(job).generation == 3


def budget_not_charged(patch: Patch) -> None:
    patch.setattr(endings, "UNCHARGED", frozenset(StopReason))


# G4: an agent that is told to stop: the gang moves.


def drain_moves_the_gang() -> None:
    world, job = running(3, 4)
    name = nodes_of(world, job)[0]
    world.reply(DrainNode("d", world.agents[name].incarnation.node_uid, "maintenance"))
    world.run(10)
    assert world.job(job).state is JobState.RUNNING
    assert name not in nodes_of(world, job)
    assert not world.agents[name].slots


def drain_is_only_a_hold(patch: Patch) -> None:
    lost = gang._lost_member  # pyright: ignore[reportPrivateUsage]

    def blind(
        p: gang.Pass,
        job: gang.Job,
        generation: gang.Generation,
        token: gang.Token,
        statuses: dict[gang.SlotId, gang.SlotStatus | None],
    ) -> gang.Late | None:
        found = lost(p, job, generation, token, statuses)
        return None if found is not None and found[0] is StopReason.DRAIN else found

    patch.setattr(gang, "_lost_member", blind)


# G5: a rejoiner trains alone while the old group lives: two generations of a `shared` job are never alive.


def never_two_generations_alive() -> None:
    world, job = running(3, 4, spares=1, writes=Writes.SHARED, fence_after_s=20)
    cut = world.agents[nodes_of(world, job)[2]]
    cut.cut = True
    for _ in range(40):
        world.run(1)
        held = [n for n, g in world.state.generations[job].items() if any(m.lease.holds for m in g.ranks)]
        assert len(held) <= 1, held
        running_in = {
            s.token.generation for a in world.agents.values() for s in a.slots.values() if s.state == "RUNNING"
        }
        # The cut agent is played without a clock of its own: it counts as dead once its lease ran out.
        if world.state.generations[job][1].ranks[2].lease.holds:
            assert running_in <= {1}


def leaves_anyone_behind(patch: Patch) -> None:
    def silent(state: State, job: gang.Job, member: gang.Member) -> bool:
        return state.nodes[member.node].liveness != "LIVE"

    patch.setattr(gang, "may_leave_behind", silent)
    patch.setattr(generations, "may_leave_behind", silent)
    patch.setattr(gang, "Writes", type("Writes", (), {"TOKEN": Writes.SHARED}))
    patch.setattr(generations, "Writes", type("Writes", (), {"SHARED": None, "TOKEN": Writes.SHARED}))


# G13: however few a user wants to keep, the last committed checkpoint is never deleted.


def save(world: World, job: JobId, step: int) -> CheckpointId:
    generation = world.state.current(job)
    assert generation is not None
    epoch = world.state.epoch_of(generation)
    ids = [
        CheckpointId(world.reply(BeginCheckpoint(job, generation.number, epoch, m.rank or 0, step)).subject)
        for m in generation.ranks
    ]
    assert len(set(ids)) == 1
    for m in generation.ranks:
        rank = m.rank or 0
        file = f"rank-{rank:05d}.shard"
        world.reply(PrepareShard(job, generation.number, epoch, rank, m.node, ids[0], step, 1, "d", file))
    return ids[0]


def last_committed_is_kept() -> None:
    world = World(4)
    wanted = replace(spec(3), checkpoint=CheckpointSpec(Durability.SHARED_DIRECTORY, "/ckpt", keep=1))
    job = world.submit(wanted)
    world.run(4)
    for step in (10, 20, 30, 40):
        save(world, job, step)
        world.run(3)
        committed = checkpoints.committed(world.state, job)
        assert committed
        assert committed[0].step == step
    assert [c.step for c in checkpoints.committed(world.state, job)] == [40, 30]


def deletes_all_but_the_limit(patch: Patch) -> None:
    def everything(state: State, job: JobId) -> frozenset[CheckpointId]:
        return frozenset(c.id for c in state.checkpoints.get(job, {}).values() if c.state == "COMMITTED")

    patch.setattr(checkpoint_rules, "droppable", everything)
    patch.setattr("controld.reconcile.tick.droppable", everything)


# G7 and G9 in the registry: all parts, then COMMIT; the controller names one directory for all.


def commit_comes_last() -> None:
    world, job = running(3, 4)
    generation = world.state.current(job)
    assert generation is not None
    epoch = world.state.epoch_of(generation)
    replies = [world.reply(BeginCheckpoint(job, 1, epoch, rank, 7)) for rank in range(3)]
    assert len({(r.subject, r.directory) for r in replies}) == 1
    id_ = CheckpointId(replies[0].subject)
    for rank, member in enumerate(generation.ranks):
        assert world.state.checkpoints[job][id_].state is CheckpointState.BEGUN
        assert checkpoints.newest_restorable(world.state, job) is None
        world.reply(PrepareShard(job, 1, epoch, rank, member.node, id_, 7, 1, f"d{rank}", f"f{rank}"))
    record = world.state.checkpoints[job][id_]
    assert record.state is CheckpointState.COMMITTED
    assert [p.digest for p in record.parts] == ["d0", "d1", "d2"]


def commits_with_the_first_part(patch: Patch) -> None:
    real = checkpoint_rules.prepare

    def early(state: State, command: PrepareShard) -> object:
        record = state.checkpoints[command.job][command.checkpoint]
        lowered = replace(record, world_size=len(record.parts) + 1)
        copy = State(**{f: getattr(state, f) for f in ("history", "revision", "jobs", "generations", "created")})
        copy.checkpoints = {command.job: {command.checkpoint: lowered}}
        return real(copy, command)

    patch.setattr(checkpoint_rules, "prepare", early)


ROWS: Rows = {
    "G1": (survivors_restart_in_time, (Defect("never_suspects", never_suspects),)),
    "G2": (ten_kills_and_rejoins, (Defect("one_epoch_for_all", one_epoch_for_all),)),
    "G3": (budget_survives_a_rejoin, (Defect("budget_not_charged", budget_not_charged),)),
    "G4": (drain_moves_the_gang, (Defect("drain_is_only_a_hold", drain_is_only_a_hold),)),
    "G5": (never_two_generations_alive, (Defect("leaves_anyone_behind", leaves_anyone_behind),)),
    "G7": (commit_comes_last, (Defect("commits_with_the_first_part", commits_with_the_first_part),)),
    "G13": (last_committed_is_kept, (Defect("deletes_all_but_the_limit", deletes_all_but_the_limit),)),
}


@each_row(ROWS)
def test_the_row_holds(row: str) -> None:
    ROWS[row][0]()


@each_defect(ROWS)
def test_the_row_fails_under_its_defect(row: str, defect: Defect, monkeypatch: Patch) -> None:
    defect.seed(monkeypatch)
    with pytest.raises(AssertionError):
        ROWS[row][0]()
