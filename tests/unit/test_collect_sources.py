"""Each source on small trees of our own making: the odd answers that kernels and drivers give."""

from __future__ import annotations

from pathlib import Path

import pytest

from noded.collect.cpu import read_cpu_usage, read_cpus
from noded.collect.disks import read_disks, read_file_systems
from noded.collect.files import Number
from noded.collect.host import Limits, read_host, read_limits
from noded.collect.memory import read_memory
from noded.collect.model import Link, Quality, Roots
from noded.collect.nics import read_link_states, read_nics, speed_bytes_per_second
from noded.collect.pci import read_pci
from noded.collect.rdma import parse_rate, port_state, read_rdma_counters
from noded.collect.sweep import collect_inventory, collect_readings
from noded.collect.temperatures import read_temperatures

PCI = "sys/devices/pci0000:00"


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return Roots(f"{tmp_path}/sys", f"{tmp_path}/proc", f"{tmp_path}/dev")


def write(tmp_path: Path, **files: str | int) -> None:
    """`write(tmp, **{"sys/a/b": 1})`: one file each."""
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def link(tmp_path: Path, name: str, target: str) -> None:
    """A symbolic link at `name` to `target`, both from the root of the tree."""
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path / target)


def nic(tmp_path: Path, name: str, bus_address: str, **files: str | int) -> None:
    device = f"{PCI}/{bus_address}"
    write(tmp_path, **{f"{device}/net/{name}/{file}": content for file, content in files.items()})
    link(tmp_path, f"sys/class/net/{name}", f"{device}/net/{name}")
    link(tmp_path, f"{device}/net/{name}/device", device)


def test_nothing_at_all_is_an_empty_inventory_that_says_so(roots: Roots) -> None:
    inventory = collect_inventory(roots)
    assert inventory.devices == ()
    assert inventory.links == ()
    assert set(inventory.sources.values()) == {Quality.ABSENT}
    assert (inventory.cpu_millis, inventory.memory_bytes, inventory.boot_id) == (None, None, "")


def test_nothing_at_all_reads_as_unknown_not_as_zero(roots: Roots) -> None:
    readings = collect_readings(roots, 5)
    counts = {sample.name: sample.value for sample in readings.samples if sample.value is not None}
    assert counts == {"collector/implausible": 0}


def test_threads_share_cores_and_cores_repeat_over_packages(tmp_path: Path, roots: Roots) -> None:
    for cpu, (package, core, siblings) in enumerate([(0, 0, "0-1"), (0, 0, "0-1"), (1, 0, "2-3"), (1, 0, "2-3")]):
        base = f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(
            tmp_path,
            **{
                f"{base}/physical_package_id": package,
                f"{base}/core_id": core,
                f"{base}/thread_siblings_list": siblings,
            },
        )
    write(tmp_path, **{"sys/devices/system/cpu/online": "0-3", "sys/devices/system/cpu/present": "0-5"})
    write(tmp_path, **{"sys/devices/system/node/online": "0", "sys/devices/system/node/node0/cpulist": "0-3"})
    cpus = read_cpus(roots)
    assert [(d.key, dict(d.capacity), d.attributes["numaNode"]) for d in cpus.devices] == [
        ("cpu/package-0", {"cores": 1, "threads": 2, "cpu_millis": 2_000}, 0),
        ("cpu/package-1", {"cores": 1, "threads": 2, "cpu_millis": 2_000}, 0),
    ]
    assert cpus.attributes == {"cpu_offline": "4-5"}
    assert cpus.threads_online == 4


def test_cpuinfo_alone_will_do(tmp_path: Path, roots: Roots) -> None:
    entry = "processor\t: {n}\nvendor_id\t: GenuineIntel\nmodel name\t: X\nphysical id\t: 0\ncore id\t: {core}\n"
    write(tmp_path, **{"proc/cpuinfo": "\n".join(entry.format(n=n, core=n // 2) for n in range(4))})
    (package,) = read_cpus(roots).devices
    assert package.capacity == {"cores": 2, "threads": 4, "cpu_millis": 4_000}
    assert (package.name, package.vendor_id) == ("X", "GenuineIntel")


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"cpu.max": "150000 100000", "memory.max": "1048576"}, Limits(1_500, 1_048_576)),
        ({"cpu.max": "max 100000", "memory.max": "max"}, Limits(None, None)),
        ({"cpu.max": "1 100000"}, Limits(1, None)),
        ({"cpu.max": "100000 0"}, Limits(None, None)),
        ({}, Limits(None, None)),
    ],
)
def test_control_group_limits(tmp_path: Path, roots: Roots, limits: dict[str, str], expected: Limits) -> None:
    write(tmp_path, **{f"sys/fs/cgroup/{name}": content for name, content in limits.items()})
    assert read_limits(roots) == expected


