"""RDL: what is declared is read exactly, and every mistake is named with its path and the nearest right thing."""

from __future__ import annotations

from typing import Any

import pytest

from virialpb.rdl import RdlError, parse_device, parse_document
from virialpb.rdl_model import (
    DeviceDecl,
    DeviceKind,
    Document,
    DomainDecl,
    DomainKind,
    InterconnectDecl,
    LinkDecl,
    NodeDecl,
    RedundancyGroupDecl,
    ThermalDecl,
)

MISSION_EXAMPLE: dict[str, Any] = {
    "resource_type": "accelerator",
    "vendor_id": "generic",
    "compute_units": 128,
    "memory_bandwidth": "1.2TB/s",
    "interconnect": {"protocol": "supernode-link-v2", "max_latency": "150ns"},
}


def complaints(data: object) -> list[str]:
    with pytest.raises(RdlError) as caught:
        parse_document(data)
    return [str(error) for error in caught.value.errors]


def accelerator(**more: object) -> dict[str, Any]:
    return {"resource_type": "accelerator", **more}


def test_the_accelerator_example_parses_exactly() -> None:
    expected = DeviceDecl(
        resource_type=DeviceKind.ACCELERATOR,
        vendor_id="generic",
        compute_units=128,
        memory_bandwidth_bytes_per_second=1_200_000_000_000,
        interconnect=InterconnectDecl(protocol="supernode-link-v2", max_latency_ns=150),
    )
    assert parse_document(MISSION_EXAMPLE) == Document(devices=(expected,))
    assert parse_device(MISSION_EXAMPLE) == expected


def test_a_whole_document() -> None:
    document = parse_document(
        {
            "domains": [
                {"kind": "row", "name": "row-1"},
                {
                    "kind": "rack",
                    "name": "rack-1",
                    "parent": "row-1",
                    "failure_domain": True,
                    "power_budget": "120kW",
                },
            ],
            "nodes": [
                {
                    "name": "host-1",
                    "domain": "rack-1",
                    "canary_suite": "burn-in",
                    "labels": {"pool": "a"},
                    "devices": [
                        accelerator(
                            name="gpu",
                            count=8,
                            memory="80GiB",
                            numa_node=0,
                            thermal={"slowdown_offset": "5C"},
                            thresholds={"crc_errors": 100, "hot_time_ns": "30s"},
                            attributes={
                                "productName": "X",
                                "vendor.example/mig": True,
                                "scratch_bytes": "1KiB",
                                "numaNode": 0,
                            },
                        ),
                        {"resource_type": "nic", "name": "ib0", "speed": "400Gb/s", "role": "compute", "rail": 0},
                    ],
                }
            ],
            "redundancy_groups": [{"name": "rails", "minimum_members": 1}],
            "links": [
                {
                    "name": "rail-0",
                    "kind": "infiniband",
                    "ends": ["host-1/ib0", "leaf-1"],
                    "speed": "400Gb/s",
                    "width_lanes": 4,
                    "rail": "0",
                    "redundancy_group": "rails",
                },
                {"name": "rail-1", "kind": "infiniband", "ends": ["host-1", "leaf-2"], "inactive_by_design": True},
            ],
        }
    )
    assert document == Document(
        domains=(
            DomainDecl(DomainKind.ROW, "row-1"),
            DomainDecl(DomainKind.RACK, "rack-1", "row-1", failure_domain=True, power_budget_milliwatts=120_000_000),
        ),
        nodes=(
            NodeDecl(
                name="host-1",
                domain="rack-1",
                canary_suite="burn-in",
                labels=(("pool", "a"),),
                devices=(
                    DeviceDecl(
                        DeviceKind.ACCELERATOR,
                        name="gpu",
                        count=8,
                        memory_bytes=80 * 2**30,
                        numa_node=0,
                        thermal=ThermalDecl(slowdown_offset_millidegrees=5_000),
                        thresholds=(("crc_errors", 100), ("hot_time_ns", 30_000_000_000)),
                        attributes=(
                            ("numaNode", 0),
                            ("productName", "X"),
                            ("scratch_bytes", 1024),
                            ("vendor.example/mig", True),
                        ),
                    ),
                    DeviceDecl(
                        DeviceKind.NIC,
                        name="ib0",
                        speed_bytes_per_second=50_000_000_000,
                        role=document.nodes[0].devices[1].role,
                        rail="0",
                    ),
                ),
            ),
        ),
        redundancy_groups=(RedundancyGroupDecl("rails", 1),),
        links=(
            LinkDecl(
                "rail-0",
                "infiniband",
                ("host-1/ib0", "leaf-1"),
                rail="0",
                expected_bytes_per_second=50_000_000_000,
                expected_width_lanes=4,
                redundancy_group="rails",
            ),
            LinkDecl("rail-1", "infiniband", ("host-1", "leaf-2"), inactive_by_design=True),
        ),
    )
    assert document.nodes[0].devices[1].role == "compute"


