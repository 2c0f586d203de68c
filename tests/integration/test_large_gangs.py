"""A large gang's record is written whole with each commit: its ranks are taken together, and wait for it no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from controld.core.agent import CheckpointBeginCall, CheckpointPreparedCall
from controld.core.commands import SubmitJob
from controld.core.ids import CheckpointId, JobId
from controld.core.invariants import check
from controld.core.model import JobState, TaskExit
from controld.replica.calls import Calls
from controld.replica.ticker import Ticker
from controld.store.memory import MemoryDisk, MemoryStore
from controld.store.port import Leadership, StoredChange
from tests.integration.test_leader_gangs import Machine, rack, until_running
from tests.support_core import spec
from tests.support_replica import Rig, lead, quick, run
from virialpb.reasons import ExitReason
from virialpb.shardfile import shard_name

RANKS = 8
GATHER_S = 0.2


class Counting(MemoryStore):
    """Counts how often a record of each kind was written."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk)
        self.puts: dict[str, int] = {}

    async def commit(self, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
        for change in changes:
            kind = change.key.partition("/")[0]
            self.puts[kind] = self.puts.get(kind, 0) + 1
        return await super().commit(leadership, seq, changes)


async def running() -> tuple[Rig, list[Machine], Counting]:
    store = Counting(MemoryDisk())
    settings = quick(gather_ranks_min=RANKS, gather_seconds=GATHER_S)
    rig, machines = await rack(RANKS, await lead(store.disk, store=store, settings=settings))
    await rig.submit(SubmitJob("r1", spec(ranks=RANKS), "a"))
    await until_running(rig, "a")
    store.puts.clear()
    return rig, machines, store


async def begin(machines: list[Machine]) -> CheckpointId:
    """Every rank asks: the same is answered to each."""
    replies = [await m.reply(m.send(slot, CheckpointBeginCall(1))) for m in machines for slot in m.agent.slots]
    assert len({reply.checkpoint for reply in replies}) == 1
    return CheckpointId(replies[0].checkpoint)


def prepared(machine: Machine, id_: CheckpointId) -> int:
    [slot] = machine.agent.slots
    call = CheckpointPreparedCall(id_, 1, 10, "sha256:0", shard_name(int(slot.rpartition(".")[2])))
    return machine.send(slot, call)


async def saved_with_few_writes() -> None:
    rig, machines, store = await running()
    id_ = await begin(machines)
    store.puts.clear()
    numbers: list[tuple[Machine, int]] = []
    for machine in machines:  # one every 10 ms
        numbers.append((machine, prepared(machine, id_)))
        await asyncio.sleep(0.01)
    states = [(await m.reply(number)).state for m, number in numbers]
    assert set(states) <= {"PREPARED", "COMMITTED"}
    assert "COMMITTED" in states
    assert store.puts["checkpoints"] == 1
    [checkpoint] = rig.leader.state.checkpoints[JobId("a")].values()
    assert [part.rank for part in checkpoint.parts] == list(range(RANKS))
    assert check(rig.leader.state) == ()
    await rig.stop()


async def a_part_waits_no_longer_than_it_is_told_to() -> None:
    """One rank is slow: the parts of the others are durable meanwhile, and it waits for nobody."""
    rig, machines, store = await running()
    id_ = await begin(machines)
    store.puts.clear()
    *others, last = machines
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    numbers = [(machine, prepared(machine, id_)) for machine in others]
    assert {(await m.reply(number)).state for m, number in numbers} == {"PREPARED"}
    assert GATHER_S <= loop.time() - began_s < 2 * GATHER_S
    [checkpoint] = rig.leader.state.checkpoints[JobId("a")].values()
    assert len(checkpoint.parts) == RANKS - 1
    began_s = loop.time()
    assert (await last.reply(prepared(last, id_))).state == "COMMITTED"
    assert loop.time() - began_s < GATHER_S / 2
    assert store.puts["checkpoints"] == 2
    await rig.stop()


async def ended_with_few_writes() -> None:
    rig, machines, store = await running()
    for machine in machines:  # one every 20 ms; each is told at once
        [slot] = machine.agent.slots
        machine.agent.exit(slot, TaskExit(ExitReason.EXITED))
        assert machine.session is not None
        machine.session.receive(machine.agent.beat())
        rig.leader._wake.set()  # pyright: ignore[reportPrivateUsage]
        await asyncio.sleep(0.02)
    await asyncio.sleep(2 * GATHER_S)
    assert rig.leader.state.jobs[JobId("a")].state is JobState.SUCCEEDED, "nobody waits for the next regular pass"
    assert store.puts["generations"] <= 3
    assert check(rig.leader.state) == ()
    await rig.stop()


async def a_failure_is_acted_on_at_once() -> None:
    rig, machines, _ = await running()
    [slot] = machines[3].agent.slots
    machines[3].agent.exit(slot, TaskExit(ExitReason.SIGNALED, signal=11))
    assert machines[3].session is not None
    machines[3].session.receive(machines[3].agent.beat())
    rig.leader._wake.set()  # pyright: ignore[reportPrivateUsage]
    await asyncio.sleep(GATHER_S / 4)
    assert rig.leader.state.jobs[JobId("a")].state is JobState.RESTARTING
    await rig.stop()


SCENARIOS = {
    "saved": saved_with_few_writes,
    "slow": a_part_waits_no_longer_than_it_is_told_to,
    "ended": ended_with_few_writes,
    "failed": a_failure_is_acted_on_at_once,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_large_gang(name: str) -> None:
    run(SCENARIOS[name])


async def _at_once(self: Any, part: Any) -> None:
    del self, part


def _unpaced(self: Any, command: Any, at: Any) -> bool:
    del self, command, at
    return True


def _late(self: Any, command: Any, at: Any) -> bool:
    del self, command
    return at.boottime_ns // 1_000_000_000 % 3 == 0


@pytest.mark.parametrize(
    ("name", "place", "rule", "defect"),
    [
        ("saved", Calls, "_gathered", _at_once),
        ("slow", Calls, "_gathered", _at_once),
        ("ended", Ticker, "_paced", _unpaced),
        ("failed", Ticker, "_paced", _late),
    ],
)
def test_a_seeded_defect_shows(name: str, place: type, rule: str, defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, rule, defect)
    with pytest.raises(AssertionError):
        run(SCENARIOS[name])
