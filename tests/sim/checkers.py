"""What must be true, whatever happens: judged from the store's own commits and from the truth, never from a party."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from controld.core.commands import Command
from controld.core.invariants import check
from controld.core.model import (
    Checkpoint,
    CheckpointState,
    Generation,
    Job,
    JobState,
    LeaseState,
    Phase,
    Request,
    Tier,
)
from controld.core.outcome import Reply
from controld.core.state import Change, State
from controld.reconcile.explain import explain
from controld.replica.leader import Leader
from controld.store import codec
from controld.store.port import StoredChange
from noded.core import events as e
from noded.core import instructions as i
from noded.core import messages as m
from tests.sim.disk import LOCAL_TIER, Shard, Tree, content_of
from tests.sim.truth import Run
from virialpb.ids import Epoch, Incarnation, JobId

if TYPE_CHECKING:
    from tests.sim.node import Host
    from tests.sim.world import World

CHECKERS = (
    "device",
    "invariant",
    "lease",
    "two_generations",
    "checkpoint",
    "result",
    "acknowledged",
    "request_id",
    "explained",
    "progress",
    "stale_commit",
    "stale_order",
    "books",
    "copy",
    "one_writer",
    "barrier",
    "takeover",
    "deposed",
    "stale_ping",
    "standby",
    "stale_read",
    "watch",
    "unexpected",
)
_WRITING = (Phase.GO, Phase.ACTIVE)


class Checkers:
    """`state` is what the store holds, decoded from its own bytes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.state = State(history=1)
        self.violations: list[tuple[str, str]] = []
        self._job_numbers: dict[int, str] = {}
        self._ever_committed: set[tuple[str, str]] = set()
        self._acknowledged: dict[str, str] = {}
        self.commits = 0

    def accuse(self, checker: str, text: str) -> None:
        assert checker in CHECKERS, checker
        self.violations.append((checker, f"at {self._world.loop.time():.3f} s: {text}"))
        self._world.trace.note("VIOLATION", checker, text)
        self._world.accused(checker)

    # -- each commit

    def committed(self, revision: int, stored: tuple[StoredChange, ...]) -> None:
        self.commits += 1
        changes = [Change(c.key, None if c.value is None else codec.decode(c.key, c.value)) for c in stored]
        for change in changes:
            match change.record:
                case Checkpoint():
                    self._judge_checkpoint(change.record, changes)
                case Generation():
                    self._judge_generation(change.record)
                case Job():
                    self._judge_job(change.record)
                case _:
                    pass
        self.state.apply(changes, revision)
        for change in changes:
            if isinstance(change.record, Job) and change.record.state is JobState.SUCCEEDED:
                self._judge_result(change.record)
        for broken in check(self.state):
            self.accuse("invariant", broken)
        self._world.trace.note("commit", revision, *(change.key for change in changes))

    def written(self, by: Epoch, leading: Epoch) -> None:
        if by != leading:
            self.accuse("stale_commit", f"the leader of {by} commits although that of {leading} has taken over")

    def _judge_checkpoint(self, new: Checkpoint, changes: list[Change]) -> None:
        old = self.state.checkpoints.get(new.job, {}).get(new.id)
        if new.state is not CheckpointState.COMMITTED or (old is not None and old.state is CheckpointState.COMMITTED):
            return
        name = f"{new.job}/{new.id}"
        self._ever_committed.add((new.job, new.id))
        job, generation = self.state.jobs.get(new.job), self.state.current(new.job)
        if job is None or generation is None or generation.number != new.generation:
            current = None if generation is None else generation.number
            self.accuse("checkpoint", f"{name} of generation {new.generation} is committed; current is {current}")
            return
        after = next((c.record for c in changes if c.record is not None and _is(c.record, generation)), generation)
        assert isinstance(after, Generation)
        if generation.phase not in _WRITING and after.phase not in _WRITING:
            self.accuse("checkpoint", f"{name} is committed while its generation is {generation.phase}")
        if (missing := new.world_size - len({part.rank for part in new.parts})) > 0:
            self.accuse("checkpoint", f"{name} is committed without the parts of {missing} ranks")
        for part in new.parts:
            member = next((m for m in generation.ranks if m.rank == part.rank), None)
            if member is None or member.node != part.node:
                self.accuse("checkpoint", f"{name}: rank {part.rank} reported from {part.node}, where it does not run")
                continue
            tree = self._tree_of(new, member.incarnation)
            directory = self._directory(new)
            shard = tree.find(directory, part.file) if tree is not None else None
            if shard is None or not shard.durable or shard.digest != part.digest:
                self.accuse(
                    "checkpoint", f"{name} is committed, but the part of rank {part.rank} is not there: {shard}"
                )
            elif shard.generation != new.generation or shard.content != content_of(new.job, new.step, part.rank):
                self.accuse("checkpoint", f"{name} is committed with a part of generation {shard.generation}")

    def _tree_of(self, checkpoint: Checkpoint, life: Incarnation) -> Tree | None:
        """Two machines may claim one uid; only one had this boot."""
        if checkpoint.tier is Tier.SHARED:
            return self._world.shared
        host = next((h for h in self._world.machines if life.boot_id in h.boot_ids), None)
        return host.disk.shards if host is not None else None

    def _directory(self, checkpoint: Checkpoint) -> str:
        shared = checkpoint.directory.startswith("/")
        return checkpoint.directory if shared else f"{LOCAL_TIER}/{checkpoint.directory}"

    def _judge_generation(self, new: Generation) -> None:
        old = self.state.generations.get(new.job, {}).get(new.number)
        if old is None:
            self._judge_start(new)
            return
        for member in new.members:
            before = old.member(member.slot)
            if before is not None and member.lease.holds and not before.lease.holds:
                self.accuse("lease", f"the lease of {member.slot} was {before.lease} and is {member.lease} again")
            if before is None or not before.lease.holds or member.lease.holds or member.rank is None:
                continue
            running = [r for r in self._world.truth.running_slot(member.slot) if not r.exempt]
            if running:
                how = "expired" if member.lease is LeaseState.EXPIRED else "released"
                self.accuse("lease", f"the lease of {member.slot} is {how} while it runs on {running[0].host}")

    def _judge_start(self, new: Generation) -> None:
        for node in (self.state.nodes[uid] for uid in {member.node: None for member in new.members}):
            # A hold with an end depends on whose wall clock is asked.
            if node.draining or any(not h.expire_time_unix_ns and not h.device_key for h in node.holds):
                self.accuse("invariant", f"{new.job} starts on {node.name}, which is held back from new work")
        table = self.state.checkpoints.get(new.job, {}).values()
        committed = [c for c in table if c.state is CheckpointState.COMMITTED]
        if new.restored_checkpoint is None:
            if committed:
                self.accuse("checkpoint", f"{new.job} starts from zero although {committed[0].id} is committed")
            return
        if all(c.id != new.restored_checkpoint for c in committed):
            self.accuse("checkpoint", f"{new.job} starts from {new.restored_checkpoint}, which is not committed")
        newest = max((c.step for c in committed if c.tier is Tier.SHARED), default=-1)
        if new.restored_step < newest:
            self.accuse("checkpoint", f"{new.job} starts from step {new.restored_step}; {newest} is committed")

    def _judge_job(self, new: Job) -> None:
        if new.id in self.state.jobs:
            return
        if (known := self._job_numbers.get(new.number)) is not None:
            self.accuse("acknowledged", f"jobs {known} and {new.id} have the same number {new.number}")
        self._job_numbers[new.number] = new.id

    def _judge_result(self, job: Job) -> None:
        """All ranks of ONE generation truly ran to the end."""
        for rank in range(job.spec.gang.ranks):
            if (job.id, job.generation, rank) not in self._world.truth.finished:
                text = f"rank {rank} of generation {job.generation} never finished"
                self.accuse("result", f"{job.id} succeeded, but {text}")

    # -- agents and tasks

    def restored(self, run: Run, checkpoint: str, step: int, shard: Shard | None) -> None:
        job, rank = run.token.job, run.member.rank or 0
        if (job, checkpoint) not in self._ever_committed:
            self.accuse("checkpoint", f"{run.slot} starts from {checkpoint}, which was never committed")
        if shard is None:
            self.accuse("checkpoint", f"{run.slot} starts from {checkpoint}, whose shard is gone")
        elif shard.step != step or shard.content != content_of(job, step, rank):
            self.accuse("checkpoint", f"{run.slot} starts from a damaged shard of {checkpoint}: {shard}")

    def dropping(self, job: JobId, checkpoint: str) -> None:
        record = next((c for c in self.state.checkpoints.get(job, {}).values() if c.id == checkpoint), None)
        if record is not None and record.state is not CheckpointState.DROPPING:
            self.accuse("checkpoint", f"files of {job}/{checkpoint} are deleted while it is {record.state}")

    def followed(self, host: Host, event: e.OrderReceived, found: list[i.Instruction]) -> None:
        """What an order of a leader led to. `host.highest_epoch` is the latest that this noded has heard."""
        if event.leader_epoch >= host.highest_epoch:
            host.highest_epoch = event.leader_epoch
            return
        order = event.order
        obeyed = False
        match order:
            case m.Go() | m.Stop() | m.Release():
                told = (i.GuardianStart, i.GuardianStop, i.GuardianRelease)
                obeyed = any(isinstance(one, told) and one.slot == order.slot for one in found)
            case m.Prepare():
                slot = None if host.core is None else host.core.slots.get(order.slot)
                obeyed = slot is not None and slot.prepare is order
            case m.DropCheckpoint():
                obeyed = any(isinstance(one, i.DropFiles) and one.checkpoint == order.checkpoint for one in found)
            case m.BeatAck():
                obeyed = any(isinstance(one, i.GuardianExtend) for one in found)
            case _:
                pass
        if obeyed:
            name = type(order).__name__
            self.accuse("stale_order", f"{host.name} obeys {name} of {event.leader_epoch}, knows {host.highest_epoch}")

    # -- users

    @property
    def told(self) -> list[str]:
        """The requests that users were told are done, in that order."""
        return list(self._acknowledged)

    def acknowledged(self, request_id: str, command: Command, reply: Reply) -> None:
        """A user was told that it is done."""
        self._world.trace.note("ack", request_id, reply.subject)
        before = self._acknowledged.setdefault(request_id, reply.subject)
        if before != reply.subject:
            self.accuse("request_id", f"{request_id} was answered {before}, now {reply.subject}")
        self._judge_acknowledged(request_id, "at once")

    def _judge_acknowledged(self, request_id: str, when: str) -> None:
        record: Request | None = self.state.requests.get(request_id)
        subject = self._acknowledged[request_id]
        if record is None or record.subject != subject:
            self.accuse("acknowledged", f"{request_id} ({subject}) was acknowledged and is not in the store {when}")

    def explained(self, leader: Leader) -> None:
        """Every job that neither runs nor has ended has a reason, at any time."""
        for job_id, job in leader.state.jobs.items():
            current = leader.state.current(job_id)
            under_way = current is not None and current.phase in (Phase.PREPARING, *_WRITING)
            if job.state.ended or under_way:
                continue
            try:
                reasons = explain(leader.state, leader.view, job_id).reasons
            except Exception as error:
                self.accuse("unexpected", f"explain({job_id}): {error!r}")
                continue
            if not reasons:
                self.accuse("explained", f"{job_id} is {job.state} and nobody can say why")

    # -- the end

    def copied(self, leader: Leader) -> None:
        """What the leader believes to be committed is what the store holds, unless an answer is on its way."""
        if leader.state.revision != self.state.revision:
            return
        for table in ("cluster", "nodes", "jobs", "generations", "checkpoints", "requests", "events", "created"):
            if getattr(leader.state, table) != getattr(self.state, table):
                self.accuse("copy", f"the leader's {table} are not the store's")

    def quiet(self, feasible: Callable[[Job], bool]) -> None:
        """Everything has healed and had its time."""
        for job in self.state.jobs.values():
            if not job.state.ended and feasible(job):
                self.accuse("progress", f"{job.id} is still {job.state} in generation {job.generation}")
        for request_id in self._acknowledged:
            self._judge_acknowledged(request_id, "at the end")

    def books(self) -> None:
        """All jobs have ended and everyone is well: nothing is held, nothing runs, nobody remembers a slot."""
        for job_id, table in self.state.generations.items():
            for generation in table.values():
                held = [m.slot for m in generation.members if m.lease.holds]
                if held:
                    state = self.state.jobs[job_id].state
                    self.accuse("books", f"{job_id} is {state} and still holds {', '.join(held)}")
        for host, runs in self._world.truth.running.items():
            for run in runs:
                self.accuse("books", f"{run.slot} still runs on {host}")
        for host in self._world.hosts.values():
            if not host.powered or host.guardian is None or host.core is None:
                continue
            if kept := [(s.id, s.phase.name, s.leftover) for s in host.guardian.table.all()]:
                self.accuse("books", f"the guardian of {host.name} keeps {kept}")
            if remembered := [(s.id, s.phase.name) for s in host.core.slots.all()]:
                self.accuse("books", f"noded of {host.name} keeps {remembered}")


def _is(record: object, generation: Generation) -> bool:
    return isinstance(record, Generation) and (record.job, record.number) == (generation.job, generation.number)
