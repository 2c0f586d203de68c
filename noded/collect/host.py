"""What the host says of itself (boot id, kernel, DMI) and what its control group lets this process use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from noded.collect.files import decimal, read_text
from noded.collect.model import AttributeValue, Quality, Roots

# DMI is evidence for people: makers leave it blank, or give a whole series one serial number. Never an identity.
_DMI_FIELDS: Final = (
    "sys_vendor",
    "product_name",
    "product_serial",
    "product_uuid",
    "board_vendor",
    "board_name",
    "chassis_serial",
    "bios_version",
)
_DMI_PLACEHOLDERS: Final = frozenset(
    {
        "0123456789",
        "default string",
        "n/a",
        "none",
        "not applicable",
        "not specified",
        "system manufacturer",
        "system product name",
        "system serial number",
        "to be filled by o.e.m.",
        "unknown",
    }
)
_MILLIS: Final = 1_000


@dataclass(frozen=True, slots=True)
class HostInventory:
    boot_id: str
    attributes: Mapping[str, AttributeValue]
    dmi_quality: Quality


@dataclass(frozen=True, slots=True)
class Limits:
    """What the control group allows; None: no limit, or none that can be read."""

    cpu_millis: int | None
    memory_bytes: int | None


def read_host(roots: Roots) -> HostInventory:
    attributes: dict[str, AttributeValue] = {}
    release = read_text(f"{roots.procroot}/sys/kernel/osrelease").value
    if release is not None:
        attributes["kernel_release"] = release
    qualities: list[Quality] = []
    for name in _DMI_FIELDS:
        text = read_text(f"{roots.sysroot}/class/dmi/id/{name}")
        qualities.append(text.quality)
        if text.value is not None and text.value.casefold() not in _DMI_PLACEHOLDERS:
            attributes[f"dmi_{name}"] = text.value
    best = next((q for q in (Quality.OK, Quality.DENIED) if q in qualities), Quality.ABSENT)
    return HostInventory(read_boot_id(roots), attributes, best)


def read_boot_id(roots: Roots) -> str:
    """The kernel's identity of this boot; "" when it is not told."""
    return read_text(f"{roots.procroot}/sys/kernel/random/boot_id").value or ""


def read_limits(roots: Roots) -> Limits:
    """Limits of the root of this process's control group namespace (v2): in a container, the container's.

    On a bare host the root has no such files, and there is no limit.
    """
    base = f"{roots.sysroot}/fs/cgroup"
    cpu_millis: int | None = None
    words = (read_text(f"{base}/cpu.max").value or "").split(" ")
    quota, period = (decimal(words[0]), decimal(words[1])) if len(words) == 2 else (None, None)
    if quota is not None and period:
        cpu_millis = max(1, quota * _MILLIS // period)
    return Limits(cpu_millis, decimal(read_text(f"{base}/memory.max").value or ""))
