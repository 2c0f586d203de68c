"""What an RDL document says, as frozen values in base units. Made by ``virialpb.rdl``; standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

AttributeValue = str | int | bool
# Sorted by name, each name once.
Attributes = tuple[tuple[str, AttributeValue], ...]


class DeviceKind(StrEnum):
    CPU = "cpu"
    ACCELERATOR = "accelerator"
    NIC = "nic"
    DPU = "dpu"
    MEMORY = "memory"
    STORAGE = "storage"


class DomainKind(StrEnum):
    """From the smallest to the largest; a domain's parent is larger than itself."""

    ACCELERATOR_CLIQUE = "accelerator_clique"
    NODE = "node"
    BLOCK = "block"
    POD = "pod"
    RACK = "rack"
    ROW = "row"


class MemoryTier(StrEnum):
    LOCAL = "local"
    NEAR = "near"
    REMOTE = "remote"


class NicRole(StrEnum):
    """COMPUTE: a rail of the fabric. A lost STORAGE or MANAGEMENT port does not cost a gang its rail."""

    COMPUTE = "compute"
    STORAGE = "storage"
    MANAGEMENT = "management"


@dataclass(frozen=True, slots=True)
class InterconnectDecl:
    """How devices of this kind reach each other. ``inactive_links`` are off by design: down is right for them."""

    protocol: str
    max_latency_ns: int | None = None
    bandwidth_bytes_per_second: int | None = None
    link_count: int | None = None
    inactive_links: tuple[int, ...] = ()
    width_lanes: int | None = None


@dataclass(frozen=True, slots=True)
class ThermalDecl:
    """``slowdown_offset`` is how far below the device's own slowdown point it counts as hot."""

    slowdown_offset_millidegrees: int | None = None
    maximum_millidegrees: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceDecl:
    """``count`` like devices. ``thresholds`` replace the built-in ones for this product, by their names."""

    resource_type: DeviceKind
    name: str = ""
    vendor_id: str = ""
    count: int = 1
    compute_units: int | None = None
    memory_bytes: int | None = None
    memory_bandwidth_bytes_per_second: int | None = None
    memory_tier: MemoryTier | None = None
    capacity_bytes: int | None = None
    speed_bytes_per_second: int | None = None
    power_limit_milliwatts: int | None = None
    numa_node: int | None = None
    role: NicRole | None = None
    rail: str = ""
    interconnect: InterconnectDecl | None = None
    thermal: ThermalDecl | None = None
    thresholds: tuple[tuple[str, int], ...] = ()
    attributes: Attributes = ()


@dataclass(frozen=True, slots=True)
class LinkDecl:
    """``ends``: a node (``host-1``), a device of one (``host-1/nic-0``), or a switch port outside the document."""

    name: str
    kind: str
    ends: tuple[str, str]
    rail: str = ""
    expected_bytes_per_second: int | None = None
    expected_width_lanes: int | None = None
    max_latency_ns: int | None = None
    inactive_by_design: bool = False
    redundancy_group: str = ""
    attributes: Attributes = ()


@dataclass(frozen=True, slots=True)
class RedundancyGroupDecl:
    """Links of which at least ``minimum_members`` must be up; only below that is their node drained."""

    name: str
    minimum_members: int


@dataclass(frozen=True, slots=True)
class DomainDecl:
    kind: DomainKind
    name: str
    parent: str = ""
    failure_domain: bool = False
    power_budget_milliwatts: int | None = None
    attributes: Attributes = ()


@dataclass(frozen=True, slots=True)
class NodeDecl:
    name: str
    domain: str = ""
    canary_suite: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    devices: tuple[DeviceDecl, ...] = ()
    attributes: Attributes = ()


@dataclass(frozen=True, slots=True)
class Document:
    nodes: tuple[NodeDecl, ...] = ()
    devices: tuple[DeviceDecl, ...] = ()
    links: tuple[LinkDecl, ...] = ()
    domains: tuple[DomainDecl, ...] = ()
    redundancy_groups: tuple[RedundancyGroupDecl, ...] = field(default=())
