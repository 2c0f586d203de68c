"""RDL, the resource description language: what a cluster is declared to have. Standard library only.

``parse_document`` reads one plain mapping, as a YAML or JSON loader gives it, into the frozen values of
``virialpb.rdl_model``, in base units. A document is either one device (a mapping with ``resource_type``) or::

    domains: [{kind: rack, name: rack-1, parent: row-1, failure_domain: true, power_budget: 120kW}]
    nodes:
      - name: host-1
        domain: rack-1
        devices: [{name: gpu, resource_type: accelerator, count: 8, memory: 80GiB}]
    devices: [...]                # of no node: what any node's device of that name is expected to be
    redundancy_groups: [{name: host-1-rails, minimum_members: 1}]
    links: [{name: rail-0, kind: infiniband, ends: [host-1/ib0, leaf-1], speed: 400Gb/s}]

What is declared is what is expected: counts, speeds and widths here are the right values that readings are judged by.
A field that is absent declares nothing (None, or an empty text), which is not the same as declaring zero.
All mistakes of a document are reported at once, in ``RdlError.errors``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final, TypeVar

from virialpb.rdl_check import check_references
from virialpb.rdl_model import (
    Attributes,
    AttributeValue,
    DeviceDecl,
    DeviceKind,
    Document,
    DomainDecl,
    DomainKind,
    InterconnectDecl,
    LinkDecl,
    MemoryTier,
    NicRole,
    NodeDecl,
    RedundancyGroupDecl,
    ThermalDecl,
)
from virialpb.strict import (
    ErrorList,
    FieldProblem,
    Fields,
    StrictError,
    boolean,
    integer,
    kind_of,
    name_text,
    one_of,
    shown,
    text,
)
from virialpb.units import (
    parse_bytes,
    parse_bytes_per_second,
    parse_count,
    parse_duration_ns,
    parse_power_milliwatts,
    parse_temperature_millidegrees,
)

E = TypeVar("E", bound=StrEnum)

# Attribute names that Kubernetes DRA drivers already use; a near miss of one would silently match nothing.
DRA_ATTRIBUTES: Final = ("uuid", "pciBusID", "pcieRoot", "numaNode", "productName", "driverVersion")
# A DRA qualified name: an optional DNS domain of at most 63, then a C identifier of at most 32 characters.
_ATTRIBUTE_NAME = re.compile(r"(?:[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?/)?[A-Za-z_][A-Za-z0-9_]{0,31}")
_LABEL_KEY = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_./-]{0,251}[A-Za-z0-9])?")

# An attribute whose name ends in a base unit may be written as a quantity: `scratch_bytes: 80GiB`.
_QUANTITY_SUFFIXES: Final[tuple[tuple[str, Callable[[object], int]], ...]] = (
    ("_bytes_per_second", lambda value: parse_bytes_per_second(value, allow_zero=True)),
    ("_bytes", lambda value: parse_bytes(value, allow_zero=True)),
    ("_ns", lambda value: parse_duration_ns(value, allow_zero=True)),
    ("_milliwatts", lambda value: parse_power_milliwatts(value, allow_zero=True)),
    ("_millidegrees", parse_temperature_millidegrees),
)

_MAX_NUMA_NODE: Final = 1_023  # the kernel's MAX_NUMNODES at its largest
_MAX_LANES: Final = 1_024
_MAX_LINK_INDEX: Final = 1_023


class RdlError(StrictError):
    """A document that is not right RDL; ``errors`` names each field."""


def parse_document(data: object) -> Document:
    """The declarations of one document. Raises RdlError with every mistake in it."""
    errors = ErrorList()
    with Fields(data, "", errors, what="an RDL document (a mapping)") as fields:
        if fields.has("resource_type"):
            document = Document(devices=(_device(fields),))
        else:
            document = Document(
                nodes=tuple(map(_node, fields.children("nodes"))),
                devices=tuple(map(_closed_device, fields.children("devices"))),
                links=tuple(map(_link, fields.children("links"))),
                domains=tuple(map(_domain, fields.children("domains"))),
                redundancy_groups=tuple(map(_redundancy_group, fields.children("redundancy_groups"))),
            )
    if not errors:
        check_references(document, errors)
    errors.raise_if_any(RdlError)
    return document


def parse_device(data: object) -> DeviceDecl:
    """One device declaration. Raises RdlError with every mistake in it."""
    errors = ErrorList()
    device = _closed_device(Fields(data, "", errors, what="a device (a mapping)"))
    errors.raise_if_any(RdlError)
    return device


def _closed_device(fields: Fields) -> DeviceDecl:
    with fields:
        return _device(fields)


def _device(fields: Fields) -> DeviceDecl:
    optional = fields.optional
    return DeviceDecl(
        resource_type=fields.required("resource_type", _member(DeviceKind), on_error=DeviceKind.ACCELERATOR),
        name=optional("name", name_text, default=""),
        vendor_id=optional("vendor_id", text, default=""),
        count=optional("count", parse_count, default=1),
        compute_units=optional("compute_units", parse_count, default=None),
        memory_bytes=optional("memory", parse_bytes, default=None),
        memory_bandwidth_bytes_per_second=optional("memory_bandwidth", parse_bytes_per_second, default=None),
        memory_tier=optional("memory_tier", _member(MemoryTier), default=None),
        capacity_bytes=optional("capacity", parse_bytes, default=None),
        speed_bytes_per_second=optional("speed", parse_bytes_per_second, default=None),
        power_limit_milliwatts=optional("power_limit", parse_power_milliwatts, default=None),
        numa_node=optional("numa_node", integer(0, _MAX_NUMA_NODE), default=None),
        role=optional("role", _member(NicRole), default=None),
        rail=optional("rail", _rail, default=""),
        interconnect=_interconnect(fields),
        thermal=_thermal(fields),
        thresholds=_thresholds(fields),
        attributes=_attributes(fields),
    )


def _interconnect(fields: Fields) -> InterconnectDecl | None:
    present = fields.has("interconnect")
    with fields.child("interconnect") as inner:
        if not present:
            return None
        return InterconnectDecl(
            protocol=inner.required("protocol", text, on_error=""),
            max_latency_ns=inner.optional("max_latency", parse_duration_ns, default=None),
            bandwidth_bytes_per_second=inner.optional("bandwidth", parse_bytes_per_second, default=None),
            link_count=inner.optional("link_count", parse_count, default=None),
            inactive_links=inner.values("inactive_links", integer(0, _MAX_LINK_INDEX)),
            width_lanes=inner.optional("width_lanes", integer(1, _MAX_LANES), default=None),
        )


def _thermal(fields: Fields) -> ThermalDecl | None:
    present = fields.has("thermal")
    with fields.child("thermal") as inner:
        if not present:
            return None
        return ThermalDecl(
            slowdown_offset_millidegrees=inner.optional(
                "slowdown_offset", parse_temperature_millidegrees, default=None
            ),
            maximum_millidegrees=inner.optional("maximum", parse_temperature_millidegrees, default=None),
        )


def _thresholds(fields: Fields) -> tuple[tuple[str, int], ...]:
    read = fields.errors.read
    found = [
        (read(path, key, _attribute_name, key), read(path, value, _whole_or_quantity(key), 0))
        for key, path, value in fields.entries("thresholds")
    ]
    return tuple(sorted(found))


def _link(fields: Fields) -> LinkDecl:
    with fields:
        ends = fields.values("ends", text)
        if len(ends) == 2:
            pair = (ends[0], ends[1])
        else:
            pair = ("", "")
            fields.error("ends", f"a link has two ends, as in [host-1/nic-0, leaf-1]; {len(ends)} given")
        return LinkDecl(
            name=fields.required("name", name_text, on_error=""),
            kind=fields.required("kind", name_text, on_error=""),
            ends=pair,
            rail=fields.optional("rail", _rail, default=""),
            expected_bytes_per_second=fields.optional("speed", parse_bytes_per_second, default=None),
            expected_width_lanes=fields.optional("width_lanes", integer(1, _MAX_LANES), default=None),
            max_latency_ns=fields.optional("max_latency", parse_duration_ns, default=None),
            inactive_by_design=fields.optional("inactive_by_design", boolean, default=False),
            redundancy_group=fields.optional("redundancy_group", name_text, default=""),
            attributes=_attributes(fields),
        )


def _redundancy_group(fields: Fields) -> RedundancyGroupDecl:
    with fields:
        return RedundancyGroupDecl(
            name=fields.required("name", name_text, on_error=""),
            minimum_members=fields.required("minimum_members", parse_count, on_error=1),
        )


def _domain(fields: Fields) -> DomainDecl:
    with fields:
        return DomainDecl(
            kind=fields.required("kind", _member(DomainKind), on_error=DomainKind.NODE),
            name=fields.required("name", name_text, on_error=""),
            parent=fields.optional("parent", name_text, default=""),
            failure_domain=fields.optional("failure_domain", boolean, default=False),
            power_budget_milliwatts=fields.optional("power_budget", parse_power_milliwatts, default=None),
            attributes=_attributes(fields),
        )


def _node(fields: Fields) -> NodeDecl:
    with fields:
        read = fields.errors.read
        labels = [
            (read(path, key, _label_key, key), read(path, value, text, ""))
            for key, path, value in fields.entries("labels")
        ]
        return NodeDecl(
            name=fields.required("name", name_text, on_error=""),
            domain=fields.optional("domain", name_text, default=""),
            canary_suite=fields.optional("canary_suite", name_text, default=""),
            labels=tuple(sorted(labels)),
            devices=tuple(map(_closed_device, fields.children("devices"))),
            attributes=_attributes(fields),
        )


def _attributes(fields: Fields) -> Attributes:
    read = fields.errors.read
    found: list[tuple[str, AttributeValue]] = []
    for key, path, value in fields.entries("attributes"):
        name = read(path, key, _attribute_name, key)
        found.append((name, read(path, value, _attribute_value(name), "")))
    return tuple(sorted(found, key=lambda entry: entry[0]))


def _attribute_value(name: str) -> Callable[[object], AttributeValue]:
    quantity = _quantity_parser(name)

    def parse(value: object) -> AttributeValue:
        if isinstance(value, bool):
            return value
        if isinstance(value, int):
            return integer()(value)
        if isinstance(value, str):
            return text(value) if quantity is None else quantity(value)
        hint = f'"{shown(value)}"' if isinstance(value, float) else None
        raise FieldProblem(f"expected a text, a whole number, true or false, got {kind_of(value)}", hint)

    return parse


def _whole_or_quantity(name: str) -> Callable[[object], int]:
    quantity = _quantity_parser(name)
    whole = integer()
    return lambda value: whole(value) if quantity is None or isinstance(value, int) else quantity(value)


def _quantity_parser(name: str) -> Callable[[object], int] | None:
    return next((parse for suffix, parse in _QUANTITY_SUFFIXES if name.endswith(suffix)), None)


def _attribute_name(value: object) -> str:
    name = text(value)
    if not _ATTRIBUTE_NAME.fullmatch(name):
        raise FieldProblem(
            "is not an attribute name: letters, digits and '_' (at most 32, not starting with a digit), "
            "with 'domain/' before it if it is a vendor's"
        )
    folded = name.replace("_", "").casefold()
    for known in DRA_ATTRIBUTES:
        if name != known and folded == known.casefold():
            raise FieldProblem("unknown spelling of a standard attribute", known)
    return name


def _label_key(value: object) -> str:
    key = text(value)
    if not _LABEL_KEY.fullmatch(key):
        raise FieldProblem("is not a label key: letters, digits, '_', '.', '/' and '-', at most 253")
    return key


def _rail(value: object) -> str:
    """Rails are named; a number is the commonest name and needs no quotes."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10_000 else text(value)


def _member(kinds: Iterable[E]) -> Callable[[object], E]:
    members = {kind.value: kind for kind in kinds}
    choose = one_of(members)
    return lambda value: members[choose(value)]
