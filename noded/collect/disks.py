"""Block devices and the use of the file systems on them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from noded.collect.files import directory_quality, list_names, product, quality_of, read_int, read_text
from noded.collect.model import AttributeValue, Device, Quality, Roots, Sample, Unit
from noded.collect.pci import place

# Made of other devices or of memory, or media that come and go: nothing a task is given.
_NOT_A_DISK = re.compile(r"(?:loop|ram|zram|dm-|md|sr|fd|nbd|rbd|drbd|mtdblock)[0-9]*.*")
_SECTOR_BYTES: Final = 512  # sysfs counts `size` in these whatever the device's own sectors are
_MAX_FILE_SYSTEMS: Final = 64
# Set by firmware or a hypervisor that had nothing to say.
_NO_SERIAL: Final = frozenset({"", "0", "none", "n/a", "unknown", "default string"})


@dataclass(frozen=True, slots=True)
class DiskInventory:
    devices: tuple[Device, ...]
    quality: Quality


def read_disks(roots: Roots) -> DiskInventory:
    """One device a whole disk (no partitions). A drive without medium is left out."""
    base = f"{roots.sysroot}/block"
    devices: list[Device] = []
    for name in list_names(base):
        # An NVMe path behind multipath shows as nvme0c0n1, hidden; the disk itself is nvme0n1.
        if _NOT_A_DISK.fullmatch(name) or read_int(f"{base}/{name}/hidden").value == 1:
            continue
        sectors = read_int(f"{base}/{name}/size").value
        if sectors == 0:
            continue
        devices.append(_disk(name, f"{base}/{name}", sectors))
    return DiskInventory(_unique(devices), directory_quality(base))


def read_file_systems(roots: Roots, now_ns: int) -> list[Sample]:
    """Total and available bytes of the file systems on block devices of this machine; nothing for a captured tree.

    Network file systems are not asked: statfs on a dead server waits for ever.
    """
    if not roots.live:
        return []
    samples: list[Sample] = []
    for point in _mount_points(roots):
        total: int | None = None
        available: int | None = None
        try:
            usage = os.statvfs(point)
        except OSError as error:
            quality = quality_of(error)
        else:
            total, available = usage.f_frsize * usage.f_blocks, usage.f_frsize * usage.f_bavail
            quality = Quality.OK
        samples.append(Sample(f"filesystem{point}/total", total, Unit.BYTES, quality, now_ns))
        samples.append(Sample(f"filesystem{point}/available", available, Unit.BYTES, quality, now_ns))
    return samples


def _disk(name: str, path: str, sectors: int | None) -> Device:
    attributes: dict[str, AttributeValue] = dict(place(f"{path}/device"))
    rotational = read_int(f"{path}/queue/rotational").value
    if rotational in (0, 1):
        attributes["rotational"] = rotational == 1
    model = read_text(f"{path}/device/model").value
    if model is not None:
        attributes["productName"] = model
    serial = _serial(path)
    if serial is not None:
        attributes["serial"] = serial
    key, attributes["identity"] = _key(name, path, serial)
    capacity_bytes = product(sectors, _SECTOR_BYTES)
    capacity = {} if capacity_bytes is None else {"capacity_bytes": capacity_bytes}
    vendor = read_text(f"{path}/device/vendor").value or ""
    return Device(key, "storage", name, attributes, capacity, vendor_id="" if vendor.startswith("0x") else vendor)


def _serial(path: str) -> str | None:
    """NVMe: the controller's serial; virtio: the disk's; SCSI: the unit's world-wide name."""
    for name in ("device/serial", "serial", "wwid", "device/wwid"):
        text = read_text(f"{path}/{name}").value
        if text is not None and text.casefold() not in _NO_SERIAL:
            return " ".join(text.split())
    return None


def _key(name: str, path: str, serial: str | None) -> tuple[str, str]:
    if serial is not None:
        # Two namespaces of one NVMe controller share its serial; their numbers do not change.
        namespace = read_int(f"{path}/nsid").value
        return (f"disk/{serial}" if namespace in (None, 1) else f"disk/{serial}/{namespace}"), "serial"
    location = os.path.realpath(f"{path}/device").partition("/devices/")[2]
    if location:
        return f"disk/{location}", "location"
    return f"disk/{name}", "name"


def _unique(devices: list[Device]) -> tuple[Device, ...]:
    """Serials that repeat (cloned virtual disks) identify nothing: the kernel's name is added to each."""
    counts: dict[str, int] = {}
    for device in devices:
        counts[device.key] = counts.get(device.key, 0) + 1
    return tuple(device if counts[device.key] == 1 else _named(device) for device in devices)


def _named(device: Device) -> Device:
    attributes: Mapping[str, AttributeValue] = {**device.attributes, "identity": "name"}
    return Device(
        f"{device.key}/{device.name}", device.kind, device.name, attributes, device.capacity, device.vendor_id
    )


def _mount_points(roots: Roots) -> Iterator[str]:
    """Mount points of /dev/ sources, one for each source, shortest path first."""
    text = read_text(f"{roots.procroot}/self/mounts", 1 << 20).value or ""
    first: dict[str, str] = {}
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) >= 3 and fields[0].startswith("/dev/") and not fields[2].startswith("fuse"):
            point = _unescape(fields[1])
            if fields[0] not in first or len(point) < len(first[fields[0]]):
                first[fields[0]] = point
    yield from sorted(first.values())[:_MAX_FILE_SYSTEMS]


def _unescape(text: str) -> str:
    """The kernel writes space, tab, newline and backslash of a path as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
