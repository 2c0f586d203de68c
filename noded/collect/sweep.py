"""One sweep over every source. What cannot be read is said so in the result; nothing here raises for it."""

from __future__ import annotations

from noded.collect.cpu import read_cpu_usage, read_cpus
from noded.collect.disks import read_disks, read_file_systems
from noded.collect.host import read_host, read_limits
from noded.collect.memory import read_memory, read_memory_usage
from noded.collect.model import AttributeValue, Inventory, Quality, Readings, Roots, Sample, Unit
from noded.collect.nics import read_link_states, read_nics
from noded.collect.pci import read_pci
from noded.collect.rdma import read_rdma_counters
from noded.collect.temperatures import read_temperatures


def collect_inventory(roots: Roots) -> Inventory:
    """What the host has, devices and links sorted by key, so that equal hardware gives an equal inventory."""
    host, limits = read_host(roots), read_limits(roots)
    cpus, memory = read_cpus(roots), read_memory(roots)
    disks, nics, pci = read_disks(roots), read_nics(roots), read_pci(roots)
    devices = (*cpus.devices, *memory.devices, *disks.devices, *nics.devices, *pci.accelerators)
    attributes: dict[str, AttributeValue] = {**host.attributes, **cpus.attributes}
    attributes["pci_accelerator_count"] = len(pci.accelerators)
    return Inventory(
        devices=tuple(sorted(devices, key=lambda device: device.key)),
        links=tuple(sorted(nics.links, key=lambda link: link.key)),
        attributes=attributes,
        sources={
            "cpu": cpus.quality,
            "disk": disks.quality,
            "dmi": host.dmi_quality,
            "memory": memory.quality,
            "nic": nics.quality,
            "pci": pci.quality,
            "rdma": nics.rdma_quality,
        },
        cpu_millis=_least(None if cpus.threads_online is None else 1_000 * cpus.threads_online, limits.cpu_millis),
        memory_bytes=_least(memory.total_bytes, limits.memory_bytes),
        boot_id=host.boot_id,
    )


def collect_readings(roots: Roots, now_ns: int) -> Readings:
    """How the host is. ``now_ns`` (CLOCK_BOOTTIME) stamps every sample: the sweep began then."""
    samples = [
        *read_cpu_usage(roots, now_ns),
        *read_memory_usage(roots, now_ns),
        *read_temperatures(roots, now_ns),
        *read_link_states(roots, now_ns),
        *read_rdma_counters(roots, now_ns),
        *read_file_systems(roots, now_ns),
    ]
    # A source that turns out nonsense is itself worth knowing; it is no fault of the device it speaks of.
    implausible = sum(sample.quality is Quality.IMPLAUSIBLE for sample in samples)
    samples.append(Sample("collector/implausible", implausible, Unit.COUNT, Quality.OK, now_ns))
    return Readings(tuple(sorted(samples, key=lambda sample: sample.name)), now_ns)


def _least(there: int | None, allowed: int | None) -> int | None:
    """A limit does not tell what is there: where that is unknown, it stays so."""
    return there if there is None or allowed is None else min(there, allowed)
