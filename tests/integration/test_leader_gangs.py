"""Whole jobs through the leader: placed, prepared, gone, checkpointed, restarted, ended, by agents that obey."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from controld.core.agent import (
    CheckpointBeginCall,
    CheckpointPreparedCall,
    CheckpointWaitCall,
    DropCheckpoint,
    DropDone,
    Go,
    Prepare,
    TaskCall,
    TaskReply,
)
from controld.core.commands import CancelJob, SubmitJob
from controld.core.ids import CheckpointId, Epoch, JobId, SlotId, Token
from controld.core.invariants import check
from controld.core.model import CheckpointState, Inventory, JobState, Phase, TaskExit
from controld.core.spec import Durability
from controld.reconcile.calls import DIGEST_LENGTH_MAX
from controld.replica.errors import SessionClosedError
from controld.replica.leader import Leader
from controld.replica.session import NodeSession
from tests.support_core import Agent, incarnation, spec
from tests.support_replica import Rig, hello, lead, quick, run
from virialpb.reasons import ExitReason, Reason
from virialpb.shardfile import shard_name


@dataclass
class Machine:
    """An agent with a session: obeys at once, beats once a second, passes calls of its tasks on."""

    agent: Agent
    leader: Leader
    session: NodeSession | None = None
    replies: dict[int, TaskReply] = field(default_factory=dict[int, TaskReply])
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    dropped: list[CheckpointId] = field(default_factory=list[CheckpointId])
    drops: bool = True
    calls: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def connect(self) -> None:
        agent = self.agent
        beat = agent.beat()
        self.session = await self.leader.open_session(
            hello(agent.incarnation, agent.name, slots=beat.slots, seq=beat.seq)
        )
        await self.session.report_inventory(Inventory())
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(self._read(self.session)), loop.create_task(self._beats(self.session))]

    async def _read(self, session: NodeSession) -> None:
        try:
            while True:
                order = await session.next_order()
                match order:
                    case TaskReply():
                        self.replies[order.call_id] = order
                        self.answered.set()
                        self.answered = asyncio.Event()
                    case DropCheckpoint():
                        self.dropped.append(order.checkpoint)
                        if self.drops:
                            session.receive(DropDone(order.job, order.checkpoint))
                    case _:
                        self.agent.obey(order)
                        session.receive(self.agent.beat())
        except SessionClosedError:
            return

    async def _beats(self, session: NodeSession) -> None:
        while True:
            await asyncio.sleep(1)
            session.receive(self.agent.beat())

    def cut(self) -> None:
        for task in self.tasks:
            task.cancel()
        if self.session is not None:
            self.session.close()

    def send(self, slot: SlotId, call: CheckpointBeginCall | CheckpointPreparedCall | CheckpointWaitCall) -> int:
        assert self.session is not None
        number = next(self.calls)
        self.session.receive(TaskCall(number, slot, self.agent.slots[slot].token, call))
        return number

    async def reply(self, number: int) -> TaskReply:
        while number not in self.replies:
            await self.answered.wait()
        return self.replies[number]


async def rack(count: int, rig: Rig | None = None) -> tuple[Rig, list[Machine]]:
    rig = rig or await lead()
    machines = [Machine(Agent(f"n{i}", incarnation(f"n{i}")), rig.leader) for i in range(count)]
    for machine in machines:
        await machine.connect()
    return rig, machines


async def until_running(rig: Rig, job: str, generation: int = 1) -> None:
    for _ in range(200):
        await asyncio.sleep(0.25)
        record = rig.leader.state.jobs[JobId(job)]
        if record.state is JobState.RUNNING and record.generation == generation:
            return
    raise AssertionError(rig.leader.state.jobs[JobId(job)])


async def save(machines: list[Machine], job: str, step: int) -> CheckpointId:
    """Every rank saves; the last one's part commits it, and each waits for that."""
    ranks = [(m, s) for m in machines for s in m.agent.slots if s.startswith(f"{job}.")]
    begun = [await m.reply(m.send(slot, CheckpointBeginCall(step))) for m, slot in ranks]
    assert len({r.checkpoint for r in begun}) == 1
    id_ = CheckpointId(begun[0].checkpoint)
    waits: list[tuple[Machine, int]] = []
    for m, slot in ranks:
        assert all(number not in w.replies for w, number in waits), "a wait is answered only when it is decided"
        prepared = CheckpointPreparedCall(id_, step, 10, "sha256:0", shard_name(int(slot.rpartition(".")[2])))
        assert (await m.reply(m.send(slot, prepared))).state in ("PREPARED", "COMMITTED")
        waits.append((m, m.send(slot, CheckpointWaitCall(id_))))
        await asyncio.sleep(0.01)
    for m, number in waits:
        assert (await m.reply(number)).state == "COMMITTED"
    return id_


