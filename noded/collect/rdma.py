"""RDMA ports (InfiniBand, RoCE, Omni-Path) and their error counters, from /sys/class/infiniband."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from noded.collect.files import Number, decimal, list_names, read_int, read_text
from noded.collect.model import AttributeValue, Link, Quality, Roots, Sample, Unit
from noded.collect.pci import place

# "100 Gb/sec (4X EDR)", "2.5 Gb/sec (1X SDR)"
_RATE = re.compile(r"([0-9]{1,5})(?:\.([0-9]))? Gb/sec(?: \(([0-9]{1,2})X.*\))?")
_GUID = re.compile(r"[0-9a-f]{4}(?::[0-9a-f]{4}){3}")
_BYTES_PER_TENTH_GBIT: Final = 12_500_000
_MAX_WIDTH_LANES: Final = 12

# `state` of a port; INIT and ARMED are on the way up and carry no traffic. phys_state says why it is down.
_UP: Final = "ACTIVE"
_DOWN: Final = frozenset({"DOWN", "INIT", "ARMED", "ACTIVE_DEFER"})

# The counters that tell of a bad link, and the end at which the port's own register stays (PortCounters of the
# InfiniBand specification; 32-bit ones are read as extended counters and do not end in practice).
ERROR_COUNTERS: Final[Mapping[str, int]] = {
    "excessive_buffer_overrun_errors": 15,
    "link_downed": 255,
    "link_error_recovery": 255,
    "local_link_integrity_errors": 15,
    "port_rcv_errors": 65_535,
    "symbol_error": 65_535,
}


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """``key`` is the node GUID and port number where the GUID is there, else the place, else the kernel's name."""

    key: str
    identity: str
    name: str
    number: int
    path: str
    place: Mapping[str, AttributeValue]
    attributes: Mapping[str, AttributeValue]

    def link(self, nic_key: str) -> Link:
        rate, width = parse_rate(read_text(f"{self.path}/rate").value or "")
        state = port_state(read_text(f"{self.path}/state").value or "")
        layer = (read_text(f"{self.path}/link_layer").value or "infiniband").lower()
        # A port that is not up still shows a rate: the slowest, or the last. It is not what the link runs at.
        current = rate if state == "up" else None
        lanes = width if state == "up" else None
        return Link(f"link/{nic_key}", layer, nic_key, "", current, lanes, state)


def read_rdma_ports(roots: Roots) -> list[RdmaPort]:
    """Every port of every RDMA device, in the order of the kernel's names."""
    base = f"{roots.sysroot}/class/infiniband"
    ports: list[RdmaPort] = []
    for device in list_names(base):
        path = f"{base}/{device}"
        where = place(f"{path}/device")
        attributes: dict[str, AttributeValue] = {"rdma_device": device}
        for name, file in (("productName", "hca_type"), ("firmware_version", "fw_ver"), ("board_id", "board_id")):
            value = read_text(f"{path}/{file}").value
            if value is not None:
                attributes[name] = value
        guid = (read_text(f"{path}/node_guid").value or "").lower()
        if _GUID.fullmatch(guid) and guid.strip("0:"):
            attributes["node_guid"] = guid
        for directory in list_names(f"{path}/ports"):
            number = decimal(directory)
            if number is not None:
                key, identity = _key(device, guid if "node_guid" in attributes else "", where)
                ports.append(
                    RdmaPort(
                        f"{key}/{number}",
                        identity,
                        f"{device}/{number}",
                        number,
                        f"{path}/ports/{number}",
                        where,
                        {**attributes, "port": number},
                    )
                )
    return ports


def read_rdma_counters(roots: Roots, now_ns: int) -> list[Sample]:
    """The error counters of each port. One at its end is SATURATED: it can count no further."""
    samples: list[Sample] = []
    for port in read_rdma_ports(roots):
        for name, end in ERROR_COUNTERS.items():
            number = read_int(f"{port.path}/counters/{name}")
            if number.value is not None and number.value < 0:
                number = Number(None, Quality.IMPLAUSIBLE)
            quality = Quality.SATURATED if number.value == end else number.quality
            samples.append(Sample(f"rdma/{port.key}/{name}", number.value, Unit.COUNT, quality, now_ns))
    return samples


def parse_rate(text: str) -> tuple[int | None, int | None]:
    """(bytes per second, lanes) of what `rate` says; None for what it does not."""
    match = _RATE.fullmatch(text)
    if match is None:
        return None, None
    tenths = int(match[1]) * 10 + int(match[2] or 0)
    width = int(match[3]) if match[3] is not None else 0
    return tenths * _BYTES_PER_TENTH_GBIT or None, width if 0 < width <= _MAX_WIDTH_LANES else None


def port_state(text: str) -> str:
    """up, down or unknown of "4: ACTIVE"."""
    state = text.partition(":")[2].strip()
    if state == _UP:
        return "up"
    return "down" if state in _DOWN else "unknown"


def _key(device: str, guid: str, where: Mapping[str, AttributeValue]) -> tuple[str, str]:
    if guid:
        return guid, "serial"
    if "pciBusID" in where:
        return str(where["pciBusID"]), "location"
    return device, "name"
