"""Network interfaces with hardware behind them, RDMA ports, and the link each has."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from noded.collect.files import Number, directory_quality, link_target, list_names, read_int, read_text
from noded.collect.model import AttributeValue, Device, Link, Quality, Roots, Sample, Unit
from noded.collect.pci import place
from noded.collect.rdma import RdmaPort, read_rdma_ports

_MAC = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}")
_PERMANENT: Final = 0  # addr_assign_type: burnt in, not random, stolen or set by somebody
# ethtool's SPEED_UNKNOWN is -1; some drivers show it unsigned, some in 16 bits.
_UNKNOWN_SPEEDS_MBIT: Final = frozenset({-1, 0, 65_535, 0xFFFFFFFF})
_BYTES_PER_MBIT: Final = 125_000
# 6.4 Tb/s: twice what is built; more is an artefact
_MAX_SPEED_MBIT: Final = 6_400_000


@dataclass(frozen=True, slots=True)
class NicInventory:
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    quality: Quality
    rdma_quality: Quality


@dataclass(frozen=True, slots=True)
class _Interface:
    name: str
    path: str
    mac: str
    place: Mapping[str, AttributeValue]


def read_nics(roots: Roots) -> NicInventory:
    """A device and a link for each RDMA port and for each hardware interface that is not on one.

    An interface on the same PCI function as an RDMA port is that port seen another way; counted twice, it would be
    given out twice.
    """
    interfaces = _interfaces(roots)
    ports = read_rdma_ports(roots)
    taken: set[str] = set()
    devices: list[Device] = []
    links: list[Link] = []
    for port in ports:
        beside = next((i for i in interfaces if i.name not in taken and _same_port(i, port)), None)
        if beside is not None:
            taken.add(beside.name)
        device = _port_device(port, beside)
        devices.append(device)
        links.append(port.link(device.key))
    for interface in interfaces:
        if interface.name not in taken:
            device = _interface_device(interface)
            devices.append(device)
            speed = speed_bytes_per_second(read_int(f"{interface.path}/speed"))
            state = _state(interface.path)
            links.append(_link(device.key, speed.value, state))
    rdma = directory_quality(f"{roots.sysroot}/class/infiniband")
    quality = directory_quality(f"{roots.sysroot}/class/net")
    return NicInventory(*_unique(devices, links), quality, rdma)


def read_link_states(roots: Roots, now_ns: int) -> list[Sample]:
    """State and speed of every link of ``read_nics``, under the link's key."""
    inventory = read_nics(roots)
    samples: list[Sample] = []
    for link in inventory.links:
        known = link.state in ("up", "down")
        flag = int(link.state == "up") if known else None
        quality = Quality.OK if known else Quality.ABSENT
        samples.append(Sample(f"{link.key}/up", flag, Unit.FLAG, quality, now_ns))
        speed = link.current_bytes_per_second
        quality = Quality.OK if speed is not None else Quality.ABSENT
        samples.append(Sample(f"{link.key}/speed", speed, Unit.BYTES_PER_SECOND, quality, now_ns))
    return samples


def speed_bytes_per_second(mbit: Number) -> Number:
    """From what `speed` says in Mb/s. Unknown is unknown, never 0."""
    if mbit.value is None or mbit.value in _UNKNOWN_SPEEDS_MBIT:
        return Number(None, mbit.quality if mbit.value is None else Quality.ABSENT)
    if not 0 < mbit.value <= _MAX_SPEED_MBIT:
        return Number(None, Quality.IMPLAUSIBLE)
    return Number(mbit.value * _BYTES_PER_MBIT, Quality.OK)


def _interfaces(roots: Roots) -> list[_Interface]:
    base = f"{roots.sysroot}/class/net"
    found: list[_Interface] = []
    for name in list_names(base):
        path = f"{base}/{name}"
        if os.path.lexists(f"{path}/device"):
            found.append(_Interface(name, path, _mac(path), place(f"{path}/device")))
    return found


def _mac(path: str) -> str:
    """The burnt-in address, or "". A member of a bond shows the bond's; its own is kept beside."""
    own = read_text(f"{path}/bonding_slave/perm_hwaddr").value
    if own is None and read_int(f"{path}/addr_assign_type").value in (None, _PERMANENT):
        own = read_text(f"{path}/address").value
    mac = (own or "").lower()
    return mac if _MAC.fullmatch(mac) and mac.strip("0:") else ""


def _state(path: str) -> str:
    """`carrier` gives EINVAL while the interface is down by order, which `operstate` tells."""
    carrier = read_int(f"{path}/carrier").value
    if carrier in (0, 1):
        return "up" if carrier else "down"
    return "down" if read_text(f"{path}/operstate").value in ("down", "lowerlayerdown") else "unknown"


def _same_port(interface: _Interface, port: RdmaPort) -> bool:
    if interface.place.get("pciBusID") is None or interface.place.get("pciBusID") != port.place.get("pciBusID"):
        return False
    number = read_int(f"{interface.path}/dev_port").value
    return number is None or number == port.number - 1


def _port_device(port: RdmaPort, interface: _Interface | None) -> Device:
    attributes: dict[str, AttributeValue] = {**port.place, **port.attributes}
    if interface is not None:
        attributes |= _interface_attributes(interface)
    attributes["identity"] = port.identity
    return Device(f"nic/{port.key}", "nic", port.name, attributes)


def _interface_device(interface: _Interface) -> Device:
    attributes = {**interface.place, **_interface_attributes(interface)}
    key, attributes["identity"] = interface.name, "name"
    if interface.mac:
        key, attributes["identity"] = interface.mac, "serial"
    elif "pciBusID" in attributes:
        number = read_int(f"{interface.path}/dev_port").value or 0
        key, attributes["identity"] = f"{attributes['pciBusID']}/{number}", "location"
    return Device(f"nic/{key}", "nic", interface.name, attributes)


def _interface_attributes(interface: _Interface) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {"interface": interface.name}
    if interface.mac:
        attributes["mac"] = interface.mac
    bond = link_target(f"{interface.path}/master")
    if bond:
        attributes["bond"] = bond
    return attributes


def _link(nic_key: str, speed: int | None, state: str) -> Link:
    return Link(f"link/{nic_key}", "ethernet", nic_key, current_bytes_per_second=speed, state=state)


def _unique(devices: list[Device], links: list[Link]) -> tuple[tuple[Device, ...], tuple[Link, ...]]:
    """Equal addresses (cloned virtual machines, two ports behind one MAC) identify nothing: the name is added."""
    counts: dict[str, int] = {}
    for device in devices:
        counts[device.key] = counts.get(device.key, 0) + 1
    for index, device in enumerate(devices):
        if counts[device.key] > 1:
            key = f"{device.key}/{device.name}"
            devices[index] = replace(device, key=key, attributes={**device.attributes, "identity": "name"})
            links[index] = replace(links[index], key=f"link/{key}", end_a=key)
    return tuple(devices), tuple(links)
