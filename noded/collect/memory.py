"""Memory: total, per NUMA node, huge pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from noded.collect.cpu import numa_nodes
from noded.collect.files import list_names, product, read_int, read_text
from noded.collect.model import AttributeValue, Device, Quality, Roots, Sample, Unit

_KIB: Final = 1024
_LINE = re.compile(r"(?:Node\s+[0-9]+\s+)?([A-Za-z0-9_()]+):\s+([0-9]{1,15}) kB", re.MULTILINE)
_HUGEPAGES = re.compile(r"hugepages-([0-9]{1,12})kB")


@dataclass(frozen=True, slots=True)
class MemoryInventory:
    """``total_bytes``: what the CPUs of the host call their own."""

    devices: tuple[Device, ...]
    total_bytes: int | None
    quality: Quality


def read_memory(roots: Roots) -> MemoryInventory:
    """One device a NUMA node that has memory; one for all of it where the kernel knows no nodes.

    Memory without CPUs beside it is no ordinary memory: it is CXL, or an accelerator's own (POWER9, Grace Hopper),
    and MemTotal counts it in. It is listed as a device and left out of ``total_bytes``, so that nobody is given it
    unasked.
    """
    text = read_text(f"{roots.procroot}/meminfo")
    total = _parse(text.value or "").get("MemTotal")
    devices: list[Device] = []
    apart_bytes = 0
    nodes = numa_nodes(roots)
    told = any(nodes.values())  # a tree that names no CPUs at all does not say that there are none
    for node, cpus in sorted(nodes.items()):
        base = f"{roots.sysroot}/devices/system/node/node{node}"
        size = _parse(read_text(f"{base}/meminfo").value or "").get("MemTotal")
        if size == 0:
            continue
        cpuless = told and not cpus
        apart_bytes += (size or 0) if cpuless else 0
        attributes: dict[str, AttributeValue] = {"identity": "location", "numaNode": node, "cpuless": cpuless}
        devices.append(_device(f"memory/node-{node}", attributes, size, base))
    if not devices and total is not None:
        devices.append(_device("memory/all", {"identity": "location"}, total, f"{roots.sysroot}/kernel/mm"))
    usable = None if total is None else max(total - apart_bytes, 0)
    return MemoryInventory(tuple(devices), usable, Quality.OK if total is not None else text.quality)


def read_memory_usage(roots: Roots, now_ns: int) -> list[Sample]:
    """Total and available bytes of the host."""
    text = read_text(f"{roots.procroot}/meminfo")
    values = _parse(text.value or "")
    missing = Quality.ABSENT if text.value is not None else text.quality
    samples: list[Sample] = []
    for name, key in (("memory/total", "MemTotal"), ("memory/available", "MemAvailable")):
        value = values.get(key)
        quality = Quality.OK if value is not None else missing
        samples.append(Sample(name, value, Unit.BYTES, quality, now_ns))
    return samples


def _device(key: str, attributes: dict[str, AttributeValue], size_bytes: int | None, base: str) -> Device:
    capacity = {} if size_bytes is None else {"memory_bytes": size_bytes}
    for name in list_names(f"{base}/hugepages"):
        match = _HUGEPAGES.fullmatch(name)
        if match is None:
            continue
        size_bytes = product(read_int(f"{base}/hugepages/{name}/nr_hugepages").value, int(match[1]) * _KIB)
        if size_bytes:
            capacity[f"hugepages_{match[1]}kib_bytes"] = size_bytes
    return Device(key=key, kind="memory", name=key.removeprefix("memory/"), attributes=attributes, capacity=capacity)


def _parse(text: str) -> dict[str, int]:
    """Bytes by name of a meminfo file, the host's or a node's."""
    return {name: int(value) * _KIB for name, value in _LINE.findall(text)}
