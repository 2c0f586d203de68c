"""The node's inventory: what was read of the machine, and what its operator declared in RDL, as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from noded.collect import model as read
from noded.core import messages as m
from virialpb.layered import ConfigError
from virialpb.rdl_model import DeviceDecl, Document, LinkDecl, NodeDecl

DECLARED: Final = "declared"


@dataclass(frozen=True, slots=True)
class Declared:
    """What an RDL document says of this node."""

    devices: tuple[m.Device, ...] = ()
    links: tuple[m.Link, ...] = ()
    domains: tuple[m.Domain, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    attributes: tuple[tuple[str, m.AttributeValue], ...] = ()


def declared_of(document: Document, node_name: str, where: str) -> Declared:
    """A document without nodes speaks of this node; one with nodes must name it. Raises ConfigError."""
    if not document.nodes:
        devices = _expanded(document.devices)
        return Declared(devices, _links(document.links, node_name), _domains(document))
    node = next((node for node in document.nodes if node.name == node_name), None)
    if node is None:
        names = ", ".join(one.name for one in document.nodes[:10])
        raise ConfigError([f"rdl: {where} declares no node '{node_name}'; it has {names}"])
    return Declared(
        devices=_expanded(node.devices),
        links=_links(document.links, node_name),
        domains=_domains(document, node),
        labels=node.labels,
        attributes=node.attributes,
    )


def merged(found: read.Inventory, declared: Declared) -> m.Inventory:
    """Read and declared devices together; what was declared of a device that was read is added to it."""
    devices = {device.key: device for device in map(_device, found.devices)}
    for device in declared.devices:
        there = devices.get(device.key)
        devices[device.key] = device if there is None else _joined(there, device)
    links = {link.key: link for link in declared.links} | {link.key: link for link in map(_link, found.links)}
    attributes = dict(declared.attributes) | dict(found.attributes)
    return m.Inventory(
        devices=tuple(devices[key] for key in sorted(devices)),
        links=tuple(links[key] for key in sorted(links)),
        domains=declared.domains,
        attributes=tuple(sorted(attributes.items())),
    )


def _joined(there: m.Device, device: m.Device) -> m.Device:
    return m.Device(
        key=there.key,
        kind=there.kind,
        name=device.name or there.name,
        vendor_id=there.vendor_id or device.vendor_id,
        attributes=_pairs(dict(device.attributes) | dict(there.attributes)),
        capacity=tuple(sorted((dict(there.capacity) | dict(device.capacity)).items())),
        interconnect_protocol=device.interconnect_protocol,
        interconnect_max_latency_ns=device.interconnect_max_latency_ns,
        interconnect_bandwidth_bytes_per_second=device.interconnect_bandwidth_bytes_per_second,
    )


def _device(device: read.Device) -> m.Device:
    return m.Device(
        key=device.key,
        kind=device.kind,
        name=device.name,
        vendor_id=device.vendor_id,
        attributes=_pairs(device.attributes),
        capacity=tuple(sorted(device.capacity.items())),
    )


def _link(link: read.Link) -> m.Link:
    return m.Link(
        key=link.key,
        kind=link.kind,
        end_a=link.end_a,
        end_b=link.end_b,
        current_bytes_per_second=link.current_bytes_per_second,
        current_width_lanes=link.current_width_lanes,
        state=link.state,
    )


def _expanded(devices: tuple[DeviceDecl, ...]) -> tuple[m.Device, ...]:
    """`count` like devices become as many, keyed by name and position; a single one keeps its name."""
    found: list[m.Device] = []
    for position, declared in enumerate(devices):
        name = declared.name or f"{declared.resource_type}{position}"
        keys = [name] if declared.count == 1 else [f"{name}-{index}" for index in range(declared.count)]
        found += [_declared_device(declared, key) for key in keys]
    return tuple(found)


def _declared_device(declared: DeviceDecl, key: str) -> m.Device:
    capacity = {
        "compute_units": declared.compute_units,
        "memory_bytes": declared.memory_bytes,
        "memory_bandwidth_bytes_per_second": declared.memory_bandwidth_bytes_per_second,
        "capacity_bytes": declared.capacity_bytes,
        "speed_bytes_per_second": declared.speed_bytes_per_second,
    }
    described: dict[str, m.AttributeValue | None] = {
        "power_limit_milliwatts": declared.power_limit_milliwatts,
        "numaNode": declared.numa_node,
        "rail": declared.rail or None,
        "role": None if declared.role is None else declared.role.value,
        "memory_tier": None if declared.memory_tier is None else declared.memory_tier.value,
    }
    attributes: dict[str, m.AttributeValue] = {name: value for name, value in described.items() if value is not None}
    interconnect = declared.interconnect
    return m.Device(
        key=key,
        kind=declared.resource_type.value,
        name=declared.name,
        vendor_id=declared.vendor_id,
        attributes=_pairs({"identity": DECLARED, **attributes, **dict(declared.attributes)}),
        capacity=tuple(sorted((name, value) for name, value in capacity.items() if value is not None)),
        interconnect_protocol="" if interconnect is None else interconnect.protocol,
        interconnect_max_latency_ns=0 if interconnect is None else interconnect.max_latency_ns or 0,
        interconnect_bandwidth_bytes_per_second=(
            0 if interconnect is None else interconnect.bandwidth_bytes_per_second or 0
        ),
    )


def _links(links: tuple[LinkDecl, ...], node_name: str) -> tuple[m.Link, ...]:
    """Those with an end on this node; that end is then named by its device alone."""
    found: list[m.Link] = []
    for link in links:
        ours = [end for end in link.ends if end.partition("/")[0] == node_name]
        if ours:
            near = ours[0]
            far = link.ends[1] if link.ends[0] == near else link.ends[0]
            found.append(
                m.Link(
                    key=link.name,
                    kind=link.kind,
                    end_a=near.partition("/")[2] or near,
                    end_b=far,
                    rail=link.rail,
                    expected_bytes_per_second=link.expected_bytes_per_second or 0,
                    expected_width_lanes=link.expected_width_lanes or 0,
                )
            )
    return tuple(found)


def _domains(document: Document, node: NodeDecl | None = None) -> tuple[m.Domain, ...]:
    domains = [m.Domain(domain.kind.value, domain.name, domain.parent) for domain in document.domains]
    if node is not None:
        domains.append(m.Domain("node", node.name, node.domain))
    return tuple(domains)


def _pairs(attributes: Mapping[str, m.AttributeValue]) -> tuple[tuple[str, m.AttributeValue], ...]:
    return tuple(sorted(attributes.items()))
