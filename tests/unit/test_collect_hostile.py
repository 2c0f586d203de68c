"""Whatever stands in the kernel's files, collection answers: unknown where it must, with no exception and no lie."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from noded.collect.model import Quality, Roots
from noded.collect.plausible import MAX_MILLIDEGREES, MIN_MILLIDEGREES
from noded.collect.sweep import collect_inventory, collect_readings

PCI = "sys/devices/pci0000:00/0000:00:01.0"
FILES = (
    "proc/cpuinfo",
    "proc/meminfo",
    "proc/stat",
    "proc/loadavg",
    "proc/self/mounts",
    "proc/sys/kernel/random/boot_id",
    "sys/block/nvme0n1/size",
    "sys/block/nvme0n1/nsid",
    "sys/block/nvme0n1/device/serial",
    "sys/block/nvme0n1/queue/rotational",
    "sys/class/dmi/id/product_serial",
    "sys/class/hwmon/hwmon0/name",
    "sys/class/hwmon/hwmon0/temp1_input",
    "sys/class/hwmon/hwmon0/temp1_crit",
    "sys/class/hwmon/hwmon0/temp1_fault",
    "sys/class/hwmon/hwmon0/temp1_label",
    "sys/class/hwmon/hwmon0/temp2_input",
    "sys/class/hwmon/hwmon0/temp2_label",
    "sys/class/thermal/thermal_zone0/temp",
    "sys/class/thermal/thermal_zone0/type",
    "sys/class/infiniband/mlx5_0/node_guid",
    "sys/class/infiniband/mlx5_0/ports/1/rate",
    "sys/class/infiniband/mlx5_0/ports/1/state",
    "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error",
    "sys/devices/system/cpu/online",
    "sys/devices/system/cpu/present",
    "sys/devices/system/cpu/cpu0/topology/physical_package_id",
    "sys/devices/system/cpu/cpu0/topology/thread_siblings_list",
    "sys/devices/system/cpu/cpu1/topology/core_id",
    "sys/devices/system/node/online",
    "sys/devices/system/node/node0/cpulist",
    "sys/devices/system/node/node0/cpumap",
    "sys/devices/system/node/node0/meminfo",
    "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages",
    "sys/fs/cgroup/cpu.max",
    "sys/fs/cgroup/memory.max",
    f"{PCI}/class",
    f"{PCI}/vendor",
    f"{PCI}/numa_node",
    f"{PCI}/max_link_width",
    f"{PCI}/net/eth0/address",
    f"{PCI}/net/eth0/addr_assign_type",
    f"{PCI}/net/eth0/carrier",
    f"{PCI}/net/eth0/operstate",
    f"{PCI}/net/eth0/speed",
)
LINKS = {
    "sys/bus/pci/devices/0000:00:01.0": PCI,
    "sys/class/net/eth0": f"{PCI}/net/eth0",
    f"{PCI}/net/eth0/device": PCI,
    "sys/class/infiniband/mlx5_0/device": PCI,
    "sys/block/nvme0n1/device/device": PCI,
}

# What kernels write, what they write when they have nothing to write, and what nobody writes.
CONTENTS = st.one_of(
    st.sampled_from(
        [
            *(
                "",
                "\n",
                "0",
                "1",
                "-1",
                "-273150",
                "65261850",
                "4294967295",
                "9223372036854775794",
                "9" * 30,
                "9" * 5000,
                "max",
            ),
            *(
                "0-3",
                "3-0",
                "0-",
                "ffffffff,ffffffff",
                "up",
                "down",
                "4: ACTIVE",
                "100 Gb/sec (4X EDR)",
                "N/A (no PMA)",
            ),
            *("0x030200", "0x10de", "02:00:00:00:00:01", "00:00:00:00:00:00", "cpu 1 2 3 4 5", "cpu -1 2 3 4"),
            *(
                "MemTotal: 1024 kB",
                "Node 0 MemTotal: 99 kB",
                "processor : 0\nmodel name : X",
                "0.10 0 0 1/1 1",
                "100000 0",
            ),
            *("/dev/sda1 / ext4 rw 0 0", "a/b\0c", "\u00b2", "Package id 0"),
        ]
    ).map(str.encode),
    st.integers(-(2**70), 2**70).map(lambda number: str(number).encode()),
    st.binary(max_size=40),
)


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(FILES), CONTENTS, max_size=len(FILES)))
def test_any_content_is_read_without_an_exception_and_without_a_lie(contents: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        for name, content in contents.items():
            path = tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for name, target in LINKS.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            os.symlink(tree / target, tree / name)
        roots = Roots(f"{tree}/sys", f"{tree}/proc", f"{tree}/dev")
        inventory, readings = collect_inventory(roots), collect_readings(roots, 7)

    keys = [device.key for device in inventory.devices]
    assert len(keys) == len(set(keys))
    assert {link.end_a for link in inventory.links} <= set(keys)
    assert all(0 <= amount < 2**63 for device in inventory.devices for amount in device.capacity.values())
    assert all((link.current_bytes_per_second or 1) > 0 for link in inventory.links)
    names = [sample.name for sample in readings.samples]
    assert names == sorted(set(names))
    for sample in readings.samples:
        assert sample.value is None or 0 <= sample.value < 2**63 or sample.name.startswith("temperature")
        if sample.name.startswith("temperature") and sample.quality is Quality.OK:
            assert sample.value is not None
            assert MIN_MILLIDEGREES <= sample.value <= MAX_MILLIDEGREES
            assert sample.value != 0
