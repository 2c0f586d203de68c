"""Defects put into the real code, one at a time: each must be caught by the checker that is there for it.

A mutation runs in worlds with the faults that bring its defect out, and stops at the first accusation. One that no
seed brings out is a hole in the checkers, and fails the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from controld.core import commands as c
from controld.core.agent import BeatAck
from controld.core.model import Checkpoint, CheckpointState, Cluster, Generation, LeaseState
from controld.core.outcome import Outcome, Transition
from controld.core.spec import SECOND_NS, Writes
from controld.core.state import Change, State
from controld.core.transitions import checkpoints, generations, jobs, nodes, requests
from controld.matching import bench, engine
from controld.matching.port import Unplaced
from controld.reconcile import calls, explain, gang, pending, tick
from controld.replica.admission import Admission as Door
from controld.replica.agents import Agents
from controld.replica.writer import Writer
from controld.store import guard
from noded.core.epochs import Admission, LeaderEpoch
from noded.core.slotbook import SlotBook
from noded.run.slots import SlotTable
from tests.sim import node as sim_node
from tests.sim.guardian import SimGuardian
from tests.sim.mutation import Mutation, Patch
from tests.sim.several_mutations import SEVERAL_MUTATIONS
from tests.sim.task import Rank
from virialpb.ids import Incarnation

# -- the leader ----------------------------------------------------------------------------------------------------


def _ack_without_barrier() -> tuple[Patch, ...]:
    real = Agents._receive_beat

    def receive(self: Agents, session: Any, beat: Any) -> None:
        real(self, session, beat)
        self._put(session, BeatAck(beat.seq))

    return ((Agents, "_receive_beat", receive),)


def _ack_before_commit() -> tuple[Patch, ...]:
    real = Writer._finish

    async def finish(self: Writer, batch: Any) -> None:
        self._answer(batch)
        await real(self, batch)

    return ((Writer, "_finish", finish),)


def _forget_head_guard() -> tuple[Patch, ...]:
    def applied(head: Any, leadership: Any, seq: int) -> bool:
        del head, leadership, seq
        return False

    def led(head: Any, leadership: Any) -> None:
        del head, leadership

    return ((guard, "already_applied", applied), (guard, "require_leadership", led))


def _stale_leader_obeyed() -> tuple[Patch, ...]:
    """With a store that does not depose and a leader that hears of no other, or no stale order ever gets out."""

    def admit(self: LeaderEpoch, epoch: Any) -> Admission:
        self.seen = max(self.seen, epoch)
        return Admission.CURRENT

    async def refuse_newer(self: Door, hello: Any) -> None:
        del self, hello

    return (*_forget_head_guard(), (LeaderEpoch, "admit", admit), (Door, "refuse_newer", refuse_newer))


def _expire_before_grace() -> tuple[Patch, ...]:
    real = tick.assess

    def assess(state: Any, view: Any, now: Any, limits: Any) -> Any:
        return real(state, view, now, replace(limits, grace_ns=-5 * SECOND_NS))

    return ((tick, "assess", assess),)


def _never_release() -> tuple[Patch, ...]:
    def stale_slots(p: Any, uid: Any) -> None:
        del p, uid

    return ((tick, "_stale_slots", stale_slots),)


def _never_restart() -> tuple[Patch, ...]:
    real = pending.propose

    def propose(p: Any, job: Any, last: Any) -> None:
        if last is None:
            real(p, job, last)

    return ((pending, "propose", propose),)


def _restart_from_zero() -> tuple[Patch, ...]:
    def newest(state: Any, job: Any) -> None:
        del state, job

    def committed(state: Any, job: Any) -> tuple[Checkpoint, ...]:
        del state, job
        return ()

    return ((pending, "newest_restorable", newest), (pending, "committed", committed))


def _drop_explain() -> tuple[Patch, ...]:
    def unplaced(gang_: Any, benches: Any, barred: Any, room: Any, total: int) -> Unplaced:
        del benches, barred, room, total
        return Unplaced(gang_.job, gang_.number, (), 0)

    def waits(state: Any, job: Any) -> tuple[Any, ...]:
        del state, job
        return ()

    return ((engine, "unplaced", unplaced), (explain, "_waits_for_leases", waits))


# -- transitions ---------------------------------------------------------------------------------------------------


def _changed(outcome: Outcome, change: Callable[[Any], Any]) -> Outcome:
    if not isinstance(outcome, Transition):
        return outcome
    return replace(outcome, changes=tuple(replace(one, record=change(one.record)) for one in outcome.changes))


def _commit_with_missing_part() -> tuple[Patch, ...]:
    real = checkpoints.prepare

    def prepare(state: State, command: c.PrepareShard) -> Outcome:
        def hasten(record: Any) -> Any:
            begun = isinstance(record, Checkpoint) and record.state is CheckpointState.BEGUN
            return replace(record, state=CheckpointState.COMMITTED) if begun else record

        return _changed(real(state, command), hasten)

    return ((checkpoints, "prepare", prepare),)


def _no_fencing_on_checkpoints() -> tuple[Patch, ...]:
    def caller(call: Any, node: Any, state: State) -> Any:
        generation = state.generations.get(call.token.job, {}).get(call.token.generation)
        member = None if generation is None else generation.member(call.slot)
        return None if generation is None or member is None else (generation, member)

    def alive(state: State, command: Any) -> Any:
        return state.jobs[command.job], state.generations[command.job][command.generation]

    return ((calls, "_caller", caller), (checkpoints, "_alive", alive))


def _start_without_release() -> tuple[Patch, ...]:
    def leave(state: Any, job: Any, member: Any) -> bool:
        del state, job, member
        return True

    real = generations.start

    def start(state: State, command: c.StartGeneration, now: c.Now) -> Outcome:
        job = state.jobs.get(command.job)
        if job is not None:
            lenient = replace(job, spec=replace(job.spec, writes=Writes.TOKEN))
            state = replace(state, jobs={**state.jobs, job.id: lenient})
            outcome = real(state, command, now)
            return _changed(outcome, lambda r: replace(r, spec=job.spec) if getattr(r, "id", "") == job.id else r)
        return real(state, command, now)

    return ((gang, "may_leave_behind", leave), (generations, "may_leave_behind", leave), (generations, "start", start))


def _grant_what_is_held() -> tuple[Patch, ...]:
    def fits(node: Any, held: Any, more: Any, unix_ns: int) -> str:
        del node, held, more, unix_ns
        return ""

    real = bench.Bench.of

    def of(view: Any) -> bench.Bench:
        free = {d.device.key: 1000 for d in view.devices}
        return replace(real(view), cpu_millis=view.cpu_millis, memory_bytes=view.memory_bytes, free_thousandths=free)

    return ((generations, "fits", fits), (bench.Bench, "of", staticmethod(of)))


def _revive_expired_lease() -> tuple[Patch, ...]:
    """A node that comes back has its expired leases back with it."""

    def revived(state: State, life: Incarnation) -> list[Change]:
        found: list[Change] = []
        for table in state.generations.values():
            for generation in table.values():
                members = tuple(
                    replace(m, lease=LeaseState.ACTIVE)
                    if m.incarnation == life and m.lease is LeaseState.EXPIRED
                    else m
                    for m in generation.members
                )
                if members != generation.members:
                    found.append(Change.put(replace(generation, members=members)))
        return found

    def reviving(real: Callable[..., Outcome]) -> Callable[..., Outcome]:
        def decide(state: State, command: Any, *now: Any) -> Outcome:
            outcome = real(state, command, *now)
            if not isinstance(outcome, Transition) or not outcome.changes:
                return outcome
            return replace(outcome, changes=(*outcome.changes, *revived(state, command.incarnation)))

        return decide

    return ((nodes, "mark_live", reviving(nodes.mark_live)), (nodes, "admit", reviving(nodes.admit)))


def _release_without_proof() -> tuple[Patch, ...]:
    def release(draft: Any, command: c.AdmitNode) -> None:
        for generation, member in draft.held_on(command.incarnation.node_uid):
            current = draft.generation(generation.job, generation.number) or generation
            draft.change_member(current, replace(member, lease=LeaseState.RELEASED))

    return ((nodes, "_release_gone", release),)


def _success_with_one_rank() -> tuple[Patch, ...]:
    def any_done(self: Generation) -> bool:
        return any(m.done for m in self.ranks)

    return ((Generation, "all_done", property(any_done)),)


def _reuse_job_counter() -> tuple[Patch, ...]:
    real = jobs.submit

    def submit(state: State, command: c.SubmitJob, now: c.Now) -> Outcome:
        outcome = real(state, command, now)
        if not isinstance(outcome, Transition):
            return outcome
        return replace(outcome, changes=tuple(x for x in outcome.changes if not isinstance(x.record, Cluster)))

    return ((jobs, "submit", submit),)


def _forget_request_ids() -> tuple[Patch, ...]:
    def replay(state: Any, command: Any) -> None:
        del state, command

    return ((requests, "replay", replay),)


# -- the node ------------------------------------------------------------------------------------------------------


def _deadline_never_enforced() -> tuple[Patch, ...]:
    """All three enforcers: guardian, launcher and agent."""

    def nothing(*_: Any) -> list[Any]:
        return []

    return ((SlotTable, "tick", nothing), (SimGuardian, "_launcher_looks", nothing), (SlotBook, "overdue", nothing))


def _deadline_from_ack() -> tuple[Patch, ...]:
    """Leases counted from when an acknowledgement came in, instead of from when its renewal was sent."""
    real = SlotBook.extend

    def extend(self: SlotBook, now_ns: int) -> list[Any]:
        if self._lease.renewed_ns is not None:
            self._lease.renewed_ns = now_ns
        return real(self, now_ns)

    return ((SlotBook, "extend", extend),)


def _shard_not_verified() -> tuple[Patch, ...]:
    """Neither by the agent nor by the task."""

    def check(tree: Any, directory: str, restore: Any) -> None:
        del tree, directory, restore

    def whole(self: Rank, shard: Any, rank: int) -> bool:
        del self, rank
        return shard is not None

    return ((sim_node, "check_shard", check), (Rank, "whole", whole))


MUTATIONS = (
    Mutation("ack_without_barrier", ("lease",), _ack_without_barrier, ("rival_store_cut",), seed=2),
    Mutation(
        "ack_before_commit", ("acknowledged",), _ack_before_commit, ("store_trouble", "controller_crash_in_commit")
    ),
    Mutation("forget_head_guard", ("stale_commit",), _forget_head_guard, ("rival_controller",)),
    Mutation("stale_leader_obeyed", ("stale_order",), _stale_leader_obeyed, ("rival_controller", "connections_break")),
    Mutation("expire_before_grace", ("lease",), _expire_before_grace, ("partition",)),
    Mutation("never_release", ("books",), _never_release, rows=("H5",)),
    Mutation("never_restart", ("progress",), _never_restart, rows=("G1",)),
    Mutation("restart_from_zero", ("checkpoint",), _restart_from_zero, rows=("G11",)),
    Mutation("drop_explain", ("explained",), _drop_explain),
    Mutation("commit_with_missing_part", ("checkpoint",), _commit_with_missing_part, rows=("G7", "G9")),
    Mutation(
        "no_fencing_on_checkpoints",
        ("checkpoint",),
        _no_fencing_on_checkpoints,
        ("partition", "noded_paused"),
        24,
        seed=3,
    ),
    Mutation("start_without_release", ("two_generations",), _start_without_release, ("partition",), 24, rows=("G5",)),
    Mutation("grant_what_is_held", ("device",), _grant_what_is_held, rows=("H5",)),
    Mutation("revive_expired_lease", ("lease",), _revive_expired_lease, ("partition",), 24),
    Mutation("release_without_proof", ("lease",), _release_without_proof, ("cloned_of_a_silent_node",)),
    Mutation("success_with_one_rank", ("result",), _success_with_one_rank),
    Mutation("reuse_job_counter", ("acknowledged",), _reuse_job_counter, rows=("H4",)),
    Mutation("forget_request_ids", ("request_id",), _forget_request_ids),
    Mutation("deadline_never_enforced", ("lease",), _deadline_never_enforced, ("partition",)),
    Mutation("deadline_from_ack", ("lease",), _deadline_from_ack, ("one_way_then_silence",), 24),
    Mutation(
        "shard_not_verified",
        ("checkpoint",),
        _shard_not_verified,
        ("shard_corrupted", "task_killed"),
        24,
        rows=("G12",),
    ),
    *SEVERAL_MUTATIONS,
)
BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}
