"""Collection on real captured machines, compared with what their projects say is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from noded.collect.model import Device, Inventory, Quality, Readings
from noded.collect.sweep import collect_inventory, collect_readings
from tests.acceptance.collect_dumps import (
    dump,
    hwloc_counts,
    roots_at,
    unpack_all,
    unpack_tar,
    unpack_ttar,
)

Machines = Callable[[str], Inventory]

# arm64, x86 and POWER; hybrid cores, sockets with odd numbers, offline threads, sparse nodes.
HWLOC_CPU_DUMPS = (
    "128arm-2pa2n8cluster4co",
    "20em64t-hybrid-1p6c2t+2ca4co1t",
    "32em64t-2n8c+dax+nvme+mic+dimms",
    "40intel64-2g2n4c+pcilocality",
    "48amd64-4pa2n6c-sparse",
    "96em64t-4no4pa3ca2co",
    "memorysidecaches",
    "nvidia-dgx-gb10",
    "nvidiagpunumanodes",
    "offline-cpu0-node0",
)


def of_kind(inventory: Inventory, kind: str) -> list[Device]:
    return [device for device in inventory.devices if device.kind == kind]


def value(readings: Readings, name: str) -> tuple[int | None, Quality]:
    sample = readings.get(name)
    assert sample is not None, f"{name} is not among {[s.name for s in readings.samples]}"
    return sample.value, sample.quality


@pytest.fixture(scope="module")
def hwloc(tmp_path_factory: pytest.TempPathFactory) -> Machines:
    """The inventory of a captured machine; unpacking one takes seconds, so each is read once."""

    @cache
    def read(name: str) -> Inventory:
        target = tmp_path_factory.mktemp("hwloc")
        return collect_inventory(roots_at(unpack_tar(dump(f"hwloc/{name}.tar.bz2"), target)))

    return read


@pytest.fixture(scope="module")
def procfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("procfs")
    unpack_ttar(dump("procfs_fixtures.ttar.xz"), target)
    return target / "fixtures"


@pytest.fixture(scope="module")
def node_exporter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("node_exporter")
    unpack_ttar(dump("node_exporter/sys.ttar.xz"), target)
    return target


@pytest.mark.parametrize("name", HWLOC_CPU_DUMPS)
def test_packages_cores_and_threads_are_what_hwloc_counts(name: str, hwloc: Machines) -> None:
    inventory = hwloc(name)
    packages = of_kind(inventory, "cpu")
    expected = hwloc_counts(name)
    assert {
        "Package": len(packages),
        "Core": sum(package.capacity["cores"] for package in packages),
        "PU": sum(package.capacity["threads"] for package in packages),
    } == {kind: expected[kind] for kind in ("Package", "Core", "PU")}
    assert inventory.cpu_millis == 1_000 * expected["PU"]
    assert all(package.attributes["productName"] for package in packages)


def test_offline_threads_are_not_offered(hwloc: Machines) -> None:
    """hwloc: "7 processors not represented in topology: 0x00e0000f"."""
    assert hwloc("offline-cpu0-node0").attributes["cpu_offline"] == "0-3,21-23"


def test_sparse_numa_nodes_keep_their_numbers(hwloc: Machines) -> None:
    inventory = hwloc("48amd64-4pa2n6c-sparse")
    assert [d.attributes["numaNode"] for d in of_kind(inventory, "memory")] == [0, 1, 2, 33, 34, 45, 72, 73]


def test_an_arm_package_is_named_by_implementer_and_part(hwloc: Machines) -> None:
    inventory = hwloc("128arm-2pa2n8cluster4co")
    assert [(d.key, d.name, d.attributes["numaNodes"]) for d in of_kind(inventory, "cpu")] == [
        ("cpu/package-36", "HiSilicon 0xd01", "0-1"),
        ("cpu/package-8442", "HiSilicon 0xd01", "2-3"),
    ]


def test_accelerator_memory_is_kept_out_of_the_hosts(hwloc: Machines) -> None:
    """hwloc: 252 GiB for the machine, while MemTotal says 341 GiB: six GPUs show their 15 GiB as NUMA nodes."""
    inventory = hwloc("nvidiagpunumanodes")
    assert inventory.memory_bytes is not None
    assert inventory.memory_bytes >> 30 in (251, 252)
    apart = [d for d in of_kind(inventory, "memory") if d.attributes["cpuless"]]
    assert [d.key for d in apart] == [f"memory/node-{n}" for n in range(250, 256)]
    assert len(of_kind(inventory, "accelerator")) == 6
    assert inventory.attributes["pci_accelerator_count"] == 6


def test_an_infiniband_interface_and_its_port_are_one_nic(hwloc: Machines) -> None:
    """hwloc's answer: mlx4_0 with node GUID 0002:c903:00f9:bfa0 and ib0 on one function; eth0, eth1 on others."""
    inventory = hwloc("32em64t-2n8c+dax+nvme+mic+dimms")
    nics = {d.key: d.attributes for d in of_kind(inventory, "nic")}
    assert set(nics) == {"nic/0002:c903:00f9:bfa0/1", "nic/84:8f:69:fe:cc:40", "nic/84:8f:69:fe:cc:41"}
    port = nics["nic/0002:c903:00f9:bfa0/1"]
    assert (port["rdma_device"], port["interface"], port["pciBusID"]) == ("mlx4_0", "ib0", "0000:82:00.0")
    assert (port["pcieRoot"], port["numaNode"]) == ("pci0000:80", 1)
    xml = dump("hwloc/32em64t-2n8c+dax+nvme+mic+dimms.xml").read_text()
    for key in set(nics) - {"nic/0002:c903:00f9:bfa0/1"}:
        assert key.removeprefix("nic/") in xml