def test_all_mistakes_are_reported_each_with_its_path() -> None:
    data = {
        "devices": [
            accelerator(),
            accelerator(memory_bandwith="1TB/s"),
            accelerator(interconnect={"protocol": "x", "max_latency": "150nss"}, memory="80Gi"),
            {"resource_type": "acelerator"},
            7,
        ],
        "linkz": [],
    }
    assert complaints(data) == [
        "devices[4]: expected a mapping, got the number 7",
        "devices[1].memory_bandwith: unknown field: did you mean 'memory_bandwidth'?",
        "devices[2].memory: unknown unit 'Gi' in '80Gi': did you mean 'GiB'?",
        "devices[2].interconnect.max_latency: unknown unit 'nss' in '150nss': did you mean 'ns'?",
        "devices[3].resource_type: unknown value 'acelerator': did you mean 'accelerator'?",
        "linkz: unknown field: did you mean 'links'?",
    ]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (None, "expected an RDL document (a mapping), got nothing"),
        ([], "expected an RDL document (a mapping), got a list"),
        ({5: 1}, "the key 5 is the number 5, not a text; put it in quotes"),
        (accelerator(compute_units="many"), "compute_units: 'many' is not a count; write a number as in '8'"),
        (accelerator(interconnect="fast"), "interconnect: expected a mapping, got the text 'fast'"),
        (accelerator(interconnect={}), "interconnect.protocol: required field is missing"),
        (accelerator(vendor_id=7), "vendor_id: expected a text, got the number 7: did you mean '\"7\"'?"),
        (accelerator(vendor_id="a\x1b[2J"), "vendor_id: contains a control character"),
        (accelerator(numa_node=-1), "numa_node: -1 is outside 0 to 1023"),
        (
            accelerator(attributes={"pciBusId": "x"}),
            "attributes.pciBusId: unknown spelling of a standard attribute: did you mean 'pciBusID'?",
        ),
        (accelerator(attributes={"a": 10**400}), "attributes.a: beyond 64 bits is outside"),
        (accelerator(attributes={"a b": 1}), 'attributes["a b"]: is not an attribute name'),
        (
            accelerator(attributes={"a": [1]}),
            "attributes.a: expected a text, a whole number, true or false, got a list",
        ),
        ({"devices": {}}, "devices: expected a list, got a mapping"),
        ({"nodes": [{"name": "Host_1"}]}, "nodes[0].name: 'Host_1' is not a name"),
        ({"nodes": [{"name": "a"}, {"name": "a"}]}, "nodes[1].name: 'a' is already nodes[0]"),
        (
            {"nodes": [{"name": "a", "domain": "rack-2"}], "domains": [{"kind": "rack", "name": "rack-1"}]},
            "nodes[0].domain: no domain 'rack-2': did you mean 'rack-1'?",
        ),
        (
            {"domains": [{"kind": "rack", "name": "a", "parent": "a"}]},
            "domains[0].parent: 'a' is its own ancestor",
        ),
        (
            {"domains": [{"kind": "row", "name": "a", "parent": "b"}, {"kind": "rack", "name": "b"}]},
            "domains[0].parent: a rack ('b') cannot hold a row",
        ),
        ({"links": [{"name": "l", "kind": "x", "ends": ["a"]}]}, "links[0].ends: a link has two ends"),
        (
            {
                "nodes": [{"name": "a", "devices": [accelerator(name="gpu")]}],
                "links": [{"name": "l", "kind": "x", "ends": ["a/gpv", "leaf"]}],
            },
            "links[0].ends[0]: node 'a' has no device 'gpv': did you mean 'gpu'?",
        ),
        (
            {
                "redundancy_groups": [{"name": "g", "minimum_members": 2}],
                "links": [{"name": "l", "kind": "x", "ends": ["a", "b"], "redundancy_group": "g"}],
            },
            "redundancy_groups[0].minimum_members: 2 members needed, but 1 active links are in 'g'",
        ),
    ],
)
def test_one_clear_message(data: object, complaint: str) -> None:
    (only,) = complaints(data)
    assert only.startswith(complaint)


def test_errors_are_bounded() -> None:
    assert len(complaints({f"k{index}": 1 for index in range(10_000)})) == 100


def test_null_declares_nothing() -> None:
    assert parse_device(accelerator(memory=None)) == parse_device(accelerator())
