"""CPU packages, cores, threads and their NUMA nodes, from sysfs; from /proc/cpuinfo where sysfs has no topology."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from noded.collect.files import (
    MAX_AMOUNT,
    Number,
    decimal,
    format_id_list,
    list_names,
    parse_id_list,
    parse_mask,
    read_int,
    read_text,
)
from noded.collect.model import AttributeValue, Device, Quality, Roots, Sample, Unit

# A 1,024-thread x86 host has some 1.5 MiB of it.
_CPUINFO_MAX_BYTES: Final = 8 << 20
_STAT_MAX_BYTES: Final = 4 << 20
_LOAD = re.compile(r"([0-9]{1,9})\.([0-9]{2}) ", re.ASCII)

# /proc/cpuinfo of arm64 names no model; MIDR implementers as in the kernel's arch/arm64/include/asm/cputype.h.
_ARM_IMPLEMENTERS: Final[Mapping[str, str]] = {
    "0x41": "ARM",
    "0x42": "Broadcom",
    "0x43": "Cavium",
    "0x46": "Fujitsu",
    "0x48": "HiSilicon",
    "0x4e": "NVIDIA",
    "0x50": "APM",
    "0x51": "Qualcomm",
    "0x61": "Apple",
    "0x6d": "Microsoft",
    "0x70": "Phytium",
    "0xc0": "Ampere",
}


@dataclass(frozen=True, slots=True)
class Cpu:
    """One online hardware thread. ``core`` and ``package`` identify, they do not count."""

    number: int
    package: int
    core: str
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class CpuInventory:
    devices: tuple[Device, ...]
    attributes: Mapping[str, AttributeValue]
    threads_online: int | None
    quality: Quality


def read_cpus(roots: Roots) -> CpuInventory:
    """One device a package that has an online thread. Offline threads are a node attribute: their place is not told."""
    entries = _cpuinfo(roots)
    cpus = _from_sysfs(roots) or _from_cpuinfo(entries)
    model, vendor = _model(entries)
    attributes: dict[str, AttributeValue] = {}
    if model:
        attributes["cpu_model"] = model
    offline = _offline(roots, cpus)
    if offline:
        attributes["cpu_offline"] = format_id_list(offline)
    devices = tuple(
        _package(number, [cpu for cpu in cpus if cpu.package == number], model, vendor)
        for number in sorted({cpu.package for cpu in cpus})
    )
    return CpuInventory(devices, attributes, len(cpus) or None, Quality.OK if cpus else Quality.ABSENT)


def read_cpu_usage(roots: Roots, now_ns: int) -> list[Sample]:
    """Busy and total time since boot as counters, and the load average of one minute."""
    samples: list[Sample] = []
    stat = read_text(f"{roots.procroot}/stat", _STAT_MAX_BYTES)
    fields = (stat.value or "").partition("\n")[0].split()
    # guest time is already inside user and nice; counting it again would show more than 100 %
    ticks = [tick for tick in map(decimal, fields[1:9]) if tick is not None]
    if fields[:1] == ["cpu"] and len(ticks) == len(fields[1:9]) >= 4 and sum(ticks) <= MAX_AMOUNT:
        idle = ticks[3] + (ticks[4] if len(ticks) > 4 else 0)
        samples.append(Sample("cpu/busy", sum(ticks) - idle, Unit.TICKS, Quality.OK, now_ns))
        samples.append(Sample("cpu/total", sum(ticks), Unit.TICKS, Quality.OK, now_ns))
    else:
        quality = stat.quality if stat.value is None else Quality.ABSENT
        samples.append(Sample("cpu/busy", None, Unit.TICKS, quality, now_ns))
        samples.append(Sample("cpu/total", None, Unit.TICKS, quality, now_ns))
    load = read_text(f"{roots.procroot}/loadavg")
    average = _LOAD.match(load.value or "")
    if average is not None:
        thousandths = int(average[1]) * 1_000 + int(average[2]) * 10
        samples.append(Sample("cpu/load", thousandths, Unit.THOUSANDTHS, Quality.OK, now_ns))
    else:
        quality = load.quality if load.value is None else Quality.ABSENT
        samples.append(Sample("cpu/load", None, Unit.THOUSANDTHS, quality, now_ns))
    return samples


def numa_nodes(roots: Roots) -> dict[int, tuple[int, ...]]:
    """Online NUMA node -> its CPUs (none for a memory-only node). Empty when the kernel does not tell."""
    base = f"{roots.sysroot}/devices/system/node"
    online = parse_id_list(read_text(f"{base}/online").value or "")
    found: dict[int, tuple[int, ...]] = {}
    for name in list_names(base):
        number = _numbered(name, "node")
        if number is None or (online is not None and number not in online):
            continue
        cpus = parse_id_list(read_text(f"{base}/{name}/cpulist").value or "")
        if cpus is None:
            cpus = parse_mask(read_text(f"{base}/{name}/cpumap").value or "")
        found[number] = cpus or ()
    return found


def _package(number: int, cpus: list[Cpu], model: str, vendor: str) -> Device:
    attributes: dict[str, AttributeValue] = {
        "identity": "location",
        "cpus": format_id_list(tuple(c.number for c in cpus)),
    }
    nodes = tuple(sorted({cpu.numa_node for cpu in cpus if cpu.numa_node is not None}))
    if len(nodes) == 1:
        attributes["numaNode"] = nodes[0]
    elif nodes:
        attributes["numaNodes"] = format_id_list(nodes)
    if model:
        attributes["productName"] = model
    cores = len({cpu.core for cpu in cpus})
    return Device(
        key=f"cpu/package-{number}",
        kind="cpu",
        name=model or f"package {number}",
        attributes=attributes,
        capacity={"cores": cores, "threads": len(cpus), "cpu_millis": 1_000 * len(cpus)},
        vendor_id=vendor,
    )


def _from_sysfs(roots: Roots) -> list[Cpu]:
    base = f"{roots.sysroot}/devices/system/cpu"
    online = _online(roots)
    node_of = {cpu: node for node, cpus in numa_nodes(roots).items() for cpu in cpus}
    cpus: list[Cpu] = []
    for name in list_names(base):
        number = _numbered(name, "cpu")
        if number is None or (online is not None and number not in online):
            continue
        topology = f"{base}/{name}/topology"
        package = read_int(f"{topology}/physical_package_id")
        if online is None and package.value is None and read_int(f"{base}/{name}/online").value == 0:
            continue
        core = _core(topology, number, package)
        cpus.append(Cpu(number, max(package.value or 0, 0), core, node_of.get(number)))
    return cpus


def _numbered(name: str, prefix: str) -> int | None:
    """3 of "cpu3"; None of "cpufreq"."""
    return decimal(name.removeprefix(prefix)) if name.startswith(prefix) else None


def _core(topology: str, number: int, package: Number) -> str:
    """What siblings share. core_id alone repeats over packages, and on some machines over dies and clusters."""
    for name in ("core_cpus_list", "thread_siblings_list", "core_cpus", "thread_siblings"):
        siblings = read_text(f"{topology}/{name}").value
        if siblings is not None:
            return siblings
    core = read_int(f"{topology}/core_id").value
    return f"thread {number}" if core is None or core < 0 else f"{package.value} {core}"


def _online(roots: Roots) -> tuple[int, ...] | None:
    return parse_id_list(read_text(f"{roots.sysroot}/devices/system/cpu/online").value or "")


def _offline(roots: Roots, cpus: list[Cpu]) -> tuple[int, ...]:
    """Threads that are there and off. `present` is asked, not `offline`: that one lists every slot up to NR_CPUS."""
    present = parse_id_list(read_text(f"{roots.sysroot}/devices/system/cpu/present").value or "")
    online = {cpu.number for cpu in cpus}
    return tuple(number for number in present or () if number not in online)


def _cpuinfo(roots: Roots) -> list[dict[str, str]]:
    text = read_text(f"{roots.procroot}/cpuinfo", _CPUINFO_MAX_BYTES).value or ""
    entries: list[dict[str, str]] = []
    for block in text.split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        entries.append({key.strip(): value.strip() for key, colon, value in pairs if colon})
    return entries


def _from_cpuinfo(entries: list[dict[str, str]]) -> list[Cpu]:
    cpus: list[Cpu] = []
    for entry in entries:
        number = decimal(entry.get("processor", ""))
        if number is None:
            continue
        package = decimal(entry.get("physical id", "0")) or 0
        core = entry.get("core id")
        label = f"thread {number}" if core is None else f"{package} {core}"
        cpus.append(Cpu(number, package, label, None))
    return cpus


def _model(entries: list[dict[str, str]]) -> tuple[str, str]:
    """(model, vendor) of the first CPU that names them; "" for what is not told."""
    for entry in entries:
        if "model name" in entry:
            return entry["model name"], entry.get("vendor_id", "")
        if "CPU implementer" in entry:
            code = entry["CPU implementer"].lower()
            vendor = _ARM_IMPLEMENTERS.get(code, code)
            return f"{vendor} {entry.get('CPU part', 'unknown part')}", vendor
        if "cpu" in entry:  # POWER
            return entry["cpu"], "IBM"
    return "", ""
