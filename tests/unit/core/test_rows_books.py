"""Rows about ids, leases and balance that the controller's core keeps out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controld.core.agent import Order
from controld.core.commands import AdmitNode, CancelJob, Prune, ReleaseMember
from controld.core.draft import Draft
from controld.core.ids import Incarnation, JobId, NodeUid
from controld.core.model import JobState, LeaseState, TaskExit
from controld.core.outcome import Refused
from controld.core.spec import SECOND_NS, RestartSpec
from controld.core.state import State
from controld.core.transitions import endings, generations, jobs, leases, nodes
from controld.health.view import View
from controld.reconcile import gang
from controld.reconcile.snapshot import snapshot
from tests.support_core import GIB, World, spec
from tests.support_rows import Defect, Rows, each_defect, each_row, nodes_of, running
from virialpb.ids import NO_EPOCH, Epoch
from virialpb.reasons import ExitReason, Reason

Patch = pytest.MonkeyPatch


def books_balance(world: World) -> None:
    for node in snapshot(world.state, world.view, world.now).nodes:
        assert node.cpu_free_millis == node.cpu_millis, node.name
        assert node.memory_free_bytes == node.memory_bytes, node.name
        assert all(d.free_thousandths == 1000 for d in node.devices), node.name


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
    world.run(400)
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

    def once(p: gang.Pass, node: NodeUid, about: str, order: Order) -> None:
        if f"{type(order).__name__}:{about}" not in p.view.sessions[node].sent_ns:
            real(p, node, about, order)

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


ROWS: Rows = {
    "H4": (ids_are_never_used_twice, (Defect("counts_what_is_there", counts_what_is_there),)),
    "H5": (books_balance_after_every_path, (Defect("forgets_the_spares", forgets_the_spares),)),
    "H7": (late_reports_change_nothing, (Defect("believes_any_token", believes_any_token),)),
    "H8": (release_waits_for_the_agent, (Defect("frees_by_decree", frees_by_decree),)),
    "C15": (release_waits_for_the_agent, (Defect("gives_up_after_one_order", gives_up_after_one_order),)),
    "F10": (restart_adopts, (Defect("hasty_leader", hasty_leader),)),
    "C9": (clone_frees_nothing, (Defect("believes_the_clone", believes_the_clone),)),
}


@each_row(ROWS)
def test_the_row_holds(row: str) -> None:
    ROWS[row][0]()


@each_defect(ROWS)
def test_the_row_fails_under_its_defect(row: str, defect: Defect, monkeypatch: Patch) -> None:
    defect.seed(monkeypatch)
    with pytest.raises(AssertionError):
        ROWS[row][0]()
