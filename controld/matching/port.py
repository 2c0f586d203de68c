"""The matching port: plain data in, plain data out. It crosses a process boundary, so no records in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from controld.core.ids import CheckpointId, Incarnation, JobId, NodeUid
from controld.core.model import Device, DeviceGrant
from controld.core.spec import Constraint, GangSpec, Resources, RestartWay
from virialpb.ids import NODE_SLOTS_MAX
from virialpb.reasons import Unfit


@dataclass(frozen=True, slots=True)
class FreeDevice:
    """A device and the share of it that no lease holds and no device hold keeps back."""

    device: Device
    free_thousandths: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as the planner sees it. `unfit` None: it may take work; else why not, whatever is free."""

    uid: NodeUid
    name: str
    incarnation: Incarnation
    unfit: Unfit | None
    cpu_free_millis: int
    memory_free_bytes: int
    cpu_millis: int
    memory_bytes: int
    devices: tuple[FreeDevice, ...]
    attributes: tuple[tuple[str, str | int | bool], ...]
    fencing_weak: bool
    slots_free: int = NODE_SLOTS_MAX


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Nodes in a stable order (by uid): equal snapshots give equal plans anywhere."""

    revision: int
    nodes: tuple[NodeView, ...]


@dataclass(frozen=True, slots=True)
class SpareOffer:
    """A lease that the job's last generation holds on a spare: it may be taken over in the same commit."""

    node: NodeUid
    cpu_millis: int
    memory_bytes: int
    devices: tuple[DeviceGrant, ...]


@dataclass(frozen=True, slots=True)
class Pending:
    """A gang that waits. `stay` are survivors of the last generation (rank, node); `exclude` must not be used."""

    job: JobId
    number: int
    gang: GangSpec
    resources: Resources
    priority: int
    order: int
    node_constraints: tuple[Constraint, ...] = ()
    needs_strong_fencing: bool = False
    stay: tuple[tuple[int, NodeUid], ...] = ()
    exclude: tuple[NodeUid, ...] = ()
    offers: tuple[SpareOffer, ...] = ()
    allow: tuple[RestartWay, ...] = ()
    checkpoint: CheckpointId | None = None
    # Ranks whose shard lies on one node only (local tier) must go there.
    pinned: tuple[tuple[int, NodeUid], ...] = ()


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one member goes; rank None is a spare."""

    rank: int | None
    node: NodeUid
    incarnation: Incarnation
    cpu_millis: int
    memory_bytes: int
    devices: tuple[DeviceGrant, ...] = ()


@dataclass(frozen=True, slots=True)
class Grant:
    job: JobId
    number: int
    seats: tuple[Seat, ...]
    checkpoint: CheckpointId | None = None
    # Spares that were asked for and found no room: the gang runs without them.
    spares_missing: int = 0


@dataclass(frozen=True, slots=True)
class UnfitCount:
    """So many nodes cannot take a rank, for this reason; numbers such as needed and most free, unit in the name."""

    reason: Unfit
    nodes: int
    numbers: tuple[tuple[str, int], ...] = ()
    details: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Unplaced:
    job: JobId
    number: int
    reasons: tuple[UnfitCount, ...]
    nodes_considered: int
    # The smallest change found that would fit, as numbers ("ranks", "cpu_millis"...); empty: none found.
    relaxation: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    revision: int
    grants: tuple[Grant, ...]
    unplaced: tuple[Unplaced, ...]


Planner = Callable[[Snapshot, tuple[Pending, ...]], Plan]


class PlannerLostError(Exception):
    """The planner died or did not answer in time. Nothing was decided: ask again, with a new snapshot."""


class PlannerPort(Protocol):
    """Where plans are made. One request at a time."""

    async def plan(self, snapshot: Snapshot, pending: tuple[Pending, ...]) -> Plan:
        """Raises PlannerLostError."""
        ...

    async def close(self) -> None: ...
