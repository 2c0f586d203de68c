"""Inventories and readings, both ways. Agents' reports are bounded and sorted: equal ones give equal records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from controld.core.agent import Sample
from controld.core.model import AttributeValue, Device, Domain, Inventory, Link
from controld.core.outcome import FieldViolation
from controld.service.convert.common import attribute_from_proto, attribute_to_proto
from controld.service.failures import invalid, invalid_field
from virialpb.v1 import common_pb2, rdl_pb2

# A dense host today: 16 accelerators, 32 NICs, 256 cores in 4 packages, 60 disks. An order of magnitude above that is
# no inventory but a fault.
DEVICES_MAX = 4_096
LINKS_MAX = 8_192
DOMAINS_MAX = 256
ATTRIBUTES_MAX = 256
READINGS_MAX = 4_096
KEY_LENGTH_MAX = 256
_INT64_MAX = 2**63 - 1


class _Keyed(Protocol):
    @property
    def key(self) -> str: ...


_T = TypeVar("_T", bound=_Keyed)


def inventory_from_proto(message: rdl_pb2.Inventory) -> Inventory:
    """Raises CallError for one that is over the bounds, or names a key twice or not at all."""
    for field, count, maximum in (
        ("devices", len(message.devices), DEVICES_MAX),
        ("links", len(message.links), LINKS_MAX),
        ("domains", len(message.domains), DOMAINS_MAX),
    ):
        if count > maximum:
            raise invalid_field(f"inventory.{field}", f"{count} are too many: the most is {maximum}")
    devices = tuple(_device(device, index) for index, device in enumerate(message.devices))
    links = tuple(_link(link) for link in message.links)
    _check_keys("inventory.devices", devices)
    _check_keys("inventory.links", links)
    return Inventory(
        devices=tuple(sorted(devices, key=lambda device: device.key)),
        links=tuple(sorted(links, key=lambda link: link.key)),
        domains=tuple(Domain(domain.kind, domain.name, domain.parent) for domain in message.domains),
        attributes=_attributes(message.attributes, "inventory.attributes"),
    )


def inventory_to_proto(inventory: Inventory) -> rdl_pb2.Inventory:
    return rdl_pb2.Inventory(
        devices=[_device_to_proto(device) for device in inventory.devices],
        links=[_link_to_proto(link) for link in inventory.links],
        domains=[rdl_pb2.Domain(kind=one.kind, name=one.name, parent=one.parent) for one in inventory.domains],
        attributes={name: attribute_to_proto(value) for name, value in inventory.attributes},
    )


def samples_from_proto(messages: Iterable[rdl_pb2.Sample]) -> tuple[Sample, ...]:
    """At most READINGS_MAX; an absent value stays absent, never 0."""
    found = [
        Sample(
            name=message.name,
            value=message.value if message.HasField("value") else None,
            unit=message.unit,
            quality=message.quality,
            age_ms=message.age_ms,
        )
        for message in messages
    ]
    return tuple(found[:READINGS_MAX])


def sample_to_proto(sample: Sample) -> rdl_pb2.Sample:
    return rdl_pb2.Sample(
        name=sample.name, value=sample.value, unit=sample.unit, quality=sample.quality, age_ms=sample.age_ms
    )


def _device(message: rdl_pb2.Device, index: int) -> Device:
    return Device(
        key=message.key,
        kind=message.kind,
        name=message.name,
        vendor_id=message.vendor_id,
        attributes=_attributes(message.attributes, f"inventory.devices[{index}].attributes"),
        capacity=tuple(sorted(message.capacity.items())),
        interconnect_protocol=message.interconnect.protocol,
        interconnect_max_latency_ns=_int64(message.interconnect.max_latency_ns),
        interconnect_bandwidth_bytes_per_second=_int64(message.interconnect.bandwidth_bytes_per_second),
    )


def _device_to_proto(device: Device) -> rdl_pb2.Device:
    message = rdl_pb2.Device(
        key=device.key,
        kind=device.kind,
        name=device.name,
        vendor_id=device.vendor_id,
        attributes={name: attribute_to_proto(value) for name, value in device.attributes},
        capacity=dict(device.capacity),
    )
    if device.interconnect_protocol:
        message.interconnect.CopyFrom(
            rdl_pb2.Interconnect(
                protocol=device.interconnect_protocol,
                max_latency_ns=device.interconnect_max_latency_ns,
                bandwidth_bytes_per_second=device.interconnect_bandwidth_bytes_per_second,
            )
        )
    return message


def _link(message: rdl_pb2.Link) -> Link:
    return Link(
        key=message.key,
        kind=message.kind,
        end_a=message.end_a,
        end_b=message.end_b,
        rail=message.rail,
        expected_bytes_per_second=_int64(message.expected_bytes_per_second),
        current_bytes_per_second=(
            _int64(message.current_bytes_per_second) if message.HasField("current_bytes_per_second") else None
        ),
        expected_width_lanes=message.expected_width_lanes,
        current_width_lanes=message.current_width_lanes if message.HasField("current_width_lanes") else None,
        state=message.state or "unknown",
    )


def _link_to_proto(link: Link) -> rdl_pb2.Link:
    return rdl_pb2.Link(
        key=link.key,
        kind=link.kind,
        end_a=link.end_a,
        end_b=link.end_b,
        rail=link.rail,
        expected_bytes_per_second=link.expected_bytes_per_second,
        current_bytes_per_second=link.current_bytes_per_second,
        expected_width_lanes=link.expected_width_lanes,
        current_width_lanes=link.current_width_lanes,
        state=link.state,
    )


def _attributes(messages: Mapping[str, common_pb2.AttributeValue], path: str) -> tuple[tuple[str, AttributeValue], ...]:
    if len(messages) > ATTRIBUTES_MAX:
        raise invalid_field(path, f"{len(messages)} are too many: the most is {ATTRIBUTES_MAX}")
    read = ((name, attribute_from_proto(message)) for name, message in messages.items())
    return tuple(sorted(((name, value) for name, value in read if value is not None), key=lambda item: item[0]))


def _check_keys(path: str, items: tuple[_T, ...]) -> None:
    seen: set[str] = set()
    for index, item in enumerate(items):
        if not item.key or len(item.key) > KEY_LENGTH_MAX:
            raise invalid(FieldViolation(f"{path}[{index}].key", f"must have 1 to {KEY_LENGTH_MAX} characters"))
        if item.key in seen:
            raise invalid(FieldViolation(f"{path}[{index}].key", f"'{item.key}' stands twice; keys are identities"))
        seen.add(item.key)


def _int64(value: int) -> int:
    """What is stored is signed; an agent's absurd reading must not stop the store."""
    return min(value, _INT64_MAX)
