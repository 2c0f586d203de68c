"""Declared devices and devices that were read, as one inventory."""

from __future__ import annotations

import pytest

from noded.collect import model as read
from noded.core import messages as m
from noded.declared import Declared, declared_of, merged
from virialpb.layered import ConfigError
from virialpb.rdl import parse_document

DOCUMENT = parse_document(
    {
        "domains": [{"kind": "rack", "name": "rack-1"}],
        "nodes": [
            {
                "name": "n1",
                "domain": "rack-1",
                "labels": {"zone": "a"},
                "devices": [
                    {
                        "name": "gpu",
                        "resource_type": "accelerator",
                        "count": 2,
                        "memory": "80GiB",
                        "interconnect": {"protocol": "nvlink", "bandwidth": "900GB/s"},
                    },
                    {"name": "nic-0", "resource_type": "nic", "speed": "400Gb/s", "rail": 0},
                ],
            },
            {"name": "n2"},
        ],
        "links": [{"name": "rail-0", "kind": "infiniband", "ends": ["leaf-1", "n1/nic-0"], "speed": "400Gb/s"}],
    }
)


def test_a_count_becomes_as_many_devices_with_keys_of_their_own() -> None:
    declared = declared_of(DOCUMENT, "n1", "x.yaml")
    assert [(device.key, device.kind) for device in declared.devices] == [
        ("gpu-0", "accelerator"),
        ("gpu-1", "accelerator"),
        ("nic-0", "nic"),
    ]
    gpu = declared.devices[0]
    assert gpu.capacity == (("memory_bytes", 80 << 30),)
    assert gpu.attribute("identity") == "declared"
    assert (gpu.interconnect_protocol, gpu.interconnect_bandwidth_bytes_per_second) == ("nvlink", 900 * 10**9)
    assert declared.labels == (("zone", "a"),)
    assert declared.domains == (m.Domain("rack", "rack-1", ""), m.Domain("node", "n1", "rack-1"))


def test_a_link_is_seen_from_this_node() -> None:
    (link,) = declared_of(DOCUMENT, "n1", "x.yaml").links
    assert (link.end_a, link.end_b, link.expected_bytes_per_second) == ("nic-0", "leaf-1", 50 * 10**9)
    assert declared_of(DOCUMENT, "n2", "x.yaml").links == ()


def test_a_document_of_other_nodes_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        declared_of(DOCUMENT, "n3", "x.yaml")
    assert caught.value.errors == ["rdl: x.yaml declares no node 'n3'; it has n1, n2"]


def test_a_document_without_nodes_speaks_of_this_one() -> None:
    document = parse_document({"resource_type": "accelerator", "name": "npu", "vendor_id": "acme"})
    assert [device.key for device in declared_of(document, "n1", "x").devices] == ["npu"]


def test_what_was_read_is_kept_and_what_was_declared_of_it_added() -> None:
    found = read.Inventory(
        devices=(
            read.Device("nic/aa:bb", "nic", "eth0"),
            read.Device("gpu-0", "accelerator", "0000:01:00.0", {"uuid": "GPU-a"}, {"memory_bytes": 1}, "10de"),
        ),
        links=(read.Link("link/aa:bb", "ethernet", "nic/aa:bb", state="up"),),
        attributes={"cpu_model": "x"},
    )
    inventory = merged(found, declared_of(DOCUMENT, "n1", "x"))
    assert [device.key for device in inventory.devices] == ["gpu-0", "gpu-1", "nic-0", "nic/aa:bb"]
    gpu = inventory.devices[0]
    assert gpu.attribute("uuid") == "GPU-a"
    assert (gpu.vendor_id, gpu.capacity) == ("10de", (("memory_bytes", 80 << 30),))
    assert [link.key for link in inventory.links] == ["link/aa:bb", "rail-0"]
    assert inventory.links[0].current_bytes_per_second is None
    assert inventory.attributes == (("cpu_model", "x"),)


def test_nothing_declared_changes_nothing() -> None:
    found = read.Inventory(devices=(read.Device("nic/aa:bb", "nic", "eth0"),))
    assert merged(found, Declared()).devices == (m.Device("nic/aa:bb", "nic", "eth0"),)