def test_a_disk_of_known_size(hwloc: Machines) -> None:
    (disk,) = of_kind(hwloc("32em64t-2n8c+dax+nvme+mic+dimms"), "storage")
    xml = dump("hwloc/32em64t-2n8c+dax+nvme+mic+dimms.xml").read_text()
    size_kib = re.search(r'name="sda".*?name="Size" value="(\d+)KiB"', xml, re.DOTALL)
    assert size_kib is not None
    assert disk.capacity == {"capacity_bytes": int(size_kib[1]) * 1024}


def test_procfs_rdma_ports(procfs: Path) -> None:
    inventory = collect_inventory(roots_at(procfs))
    links = {
        link.key: (link.current_bytes_per_second, link.current_width_lanes, link.state) for link in inventory.links
    }
    assert links == {
        "link/nic/hfi1_0/1": (12_500_000_000, 4, "up"),
        "link/nic/mlx4_0/1": (5_000_000_000, 4, "up"),
        "link/nic/mlx4_0/2": (5_000_000_000, 4, "up"),
        "link/nic/0a7f:bc12:45ef:d23b/1": (3_125_000_000, 1, "up"),
        "link/nic/0000:00:1f.6/0": (125_000_000, None, "up"),
    }


def test_procfs_machine(procfs: Path) -> None:
    inventory = collect_inventory(roots_at(procfs))
    assert inventory.memory_bytes == 15_666_184 * 1024  # MemTotal of the fixture
    assert inventory.attributes["dmi_product_name"] == "PowerEdge R6515"
    assert inventory.attributes["cpu_model"] == "Intel(R) Core(TM) i7-8650U CPU @ 1.90GHz"
    readings = collect_readings(roots_at(procfs), 1)
    assert value(readings, "cpu/load") == (20, Quality.OK)  # 0.02
    assert value(readings, "memory/available") == (None, Quality.ABSENT)  # a kernel from before MemAvailable


def test_a_zone_below_what_can_be_true_is_implausible(procfs: Path) -> None:
    readings = collect_readings(roots_at(procfs), 1)
    assert value(readings, "temperature/thermal/bcm2835_thermal") == (49_925, Quality.OK)
    assert value(readings, "temperature/thermal/acpitz") == (None, Quality.IMPLAUSIBLE)  # -44 degrees
    assert value(readings, "collector/implausible") == (1, Quality.OK)


def test_a_counter_without_a_source_is_absent(node_exporter: Path) -> None:
    readings = collect_readings(roots_at(node_exporter), 1)
    assert value(readings, "rdma/mlx4_0/1/link_downed") == (0, Quality.OK)
    assert value(readings, "rdma/i40iw0/1/link_downed") == (None, Quality.ABSENT)


def test_node_exporter_sensors(node_exporter: Path) -> None:
    readings = collect_readings(roots_at(node_exporter), 1)
    core = "coretemp/coretemp.0"
    assert value(readings, f"temperature/{core}/Physical-id-0") == (55_000, Quality.OK)
    assert value(readings, f"temperature/{core}/Core-3") == (50_000, Quality.OK)
    assert value(readings, f"temperature_limit/{core}/Core-3") == (100_000, Quality.OK)
    assert value(readings, "temperature/coretemp/coretemp.1/Core-3") == (50_000, Quality.OK)
    assert value(readings, "temperature/thermal/cpu-thermal") == (12_376, Quality.OK)
    names = [sample.name for sample in readings.samples]
    assert len(names) == len(set(names))


def test_node_exporter_numa_memory(node_exporter: Path) -> None:
    inventory = collect_inventory(roots_at(node_exporter))
    assert [d.capacity["memory_bytes"] for d in of_kind(inventory, "memory")] == [
        137_402_716_160,
        137_438_953_472,
        137_438_953_472,
    ]
    assert inventory.memory_bytes is None  # there is no meminfo in that capture, and no guess


@pytest.mark.parametrize("case", ["general", "with_name", "with_device_tag"])
def test_telegraf_sensors_have_telegrafs_values(case: str, tmp_path: Path) -> None:
    unpack_all(dump("telegraf_inputs_testdata.tar.xz"), tmp_path)
    (tree,) = tmp_path.glob(f"**/temp/testcases/{case}")
    expected = sorted(
        round(float(number) * 1_000)
        for number in re.findall(r" temp=([-0-9.]+)", (tree / "expected_v2.out").read_text())
    )
    readings = collect_readings(roots_at(tree), 1)
    sensors = [s for s in readings.samples if s.name.startswith("temperature/")]
    assert sorted(s.value for s in sensors if s.value is not None) == expected
    # -273150 as the lower and 65261850 as the upper limit stand beside them, and are nobody's temperature
    assert all(s.quality is Quality.OK for s in sensors)
    limits = [s.value for s in readings.samples if s.name.startswith("temperature_limit/")]
    assert set(limits) == {84_850}


def test_the_same_tree_gives_the_same_inventory(procfs: Path) -> None:
    assert collect_inventory(roots_at(procfs)) == collect_inventory(roots_at(procfs))