def test_the_stricter_of_machine_and_control_group_counts(tmp_path: Path, roots: Roots) -> None:
    write(
        tmp_path,
        **{
            "proc/meminfo": "MemTotal:       1024 kB\nMemAvailable:    512 kB",
            "sys/fs/cgroup/memory.max": 2**19,
            "sys/fs/cgroup/cpu.max": "50000 100000",
        },
    )
    inventory = collect_inventory(roots)
    assert inventory.memory_bytes == 2**19
    assert inventory.cpu_millis is None  # a limit does not tell how many threads there are


def test_memory_of_an_accelerator_is_not_the_hosts(tmp_path: Path, roots: Roots) -> None:
    base = "sys/devices/system/node"
    write(tmp_path, **{"proc/meminfo": "MemTotal:       3072 kB", f"{base}/online": "0,8"})
    write(tmp_path, **{f"{base}/node0/cpulist": "0-3", f"{base}/node0/meminfo": "Node 0 MemTotal:       1024 kB"})
    write(tmp_path, **{f"{base}/node8/cpulist": "", f"{base}/node8/meminfo": "Node 8 MemTotal:       2048 kB"})
    write(tmp_path, **{f"{base}/node0/hugepages/hugepages-2048kB/nr_hugepages": 3})
    memory = read_memory(roots)
    assert memory.total_bytes == 2**20
    assert [(d.key, d.attributes["cpuless"], dict(d.capacity)) for d in memory.devices] == [
        ("memory/node-0", False, {"memory_bytes": 2**20, "hugepages_2048kib_bytes": 3 * 2**21}),
        ("memory/node-8", True, {"memory_bytes": 2**21}),
    ]


def test_guest_time_is_not_counted_twice(tmp_path: Path, roots: Roots) -> None:
    write(
        tmp_path, **{"proc/stat": "cpu  10 20 30 400 50 6 7 8 9 10\ncpu0 1 1 1 1", "proc/loadavg": "0.07 0.1 0.2 1/2 3"}
    )
    values = {sample.name: sample.value for sample in read_cpu_usage(roots, 1)}
    assert values == {"cpu/busy": 81, "cpu/total": 531, "cpu/load": 70}


@pytest.mark.parametrize(
    ("mbit", "expected"),
    [
        (Number(1_000, Quality.OK), Number(125_000_000, Quality.OK)),
        (Number(400_000, Quality.OK), Number(50_000_000_000, Quality.OK)),
        (Number(-1, Quality.OK), Number(None, Quality.ABSENT)),
        (Number(0, Quality.OK), Number(None, Quality.ABSENT)),
        (Number(4_294_967_295, Quality.OK), Number(None, Quality.ABSENT)),
        (Number(65_535, Quality.OK), Number(None, Quality.ABSENT)),
        (Number(10_000_000, Quality.OK), Number(None, Quality.IMPLAUSIBLE)),
        (Number(-7, Quality.OK), Number(None, Quality.IMPLAUSIBLE)),
        (Number(None, Quality.ABSENT), Number(None, Quality.ABSENT)),  # EINVAL while the interface is down
    ],
)
def test_an_unknown_speed_is_unknown(mbit: Number, expected: Number) -> None:
    assert speed_bytes_per_second(mbit) == expected


