"""Rows of public failures that the controller's core keeps out, each shown to fail under seeded defects.

A scenario is a function that raises AssertionError when the row's promise is broken. The same function runs
on the real core and on the core with one rule replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from controld.core import checkpoints
from controld.core.commands import AdmitNode, BeginCheckpoint, CancelJob, DrainNode, PrepareShard, Prune, ReleaseMember
from controld.core.draft import Draft
from controld.core.ids import CheckpointId, Incarnation, JobId
from controld.core.model import CheckpointState, JobState, LeaseState, Phase, TaskExit
from controld.core.outcome import Refused
from controld.core.spec import SECOND_NS, CheckpointSpec, Durability, RestartSpec, Writes
from controld.core.state import State
from controld.core.transitions import checkpoints as checkpoint_rules
from controld.core.transitions import endings, generations, jobs, leases, nodes
from controld.health.phi import Arrivals
from controld.health.view import View
from controld.reconcile import gang
from controld.reconcile.snapshot import snapshot
from tests.support_core import GIB, World, incarnation, spec
from virialpb.ids import NO_EPOCH, Epoch
from virialpb.reasons import ExitReason, Reason, StopReason

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Defect:
    """One rule of the core, replaced by what went wrong elsewhere."""

    name: str
    seed: Callable[[Patch], None]


def running(ranks: int = 3, nodes: int = 4, **options: object) -> tuple[World, JobId]:
    world = World(nodes)
    job = world.submit(spec(ranks, **options))  # pyright: ignore[reportArgumentType]
    world.run(4)
    assert world.job(job).state is JobState.RUNNING
    return world, job


def nodes_of(world: World, job: JobId) -> list[str]:
    generation = world.state.current(job)
    assert generation is not None
    return [world.state.nodes[m.node].name for m in generation.ranks]


def books_balance(world: World) -> None:
    for node in snapshot(world.state, world.view, world.now).nodes:
        assert node.cpu_free_millis == node.cpu_millis, node.name
        assert node.memory_free_bytes == node.memory_bytes, node.name
        assert all(d.free_thousandths == 1000 for d in node.devices), node.name


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

    def blind(p: gang.Pass, job: gang.Job, generation: gang.Generation) -> object:
        found = lost(p, job, generation)
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


# H4: evicting finished jobs never lets an id be used again.


def ids_are_never_used_twice() -> None:
    world = World(3)
    seen: list[JobId] = []
    for i in range(4):
        job = world.submit(spec(1), f"r{i}")
        assert job not in seen
        seen.append(job)
        world.reply(CancelJob(f"c{i}", job))
        world.run(4)
        world.do(Prune(0, 1000, 0))
        assert not world.state.jobs


def counts_what_is_there(patch: Patch) -> None:
    real = Draft.cluster
    patch.setattr(Draft, "cluster", lambda d: replace(real(d), job_counter=len(d.state.jobs)))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType, reportUnknownMemberType]


# H5: books balance after every path: end, cancel before and after start, failed prepare, lost node.


def books_balance_after_every_path() -> None:
    world, job = running(3, 4, spares=1)
    world.reply(CancelJob("c1", job))
    world.run(6)
    books_balance(world)

    pending = world.submit(spec(9), "r2")
    world.run(2)
    world.reply(CancelJob("c2", pending))
    world.run(2)
    books_balance(world)

    done = world.submit(spec(3, 1), "r3")
    world.run(4)
    for agent in world.agents.values():
        for slot in list(agent.slots):
            if ".s" not in slot:
                agent.exit(slot, TaskExit(ExitReason.EXITED))
    world.run(4)
    assert world.job(done).state is JobState.SUCCEEDED
    books_balance(world)

    world.agents["n0"].fail_prepare = gang.PrepareFailure.COMMAND_NOT_FOUND
    refused = world.submit(spec(4, restart=RestartSpec(max=0)), "r4")
    world.run(10)
    assert world.job(refused).state is JobState.FAILED
    books_balance(world)


def forgets_the_spares(patch: Patch) -> None:
    patch.setattr(endings, "release_spares", lambda *_: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


# H7: a late report of a former generation does not fail the one that runs now.


def late_reports_change_nothing() -> None:
    world, job = running(3, 4, spares=1)
    first = world.state.current(job)
    assert first is not None
    epoch = world.state.epoch_of(first)
    world.agents[nodes_of(world, job)[1]].cut = True
    world.run(12)
    second = world.state.current(job)
    assert second is not None
    assert second.number == 2
    for token_epoch in (epoch, NO_EPOCH, Epoch(1, epoch.revision + 1)):
        for member in second.ranks:
            outcome = world.do(
                ReleaseMember(job, 2, token_epoch, member.slot, member.incarnation, TaskExit(ExitReason.SIGNALED))
            )
            assert isinstance(outcome, Refused)
            assert outcome.reason is Reason.FENCED
    assert world.state.current(job) == second


def believes_any_token(patch: Patch) -> None:
    real = State.epoch_of

    def yes(state: State, generation: gang.Generation) -> Epoch:
        class Any(Epoch):
            def __eq__(self, other: object) -> bool:
                return True

            def __ne__(self, other: object) -> bool:
                return False

            def __hash__(self) -> int:
                return 0

        return Any(*real(state, generation))

    patch.setattr(leases, "release", _release_without_fence)
    patch.setattr(State, "epoch_of", yes)


def _release_without_fence(state: State, command: ReleaseMember, now: object) -> object:
    draft = Draft(state)
    generation = draft.generation(command.job, command.generation)
    assert generation is not None
    member = generation.member(command.slot)
    assert member is not None
    draft.change_member(generation, replace(member, lease=LeaseState.RELEASED, exit=command.exit))
    return draft.done()


# H8 and C15: a lease is free when its agent said so, however often the order is lost; the obligation stays.


def release_waits_for_the_agent() -> None:
    world, job = running(3, 4)
    deaf = world.agents[nodes_of(world, job)[1]]
    real_obey = deaf.obey
    deaf.obey = deaf.orders.append  # type: ignore[method-assign] - it hears and does nothing
    world.reply(CancelJob("c", job))
    world.run(25)
    stops = [o for o in deaf.orders if isinstance(o, gang.Stop)]
    member = next(m for m in world.state.generations[job][1].ranks if world.state.nodes[m.node].name == deaf.name)
    assert member.lease is LeaseState.REVOKING
    assert world.job(job).state is JobState.CANCELLING
    assert 15 <= len(stops) <= 30  # once a second: neither forgotten nor a storm
    deaf.obey = real_obey  # type: ignore[method-assign]
    world.run(4)
    assert world.job(job).state is JobState.CANCELLED
    books_balance(world)


def frees_by_decree(patch: Patch) -> None:
    real = generations.begin_stop

    def stop(draft: Draft, generation: gang.Generation, *rest: object) -> None:
        real(draft, generation, *rest)  # pyright: ignore[reportArgumentType]
        stopped = draft.generation(generation.job, generation.number)
        assert stopped is not None
        members = tuple(replace(m, lease=LeaseState.RELEASED) for m in stopped.members)
        draft.put(replace(stopped, members=members))

    patch.setattr(jobs, "begin_stop", stop)


def gives_up_after_one_order(patch: Patch) -> None:
    real = gang.Pass.order

    def once(p: gang.Pass, node: object, about: str, order: object) -> None:
        key = (node, f"{type(order).__name__}:{about}")
        if key not in p.view.sent_ns:
            real(p, node, about, order)  # pyright: ignore[reportArgumentType]

    patch.setattr(gang.Pass, "order", once)
    patch.setattr("controld.reconcile.tick._forget_finished", lambda _: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


# F10: a restarted controller adopts every running lease; nothing restarts.


def restart_adopts() -> None:
    world, job = running(3, 4, spares=1)
    before = world.state.current(job)
    world.view = View(started_ns=world.now_ns)
    world.run(3)  # agents need a moment to find it
    for agent in world.agents.values():
        world.hello(agent)
        world.view.mark_reported(agent.incarnation.node_uid)
    world.run(10)
    assert world.state.current(job) == before
    assert world.job(job).state is JobState.RUNNING


def hasty_leader(patch: Patch) -> None:
    real = View.silent_ns
    patch.setattr(View, "silent_ns", lambda v, uid, now_ns: real(v, uid, now_ns) + 10 * SECOND_NS)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType, reportUnknownMemberType]


# C9: a clone of a node's identity at another boot frees nothing that the first may still use.


def clone_frees_nothing() -> None:
    world, job = running(3, 4)
    name = nodes_of(world, job)[0]
    uid = world.agents[name].incarnation.node_uid
    slots = tuple(world.agents[name].slots)
    clone = Incarnation(uid, "another-boot", "g9")
    world.reply(AdmitNode(clone, name, "addr", "pidns", 1000, 4 * GIB, gone_slots=slots))
    member = world.state.generations[job][1].ranks[0]
    assert member.lease.holds


def believes_the_clone(patch: Patch) -> None:
    def all_gone(draft: Draft, command: AdmitNode) -> None:
        for generation, member in draft.held_on(command.incarnation.node_uid):
            draft.change_member(generation, replace(member, lease=LeaseState.RELEASED))

    patch.setattr(nodes, "_release_gone", all_gone)


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


ROWS: dict[str, tuple[Callable[[], None], tuple[Defect, ...]]] = {
    "G1": (survivors_restart_in_time, (Defect("never_suspects", never_suspects),)),
    "G2": (ten_kills_and_rejoins, (Defect("one_epoch_for_all", one_epoch_for_all),)),
    "G3": (budget_survives_a_rejoin, (Defect("budget_not_charged", budget_not_charged),)),
    "G4": (drain_moves_the_gang, (Defect("drain_is_only_a_hold", drain_is_only_a_hold),)),
    "G5": (never_two_generations_alive, (Defect("leaves_anyone_behind", leaves_anyone_behind),)),
    "G7": (commit_comes_last, (Defect("commits_with_the_first_part", commits_with_the_first_part),)),
    "G13": (last_committed_is_kept, (Defect("deletes_all_but_the_limit", deletes_all_but_the_limit),)),
    "H4": (ids_are_never_used_twice, (Defect("counts_what_is_there", counts_what_is_there),)),
    "H5": (books_balance_after_every_path, (Defect("forgets_the_spares", forgets_the_spares),)),
    "H7": (late_reports_change_nothing, (Defect("believes_any_token", believes_any_token),)),
    "H8": (release_waits_for_the_agent, (Defect("frees_by_decree", frees_by_decree),)),
    "C15": (release_waits_for_the_agent, (Defect("gives_up_after_one_order", gives_up_after_one_order),)),
    "F10": (restart_adopts, (Defect("hasty_leader", hasty_leader),)),
    "C9": (clone_frees_nothing, (Defect("believes_the_clone", believes_the_clone),)),
}


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.row(row)) for row in ROWS], ids=[f"case_{row.lower()}" for row in ROWS]
)
def test_the_row_holds(row: str) -> None:
    ROWS[row][0]()


@pytest.mark.parametrize(
    ("row", "defect"),
    [
        pytest.param(
            row, defect, marks=pytest.mark.row(row, defect=defect.name), id=f"case_{row.lower()}_{defect.name}"
        )
        for row, (_, defects) in ROWS.items()
        for defect in defects
    ],
)
def test_the_row_fails_under_its_defect(row: str, defect: Defect, monkeypatch: Patch) -> None:
    defect.seed(monkeypatch)
    with pytest.raises(AssertionError):
        ROWS[row][0]()
