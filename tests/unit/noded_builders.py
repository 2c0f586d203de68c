"""Values for the tests of the agent's core."""

from __future__ import annotations

from dataclasses import replace

from noded.core import events as e
from noded.core import instructions as i
from noded.core import messages as m
from noded.core.agent import AgentCore
from virialpb.ids import CheckpointId, Epoch, JobId, NodeUid, SlotId, Token

SECOND = 1_000_000_000
MS = 1_000_000
UID = NodeUid("u1")
FACTS = m.NodeFacts("n1", "10.0.0.1", 8000, 1 << 30)
LEADER = Epoch(1, 5)
TOKEN = Token(JobId("j"), 1, Epoch(1, 20))
NEXT = Token(JobId("j"), 2, Epoch(1, 30))
SLOT = SlotId("j.1.0")
START = 1000 * SECOND
"""When the guardian is met; the first hello goes out then too."""
CHECKPOINT = CheckpointId("c1")
GPU = m.Device("gpu-0", "accelerator", vendor_id="10de", attributes=(("uuid", "GPU-a"),))
TASK = m.TaskSpec(("train",), env=(("HOME", "/home/a"),), user="a")
PREPARE = m.Prepare(SLOT, TOKEN, 0, 2, TASK, fence_after_ms=60_000, cpu_millis=2000, cause_id="c")
GO = m.Go(SLOT, TOKEN, 2, "10.0.0.1", 29500)
RESTORE = m.Restore(CHECKPOINT, 7, "", m.Tier.LOCAL, "rank-00000.shard", "d", 10)
LEASE_NS = 60 * SECOND * 99 // 100 - SECOND


def core() -> AgentCore:
    return AgentCore(UID, FACTS, local_tier="/d/checkpoints")


def hello(*slots: e.GuardianSlot, nonce: str = "g1", **fields: object) -> e.GuardianHello:
    return replace(e.GuardianHello(nonce, "b1", "pidns", slots), **fields)  # type: ignore[arg-type]


def order(order: m.Order, leader: Epoch = LEADER) -> e.OrderReceived:
    return e.OrderReceived(leader, order)


def silent(instructions: list[i.Instruction]) -> list[i.Instruction]:
    """Without the beats."""
    return [one for one in instructions if not isinstance(one, i.SendBeat)]


def beats(instructions: list[i.Instruction]) -> list[m.Beat]:
    return [one.beat for one in instructions if isinstance(one, i.SendBeat)]


def online(agent: AgentCore | None = None, *, inventory: bool = True) -> AgentCore:
    """Guardian met, welcomed, its hello acknowledged: all at START."""
    agent = agent or core()
    agent.handle(hello(), START)
    if inventory:
        agent.handle(e.InventoryRead(m.Inventory((GPU,))), START)
    agent.handle(e.Connected(), START)
    agent.handle(order(m.Welcome(1000, "cluster")), START)
    agent.handle(order(m.BeatAck(1)), START)
    return agent


def ready(agent: AgentCore | None = None, prepare: m.Prepare = PREPARE, now_ns: int = START) -> AgentCore:
    agent = agent or online()
    agent.handle(order(prepare), now_ns)
    agent.handle(e.PrepareDone(prepare.slot, prepare.token, 4000), now_ns)
    return agent


def running(agent: AgentCore | None = None, prepare: m.Prepare = PREPARE, now_ns: int = START) -> AgentCore:
    agent = ready(agent, prepare, now_ns)
    agent.handle(order(replace(GO, slot=prepare.slot, token=prepare.token)), now_ns)
    agent.handle(e.StartDone(prepare.slot, prepare.token, 100, 99, 7), now_ns)
    return agent


def status(agent: AgentCore, slot: SlotId = SLOT, now_ns: int = START) -> m.SlotStatus | None:
    return next((one for one in agent.slots.statuses(now_ns) if one.slot == slot), None)


def state(agent: AgentCore, slot: SlotId = SLOT, now_ns: int = START) -> str:
    found = status(agent, slot, now_ns)
    return "-" if found is None else found.state.value
