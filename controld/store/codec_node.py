"""Node records and the inventory in them."""

from __future__ import annotations

from controld.core.ids import NodeUid
from controld.core.model import Device, Domain, Hold, Inventory, Link, Liveness, Node
from controld.store import codec_values as values
from virialpb.store.v1 import records_pb2 as pb

INVENTORIES_MAX = 1_024
_LINK = Link(key="", kind="", end_a="", end_b="")


def node(value: Node) -> pb.Node:
    return pb.Node(
        uid=value.uid,
        name=value.name,
        incarnation=values.incarnation(value.incarnation),
        liveness=value.liveness,
        advertise_address=value.advertise_address,
        fencing=value.fencing,
        cpu_millis=value.cpu_millis,
        memory_bytes=value.memory_bytes,
        labels=values.texts(value.labels),
        inventory=_known_inventory(value.inventory),
        holds=[_hold(hold) for hold in value.holds],
        draining=value.draining,
        version=value.version,
    )


def from_node(value: pb.Node) -> Node:
    return Node(
        uid=NodeUid(value.uid),
        name=value.name,
        incarnation=values.from_incarnation(value.incarnation),
        liveness=values.name_of(Liveness, value.liveness, "liveness"),
        advertise_address=value.advertise_address,
        fencing=value.fencing,
        cpu_millis=value.cpu_millis,
        memory_bytes=value.memory_bytes,
        labels=values.from_texts(value.labels),
        inventory=_from_inventory(value.inventory),
        holds=tuple(_from_hold(hold) for hold in value.holds),
        draining=value.draining,
        version=value.version,
    )


_known: dict[int, tuple[Inventory, pb.Inventory]] = {}


def _known_inventory(value: Inventory) -> pb.Inventory:
    """Most changes of a node leave the inventory as it is: dozens of devices and links are then not encoded again."""
    found = _known.get(id(value))
    if found is not None and found[0] is value:
        return found[1]
    made = _inventory(value)
    while len(_known) >= INVENTORIES_MAX:
        del _known[next(iter(_known))]
    _known[id(value)] = (value, made)
    return made


def _inventory(value: Inventory) -> pb.Inventory:
    return pb.Inventory(
        devices=[_device(device) for device in value.devices],
        links=[_link(link) for link in value.links],
        domains=[pb.Domain(kind=d.kind, name=d.name, parent=d.parent) for d in value.domains],
        attributes=values.attributes(value.attributes),
    )


def _from_inventory(value: pb.Inventory) -> Inventory:
    return Inventory(
        devices=tuple(_from_device(device) for device in value.devices),
        links=tuple(_from_link(link) for link in value.links),
        domains=tuple(Domain(kind=d.kind, name=d.name, parent=d.parent) for d in value.domains),
        attributes=values.from_attributes(value.attributes),
    )


def _device(value: Device) -> pb.Device:
    return pb.Device(
        key=value.key,
        kind=value.kind,
        name=value.name,
        vendor_id=value.vendor_id,
        attributes=values.attributes(value.attributes),
        capacity=values.numbers(value.capacity),
        interconnect_protocol=value.interconnect_protocol,
        interconnect_max_latency_ns=value.interconnect_max_latency_ns,
        interconnect_bandwidth_bytes_per_second=value.interconnect_bandwidth_bytes_per_second,
    )


def _from_device(value: pb.Device) -> Device:
    return Device(
        key=value.key,
        kind=value.kind,
        name=value.name,
        vendor_id=value.vendor_id,
        attributes=values.from_attributes(value.attributes),
        capacity=values.from_numbers(value.capacity),
        interconnect_protocol=value.interconnect_protocol,
        interconnect_max_latency_ns=value.interconnect_max_latency_ns,
        interconnect_bandwidth_bytes_per_second=value.interconnect_bandwidth_bytes_per_second,
    )


def _link(value: Link) -> pb.Link:
    return pb.Link(
        key=value.key,
        kind=value.kind,
        end_a=value.end_a,
        end_b=value.end_b,
        rail=value.rail,
        expected_bytes_per_second=value.expected_bytes_per_second,
        current_bytes_per_second=value.current_bytes_per_second,
        expected_width_lanes=value.expected_width_lanes,
        current_width_lanes=value.current_width_lanes,
        state=value.state,
    )


def _from_link(value: pb.Link) -> Link:
    return Link(
        key=value.key,
        kind=value.kind,
        end_a=value.end_a,
        end_b=value.end_b,
        rail=value.rail,
        expected_bytes_per_second=value.expected_bytes_per_second,
        current_bytes_per_second=(
            value.current_bytes_per_second if value.HasField("current_bytes_per_second") else None
        ),
        expected_width_lanes=value.expected_width_lanes,
        current_width_lanes=value.current_width_lanes if value.HasField("current_width_lanes") else None,
        state=value.state if value.HasField("state") else _LINK.state,
    )


def _hold(value: Hold) -> pb.Hold:
    return pb.Hold(
        owner=value.owner,
        reason=value.reason,
        expire_time_unix_ns=value.expire_time_unix_ns,
        device_key=value.device_key,
    )


def _from_hold(value: pb.Hold) -> Hold:
    return Hold(
        owner=value.owner,
        reason=value.reason,
        expire_time_unix_ns=value.expire_time_unix_ns,
        device_key=value.device_key,
    )