def test_interfaces_and_their_links(tmp_path: Path, roots: Roots) -> None:
    up = {"address": "02:00:00:00:00:01", "addr_assign_type": 0, "carrier": 1, "operstate": "up", "speed": 25_000}
    nic(tmp_path, "eth0", "0000:00:01.0", **up)
    nic(tmp_path, "eth1", "0000:00:02.0", address="02:00:00:00:00:09", addr_assign_type=3, operstate="down")
    nic(tmp_path, "eth2", "0000:00:03.0", address="00:00:00:00:00:00", operstate="unknown", speed=-1)
    write(tmp_path, **{"sys/class/net/lo/address": "00:00:00:00:00:00", "sys/class/net/bond0/speed": 1_000})
    write(tmp_path, **{f"{PCI}/0000:00:01.0/numa_node": 1, f"{PCI}/0000:00:02.0/numa_node": -1})
    link(tmp_path, f"{PCI}/0000:00:01.0/driver", "sys/bus/pci/drivers/mlx5_core")
    inventory = read_nics(roots)
    assert [(d.key, d.name, d.attributes["identity"]) for d in inventory.devices] == [
        ("nic/02:00:00:00:00:01", "eth0", "serial"),
        ("nic/0000:00:02.0/0", "eth1", "location"),  # its address was set by somebody
        ("nic/0000:00:03.0/0", "eth2", "location"),
    ]
    first, second, _ = (dict(d.attributes) for d in inventory.devices)
    assert {key: first[key] for key in ("pciBusID", "pcieRoot", "driver", "numaNode", "mac")} == {
        "pciBusID": "0000:00:01.0",
        "pcieRoot": "pci0000:00",
        "driver": "mlx5_core",
        "numaNode": 1,
        "mac": "02:00:00:00:00:01",
    }
    assert "numaNode" not in second
    assert inventory.links == (
        Link(
            "link/nic/02:00:00:00:00:01",
            "ethernet",
            "nic/02:00:00:00:00:01",
            current_bytes_per_second=3_125_000_000,
            state="up",
        ),
        Link("link/nic/0000:00:02.0/0", "ethernet", "nic/0000:00:02.0/0", state="down"),
        Link("link/nic/0000:00:03.0/0", "ethernet", "nic/0000:00:03.0/0", state="unknown"),
    )
    flags = {s.name: (s.value, s.quality) for s in read_link_states(roots, 1) if s.name.endswith("/up")}
    assert flags == {
        "link/nic/02:00:00:00:00:01/up": (1, Quality.OK),
        "link/nic/0000:00:02.0/0/up": (0, Quality.OK),
        "link/nic/0000:00:03.0/0/up": (None, Quality.ABSENT),
    }


def test_a_bond_member_keeps_its_own_address_and_equal_keys_are_told_apart(tmp_path: Path, roots: Roots) -> None:
    for number in (1, 2):
        nic(tmp_path, f"eth{number}", f"0000:00:0{number}.0", address="02:00:00:00:00:01", addr_assign_type=3)
        base = f"{PCI}/0000:00:0{number}.0/net/eth{number}"
        write(tmp_path, **{f"{base}/bonding_slave/perm_hwaddr": f"02:00:00:00:00:a{number}"})
        link(tmp_path, f"{base}/master", "sys/class/net/bond0")
    for number in (3, 4):
        nic(tmp_path, f"eth{number}", f"0000:00:0{number}.0", address="02:00:00:00:00:ff", addr_assign_type=0)
    inventory = read_nics(roots)
    assert [(d.key, d.attributes.get("bond"), d.attributes["identity"]) for d in inventory.devices] == [
        ("nic/02:00:00:00:00:a1", "bond0", "serial"),
        ("nic/02:00:00:00:00:a2", "bond0", "serial"),
        ("nic/02:00:00:00:00:ff/eth3", None, "name"),
        ("nic/02:00:00:00:00:ff/eth4", None, "name"),
    ]
    assert [link.end_a for link in inventory.links] == [device.key for device in inventory.devices]


