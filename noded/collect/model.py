"""What collection returns: frozen values. Quantities are integers in base units; unknown is None, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

AttributeValue = str | int | bool


class Quality(StrEnum):
    """Why a sample has its value, or none. Only OK and SATURATED carry one."""

    OK = "ok"
    ABSENT = "absent"  # the sensor, file or value is not there
    DENIED = "denied"  # it is there and may not be read
    IMPLAUSIBLE = "implausible"  # it was read and cannot be true
    STALE = "stale"  # it was true too long ago
    RESET = "reset"  # a counter went back: no difference can be given
    SATURATED = "saturated"  # a counter stands at its end: the value is a lower bound


class Unit(StrEnum):
    BYTES = "bytes"
    BYTES_PER_SECOND = "bytes_per_second"
    COUNT = "count"
    FLAG = "flag"  # 1 yes, 0 no
    MILLIDEGREES = "millidegrees_celsius"
    NANOSECONDS = "ns"
    THOUSANDTHS = "thousandths"
    TICKS = "ticks"  # USER_HZ, as in /proc/stat


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading. ``name`` is a path of stable parts (``temperature/coretemp.0/Core 3``); ``at_ns`` is monotonic."""

    name: str
    value: int | None
    unit: Unit
    quality: Quality
    at_ns: int

    def __post_init__(self) -> None:
        if (self.value is not None) != (self.quality in (Quality.OK, Quality.SATURATED)):
            raise ValueError(f"{self.name}: value {self.value} does not go with quality {self.quality}")


@dataclass(frozen=True, slots=True)
class Readings:
    """All samples of one sweep, sorted by name, each name once."""

    samples: tuple[Sample, ...]
    at_ns: int

    def get(self, name: str) -> Sample | None:
        return next((sample for sample in self.samples if sample.name == name), None)


@dataclass(frozen=True, slots=True)
class Device:
    """A thing that can be allotted. ``key``: serial, GUID or hardware address; else the place; an index never.

    ``attributes["identity"]`` says which: ``serial`` (goes with the thing) or ``location`` (another thing in the same
    place has the same key) or ``name`` (the kernel's name; nothing better was there).
    """

    key: str
    kind: str  # cpu, accelerator, nic, memory, storage
    name: str
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    capacity: Mapping[str, int] = field(default_factory=dict[str, int])
    vendor_id: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """A port of this host and what it is plugged into; ``end_b`` "" is not known. None: unknown, never 0."""

    key: str
    kind: str  # ethernet, infiniband, omni-path
    end_a: str
    end_b: str = ""
    current_bytes_per_second: int | None = None
    current_width_lanes: int | None = None
    state: str = "unknown"  # up, down, unknown


@dataclass(frozen=True, slots=True)
class Inventory:
    """``attributes``: of the node. ``sources``: how reading each went, so that "none" differs from "not read"."""

    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    sources: Mapping[str, Quality] = field(default_factory=dict[str, Quality])
    # What tasks may use: the machine, or the control group this process is in where that allows less. None: unknown.
    cpu_millis: int | None = None
    memory_bytes: int | None = None
    boot_id: str = ""


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the kernel's trees are; a captured tree is read exactly as the live one."""

    sysroot: str = "/sys"
    procroot: str = "/proc"
    devroot: str = "/dev"

    @property
    def live(self) -> bool:
        """Whether these are this machine's: only then may a mount point named in them be looked at."""
        return self.procroot == LIVE_PROCROOT


LIVE_PROCROOT: Final = "/proc"
