"""What must be true of every state. Checked after each commit in tests and the simulation."""

from __future__ import annotations

from controld.core.capacity import WHOLE_THOUSANDTHS, device_use, holding
from controld.core.ids import NodeUid
from controld.core.model import CheckpointState, JobState, Member, Phase
from controld.core.spec import Writes
from controld.core.state import State


def check(state: State) -> tuple[str, ...]:
    """One line for each broken invariant; empty when all hold."""
    return (*_devices(state), *_generations(state), *_checkpoints(state))


def _devices(state: State) -> list[str]:
    """Promise 1: what leases take of a node never exceeds what it has; no device is held over its whole."""
    broken: list[str] = []
    for uid, leases in sorted(holding(state).items()):
        members = [m for _, m in leases]
        node = state.nodes.get(NodeUid(uid))
        if node is None:
            broken.append(f"lease on unknown node {uid}")
            continue
        current = [m for m in members if m.incarnation == node.incarnation]
        if sum(m.cpu_millis for m in current) > node.cpu_millis:
            broken.append(f"cpu of {node.name} is leased beyond what it has")
        if sum(m.memory_bytes for m in current) > node.memory_bytes:
            broken.append(f"memory of {node.name} is leased beyond what it has")
        for key, use in sorted(device_use(members).items()):
            if use > WHOLE_THOUSANDTHS:
                broken.append(f"device {key} of {node.name} has two holders ({use} thousandths)")
    return broken


def _generations(state: State) -> list[str]:
    broken: list[str] = []
    for job_id, table in sorted(state.generations.items()):
        job = state.jobs.get(job_id)
        if job is None:
            broken.append(f"generations without job {job_id}")
            continue
        alive = [n for n, g in table.items() if g.phase is not Phase.ENDED]
        if len(alive) > 1 or (alive and alive[0] != job.generation):
            broken.append(f"job {job_id} has generations {alive} alive; current is {job.generation}")
        held = [n for n, g in table.items() if any(m.lease.holds for m in g.ranks)]
        if job.spec.writes is Writes.SHARED and len(held) > 1:
            broken.append(f"job {job_id} writes elsewhere and two generations {held} hold leases")
        current = table.get(job.generation)
        if job.state is JobState.SUCCEEDED and (current is None or not all(m.done for m in current.ranks)):
            broken.append(f"job {job_id} succeeded without every rank done")
        if job.state is JobState.RUNNING and (current is None or current.phase is not Phase.ACTIVE):
            broken.append(f"job {job_id} is RUNNING without an active generation")
        for generation in table.values():
            broken += _slots(generation.members, f"{job_id}.{generation.number}")
    return broken


def _slots(members: tuple[Member, ...], name: str) -> list[str]:
    slots = [m.slot for m in members]
    return [f"generation {name} names a slot twice"] if len(set(slots)) != len(slots) else []


def _checkpoints(state: State) -> list[str]:
    broken: list[str] = []
    for job_id, table in sorted(state.checkpoints.items()):
        for checkpoint in table.values():
            ranks = [p.rank for p in checkpoint.parts]
            if checkpoint.state is CheckpointState.COMMITTED and ranks != list(range(checkpoint.world_size)):
                broken.append(f"checkpoint {job_id}/{checkpoint.id} is committed with parts of ranks {ranks}")
    return broken