def test_an_interface_on_an_rdma_port_is_that_port(tmp_path: Path, roots: Roots) -> None:
    device = f"{PCI}/0000:00:01.0"
    nic(tmp_path, "ib0", "0000:00:01.0", address="80:00:00", carrier=1, dev_port=0)
    link(tmp_path, "sys/class/infiniband/mlx5_7", f"{device}/infiniband/mlx5_7")
    base = f"{device}/infiniband/mlx5_7"
    write(
        tmp_path,
        **{
            f"{base}/node_guid": "0002:c903:00f9:bfa0",
            f"{base}/ports/1/state": "4: ACTIVE",
            f"{base}/ports/1/rate": "400 Gb/sec (4X NDR)",
            f"{base}/ports/1/counters/link_downed": 255,
            f"{base}/ports/1/counters/symbol_error": 3,
            f"{base}/ports/1/counters/port_rcv_errors": "N/A (no PMA)",
            f"{base}/ports/2/state": "1: DOWN",
            f"{base}/ports/2/rate": "10 Gb/sec (4X SDR)",
        },
    )
    link(tmp_path, f"{base}/device", device)
    inventory = read_nics(roots)
    assert [(d.key, d.attributes.get("interface"), d.attributes["pciBusID"]) for d in inventory.devices] == [
        ("nic/0002:c903:00f9:bfa0/1", "ib0", "0000:00:01.0"),
        ("nic/0002:c903:00f9:bfa0/2", None, "0000:00:01.0"),
    ]
    first, second = inventory.links
    assert (first.current_bytes_per_second, first.current_width_lanes, first.state) == (50_000_000_000, 4, "up")
    assert (second.current_bytes_per_second, second.current_width_lanes, second.state) == (None, None, "down")
    counters = {
        s.name.rpartition("/")[2]: (s.value, s.quality) for s in read_rdma_counters(roots, 1) if "/1/" in s.name
    }
    assert counters["link_downed"] == (255, Quality.SATURATED)
    assert counters["symbol_error"] == (3, Quality.OK)
    assert counters["port_rcv_errors"] == (None, Quality.ABSENT)
    assert counters["link_error_recovery"] == (None, Quality.ABSENT)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100 Gb/sec (4X EDR)", (12_500_000_000, 4)),
        ("2.5 Gb/sec (1X SDR)", (312_500_000, 1)),
        ("100 Gb/sec", (12_500_000_000, None)),
        ("0 Gb/sec (4X)", (None, 4)),
        ("fast", (None, None)),
        ("", (None, None)),
    ],
)
def test_rdma_rates(text: str, expected: tuple[int | None, int | None]) -> None:
    assert parse_rate(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4: ACTIVE", "up"), ("1: DOWN", "down"), ("2: INIT", "down"), ("9: ODD", "unknown"), ("", "unknown")],
)
def test_rdma_states(text: str, expected: str) -> None:
    assert port_state(text) == expected


def test_disks_by_serial_by_place_by_name(tmp_path: Path, roots: Roots) -> None:
    def disk(name: str, **files: str | int) -> None:
        write(tmp_path, **{f"sys/block/{name}/{file}": content for file, content in files.items()})

    disk("nvme0n1", size=2_000, nsid=1, **{"device/serial": "S1  ", "device/model": "M", "queue/rotational": 0})
    disk("nvme0n2", size=2_000, nsid=2, **{"device/serial": "S1"})
    disk("nvme0c0n1", size=2_000, hidden=1)
    disk("sda", size=8)
    link(tmp_path, "sys/block/sda/device", f"{PCI}/0000:00:1f.2/host4/target4:0:0/4:0:0:0")
    disk("sdb", size=8)
    disk("sdc", size=0)
    for name in ("loop0", "ram1", "zram0", "dm-0", "md0", "sr0"):
        disk(name, size=8)
    disk("vda", size=8, serial="clone")
    disk("vdb", size=8, serial="clone")
    assert [(d.key, d.name, d.attributes["identity"], dict(d.capacity)) for d in read_disks(roots).devices] == [
        ("disk/S1", "nvme0n1", "serial", {"capacity_bytes": 1_024_000}),
        ("disk/S1/2", "nvme0n2", "serial", {"capacity_bytes": 1_024_000}),
        ("disk/pci0000:00/0000:00:1f.2/host4/target4:0:0/4:0:0:0", "sda", "location", {"capacity_bytes": 4_096}),
        ("disk/sdb", "sdb", "name", {"capacity_bytes": 4_096}),
        ("disk/clone/vda", "vda", "name", {"capacity_bytes": 4_096}),
        ("disk/clone/vdb", "vdb", "name", {"capacity_bytes": 4_096}),
    ]


def test_the_mount_points_of_a_captured_tree_are_not_looked_up_on_this_machine(tmp_path: Path, roots: Roots) -> None:
    write(tmp_path, **{"proc/self/mounts": "/dev/sda1 / ext4 rw 0 0"})
    assert read_file_systems(roots, 1) == []


