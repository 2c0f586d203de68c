"""PCI functions: where a device sits, and how many accelerators the bus shows."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from noded.collect.files import directory_quality, link_target, list_names, read_int, read_text
from noded.collect.model import AttributeValue, Device, Quality, Roots

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_HEX = re.compile(r"0x[0-9a-fA-F]{1,8}")

# PCI base class and subclass: VGA, 3D controller, processing accelerator.
_CLASS_VGA: Final = 0x0300
_CLASS_3D: Final = 0x0302
_CLASS_ACCELERATOR: Final = 0x1200
_ACCELERATOR_CLASSES: Final = frozenset({_CLASS_VGA, _CLASS_3D, _CLASS_ACCELERATOR})

# Makers whose VGA functions are a management controller's or a hypervisor's screen, not something to compute on.
_SCREEN_ONLY_VENDORS: Final = frozenset(
    {
        0x1013,  # Cirrus Logic
        0x102B,  # Matrox
        0x1234,  # QEMU
        0x1414,  # Microsoft Hyper-V
        0x15AD,  # VMware
        0x19E5,  # Huawei iBMC (its accelerators are class 0x1200)
        0x1A03,  # ASPEED
        0x1AF4,  # virtio
        0x1B36,  # QXL
    }
)


@dataclass(frozen=True, slots=True)
class PciInventory:
    accelerators: tuple[Device, ...]
    quality: Quality


def read_pci(roots: Roots) -> PciInventory:
    """The accelerators the bus shows, by place. Vendor tools give them their UUIDs; the bus knows none.

    Virtual functions are left out: they are parts of a function that is counted.
    """
    base = f"{roots.sysroot}/bus/pci/devices"
    found: list[Device] = []
    for address in list_names(base):
        path = f"{base}/{address}"
        code, vendor = read_hex(f"{path}/class"), read_hex(f"{path}/vendor")
        if code is None or code >> 8 not in _ACCELERATOR_CLASSES or os.path.lexists(f"{path}/physfn"):
            continue
        if code >> 8 == _CLASS_VGA and vendor in _SCREEN_ONLY_VENDORS:
            continue
        attributes = dict(place(path))
        attributes["pciBusID"] = address
        attributes["pci_class"] = f"0x{code >> 8:04x}"
        attributes["identity"] = "location"
        product = read_text(f"{path}/device").value
        if product is not None:
            attributes["pci_device"] = product
        width = read_int(f"{path}/max_link_width").value
        if width is not None and 0 < width <= 32:  # 0 and 255 are how the kernel says it does not know
            attributes["pcie_width_lanes_max"] = width
        vendor_id = f"{vendor:04x}" if vendor is not None else ""
        found.append(Device(f"pci/{address}", "accelerator", address, attributes, vendor_id=vendor_id))
    return PciInventory(tuple(found), directory_quality(base))


def place(device_path: str) -> Mapping[str, AttributeValue]:
    """pciBusID, pcieRoot, numaNode and driver of a sysfs device (or of the PCI function it is on), as far as told."""
    attributes: dict[str, AttributeValue] = {}
    parts = os.path.realpath(device_path).split("/")
    addresses = [part for part in parts if _ADDRESS.fullmatch(part)]
    if addresses:
        attributes["pciBusID"] = addresses[-1]
    root = next((part for part in parts if _ROOT.fullmatch(part)), None)
    if root is not None:
        attributes["pcieRoot"] = root
    driver = link_target(f"{device_path}/driver")
    if driver:
        attributes["driver"] = driver
    node = read_int(f"{device_path}/numa_node").value
    if node is not None and node >= 0:  # -1: the firmware does not say
        attributes["numaNode"] = node
    return attributes


def read_hex(path: str) -> int | None:
    text = read_text(path).value
    return int(text, 16) if text is not None and _HEX.fullmatch(text) else None