def test_a_part_under_any_name_but_its_ranks_or_with_a_long_digest_is_refused() -> None:
    """Agents restore that name alone: a checkpoint with another would commit, and then hang each restart."""

    async def main() -> None:
        rig, machines = await rack(1)
        await rig.submit(SubmitJob("r1", spec(ranks=1), "a"))
        await until_running(rig, "a")
        [machine] = machines
        [slot] = machine.agent.slots
        begun = await machine.reply(machine.send(slot, CheckpointBeginCall(1)))
        id_ = CheckpointId(begun.checkpoint)
        for name in ("rank-00001.shard", "../../rank-00000.shard", "rank-0.shard", ""):
            refused = await machine.reply(machine.send(slot, CheckpointPreparedCall(id_, 1, 10, "sha256:0", name)))
            assert refused.error is Reason.INVALID_SPEC
        long = CheckpointPreparedCall(id_, 1, 10, "0" * (DIGEST_LENGTH_MAX + 1), shard_name(0))
        assert (await machine.reply(machine.send(slot, long))).error is Reason.INVALID_SPEC
        right = CheckpointPreparedCall(id_, 1, 10, "sha256:0", shard_name(0))
        assert (await machine.reply(machine.send(slot, right))).state == "COMMITTED"
        await rig.stop()

    run(main)


def test_a_gang_runs_saves_loses_a_rank_and_restarts_from_its_checkpoint() -> None:
    async def main() -> None:
        rig, machines = await rack(3)
        await rig.submit(SubmitJob("r1", spec(ranks=3), "a"))
        await until_running(rig, "a")
        id_ = await save(machines, "a", 10)
        victim = machines[1].agent
        victim.exit(next(iter(victim.slots)), TaskExit(ExitReason.SIGNALED, signal=11))
        await until_running(rig, "a", generation=2)
        prepares = [o for m in machines for o in m.agent.orders if isinstance(o, Prepare) and o.token.generation == 2]
        assert {o.restore.checkpoint for o in prepares if o.restore} == {id_}
        state = rig.leader.state
        assert check(state) == ()
        # The saved rank's late call carries the old token.
        for machine in machines:
            for slot in list(machine.agent.slots):
                machine.agent.exit(slot, TaskExit(ExitReason.EXITED))
        await asyncio.sleep(3)
        assert state.jobs[JobId("a")].state is JobState.SUCCEEDED
        await rig.stop()

    run(main)


def test_a_call_with_a_dead_generations_token_is_fenced() -> None:
    async def main() -> None:
        rig, machines = await rack(1)
        await rig.submit(SubmitJob("r1", spec(ranks=1), "a"))
        await until_running(rig, "a")
        slot = next(iter(machines[0].agent.slots))
        await rig.submit(CancelJob("r2", JobId("a")))
        assert (await machines[0].reply(machines[0].send(slot, CheckpointBeginCall(1)))).error is Reason.FENCED
        await rig.stop()

    run(main)


def test_a_deposed_leader_answers_no_call() -> None:
    """It would say "fenced" to the task of a generation that its successor has started."""

    async def main() -> None:
        rig, machines = await rack(1, await lead(settings=quick(barrier_interval_seconds=3600.0)))
        machine = machines[0]
        await rig.submit(SubmitJob("r1", spec(ranks=1), "a"))
        await until_running(rig, "a")
        slot = next(iter(machine.agent.slots))
        stranger = Token(JobId("a"), 2, Epoch(1, 10_000))
        machine.cut()
        await machine.connect()
        rival = await lead(rig.disk)
        assert machine.session is not None
        machine.session.receive(TaskCall(99, slot, stranger, CheckpointWaitCall(CheckpointId("c1"))))
        await asyncio.sleep(1)
        assert 99 not in machine.replies or machine.replies[99].error is Reason.NOT_LEADER
        assert rig.leader.lost.is_set()
        await rig.stop()
        await rival.stop()

    run(main)