def test_accelerators_on_the_bus(tmp_path: Path, roots: Roots) -> None:
    functions = {
        "0000:01:00.0": ("0x030200", "0x10de"),  # 3D controller
        "0000:02:00.0": ("0x120000", "0x1da3"),  # processing accelerator
        "0000:03:00.0": ("0x030000", "0x1002"),  # a card that also drives screens
        "0000:04:00.0": ("0x030000", "0x1a03"),  # the management controller's screen
        "0000:05:00.0": ("0x020000", "0x15b3"),  # a NIC
        "0000:06:00.0": ("junk", "0x10de"),
        "0000:01:00.4": ("0x030200", "0x10de"),  # a virtual function
    }
    for address, (code, vendor) in functions.items():
        write(tmp_path, **{f"{PCI}/{address}/class": code, f"{PCI}/{address}/vendor": vendor})
        link(tmp_path, f"sys/bus/pci/devices/{address}", f"{PCI}/{address}")
    link(tmp_path, f"{PCI}/0000:01:00.4/physfn", f"{PCI}/0000:01:00.0")
    write(tmp_path, **{f"{PCI}/0000:01:00.0/max_link_width": 16, f"{PCI}/0000:02:00.0/max_link_width": 255})
    pci = read_pci(roots)
    assert [(d.key, d.vendor_id, d.attributes.get("pcie_width_lanes_max")) for d in pci.accelerators] == [
        ("pci/0000:01:00.0", "10de", 16),
        ("pci/0000:02:00.0", "1da3", None),
        ("pci/0000:03:00.0", "1002", None),
    ]
    assert collect_inventory(roots).attributes["pci_accelerator_count"] == 3


def test_temperatures(tmp_path: Path, roots: Roots) -> None:
    chip = "sys/devices/platform/coretemp.0/hwmon/hwmon7"
    write(
        tmp_path,
        **{
            f"{chip}/name": "coretemp",
            f"{chip}/temp1_input": 55_000,
            f"{chip}/temp1_label": "Package id 0",
            f"{chip}/temp1_crit": 100_000,
            f"{chip}/temp2_input": 65_261_850,
            f"{chip}/temp2_crit": 65_261_850,
            f"{chip}/temp3_input": 40_000,
            f"{chip}/temp3_fault": 1,
            f"{chip}/temp4_label": "no input",
        },
    )
    link(tmp_path, "sys/class/hwmon/hwmon7", chip)
    zone = "sys/devices/virtual/thermal/thermal_zone0"
    write(tmp_path, **{f"{zone}/type": "acpitz", f"{zone}/temp": -273_150})
    write(tmp_path, **{f"{zone}/hwmon1/name": "acpitz", f"{zone}/hwmon1/temp1_input": 30_000})
    link(tmp_path, "sys/class/thermal/thermal_zone0", zone)
    link(tmp_path, "sys/class/hwmon/hwmon1", f"{zone}/hwmon1")  # the zone once more
    write(
        tmp_path, **{"sys/class/thermal/thermal_zone1/type": "acpitz", "sys/class/thermal/thermal_zone1/temp": 41_000}
    )
    assert [(s.name, s.value, s.quality) for s in read_temperatures(roots, 1)] == [
        ("temperature/coretemp/coretemp.0/Package-id-0", 55_000, Quality.OK),
        ("temperature_limit/coretemp/coretemp.0/Package-id-0", 100_000, Quality.OK),
        ("temperature/coretemp/coretemp.0/temp2", None, Quality.IMPLAUSIBLE),
        ("temperature/coretemp/coretemp.0/temp3", None, Quality.ABSENT),
        ("temperature/thermal/acpitz", None, Quality.ABSENT),
        ("temperature/thermal/acpitz#2", 41_000, Quality.OK),
    ]
    implausible = collect_readings(roots, 1).get("collector/implausible")
    assert implausible is not None
    assert implausible.value == 1


def test_a_maker_that_says_nothing_is_not_quoted(tmp_path: Path, roots: Roots) -> None:
    write(
        tmp_path,
        **{
            "sys/class/dmi/id/sys_vendor": "Maker",
            "sys/class/dmi/id/product_serial": "To Be Filled By O.E.M.",
            "proc/sys/kernel/random/boot_id": "1a5377f7-dab4-44f0-95f1-4ee4f2ab9b47",
        },
    )
    host = read_host(roots)
    assert host.attributes == {"dmi_sys_vendor": "Maker"}
    assert (host.boot_id, host.dmi_quality) == ("1a5377f7-dab4-44f0-95f1-4ee4f2ab9b47", Quality.OK)