def test_a_job_survives_its_leader() -> None:
    """The next leader finds everything committed; agents say hello and nothing is started twice."""

    async def main() -> None:
        rig, machines = await rack(3)
        await rig.submit(SubmitJob("r1", spec(ranks=3), "a"))
        await until_running(rig, "a")
        epochs = {s.token for m in machines for s in m.agent.slots.values()}
        await rig.stop()
        await asyncio.sleep(5)
        again = await lead(rig.disk, clock=rig.clock)
        for machine in machines:
            machine.leader = again.leader
            await machine.connect()
        await asyncio.sleep(20)
        assert again.leader.epoch > rig.leader.epoch
        assert again.leader.state.jobs[JobId("a")].generation == 1
        assert {s.token for m in machines for s in m.agent.slots.values()} == epochs
        assert [type(o) for m in machines for o in m.agent.orders].count(Go) == 3
        await again.stop()

    run(main)


def test_a_lost_node_restarts_a_token_gang_elsewhere_and_its_devices_stay_locked() -> None:
    async def main() -> None:
        rig, machines = await rack(4)
        await rig.submit(SubmitJob("r1", spec(ranks=3), "a"))
        await until_running(rig, "a")
        await asyncio.sleep(10)
        lost = next(m for m in machines if m.agent.slots)
        lost.cut()
        await until_running(rig, "a", generation=2)
        state = rig.leader.state
        held = [m for m in state.generations[JobId("a")][1].members if m.lease.holds]
        assert [m.node for m in held] == [lost.agent.incarnation.node_uid]
        assert check(state) == ()
        await asyncio.sleep(80)
        assert not [m for m in state.generations[JobId("a")][1].members if m.lease.holds]
        await rig.stop()

    run(main)


def test_collected_checkpoints_are_forgotten_when_every_node_that_had_them_has_dropped_them() -> None:
    async def main() -> None:
        rig, machines = await rack(3)
        machines[1].drops = False
        await rig.submit(SubmitJob("r1", spec(ranks=2, durability=Durability.LOCAL_DISK), "a"))
        await until_running(rig, "a")
        ids = [await save(machines, "a", step) for step in (1, 2, 3)]
        await asyncio.sleep(5)
        table = rig.leader.state.checkpoints[JobId("a")]
        assert table[ids[0]].state is CheckpointState.DROPPING
        assert [ids[0] in m.dropped for m in machines] == [True, True, False], "nobody else is bothered"
        machines[1].drops = True
        await asyncio.sleep(5)
        assert set(table) == set(ids[1:])
        await rig.stop()

    run(main)


def test_calls_are_bounded_and_waits_end_with_their_session() -> None:
    async def main() -> None:
        rig, machines = await rack(1, await lead(settings=quick(session_calls_max=4)))
        await rig.submit(SubmitJob("r1", spec(ranks=1), "a"))
        await until_running(rig, "a")
        machine = machines[0]
        slot = next(iter(machine.agent.slots))
        begun = await machine.reply(machine.send(slot, CheckpointBeginCall(1)))
        waits = [machine.send(slot, CheckpointWaitCall(CheckpointId(begun.checkpoint))) for _ in range(6)]
        await asyncio.sleep(1)
        assert [machine.replies[n].error for n in waits if n in machine.replies] == [Reason.OVERLOADED] * 2
        session = machine.session
        assert session is not None
        assert session.calls == 4
        machine.cut()
        await asyncio.sleep(0.01)
        assert session.calls == 0
        await rig.stop()

    run(main)


def test_a_hung_agent_that_returns_is_not_told_to_start_what_is_over() -> None:
    """GO waits in its queue while the job is cancelled: it must not come out any more."""

    async def main() -> None:
        rig, machines = await rack(1)
        machine = machines[0]
        agent = machine.agent
        await rig.submit(SubmitJob("r1", spec(ranks=1), "a"))
        for _ in range(100):
            if agent.slots:
                break
            await asyncio.sleep(0.001)
        assert machine.session is not None
        machine.tasks[0].cancel()  # it does not read any more, but beats
        await asyncio.sleep(2)
        current = rig.leader.state.current(JobId("a"))
        assert current is not None
        assert current.phase is Phase.GO
        assert len(machine.session.outbox) >= 1
        await rig.submit(CancelJob("r2", JobId("a")))
        await asyncio.sleep(2)
        machine.tasks.append(asyncio.get_running_loop().create_task(machine._read(machine.session)))
        await asyncio.sleep(3)
        assert not [o for o in agent.orders if isinstance(o, Go)]
        assert rig.leader.state.jobs[JobId("a")].state is JobState.CANCELLED
        await rig.stop()

    run(main)
