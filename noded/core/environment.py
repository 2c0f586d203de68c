"""The environment of a rank: what the guardian adds to the task's own. A value the user set is left alone.

torchrun's full list, so that a script written for it needs no change. Each rank is its own torchrun agent here: it sees
only its own devices, so its LOCAL_RANK is 0. VIRIAL_SOCK is added by the guardian, which knows where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from noded.core.messages import Device, Go, SlotRecord

ACCELERATOR: Final = "accelerator"
VISIBILITY: Final[Mapping[str, tuple[str, ...]]] = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("ROCR_VISIBLE_DEVICES",),
    "huawei": ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES"),
}
"""An empty value hides every device of that vendor; an absent variable would show all of them."""
_VENDORS: Final[Mapping[str, str]] = {
    "10de": "nvidia",
    "nvidia": "nvidia",
    "1002": "amd",
    "amd": "amd",
    "19e5": "huawei",
    "huawei": "huawei",
    "ascend": "huawei",
}
_BY_INDEX: Final = frozenset({"huawei"})
"""Ascend's runtime knows its devices by index only."""


def rank_environment(
    record: SlotRecord, go: Go, devices: Iterable[Device], *, node_name: str, checkpoint_directory: str
) -> tuple[tuple[str, str], ...]:
    """Sorted (name, value). `checkpoint_directory`: where this rank's restore lies; unused without one."""
    rank = 0 if record.rank is None else record.rank
    world = str(go.world_size)
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "GROUP_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": world,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": go.master_address,
        "MASTER_PORT": str(go.master_port),
        "TORCHELASTIC_RUN_ID": record.token.job,
        "TORCHELASTIC_RESTART_COUNT": str(go.restart_count),
        # Restarts are generations, planned by the controller; torch itself starts nothing again.
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # Without it every rank starts a thread for each core of the host.
        "OMP_NUM_THREADS": str(max(1, record.cpu_millis // 1000)),
        "VIRIAL_JOB": record.token.job,
        "VIRIAL_GENERATION": str(record.token.generation),
        "VIRIAL_EPOCH": str(record.token.epoch),
        "VIRIAL_RANK": str(rank),
        "VIRIAL_NODE": node_name,
        "VIRIAL_DEVICES": ",".join(record.device_keys),
    }
    if record.restore is not None:
        env["VIRIAL_CHECKPOINT_DIR"] = checkpoint_directory
        env["VIRIAL_CHECKPOINT_ID"] = record.restore.checkpoint
        env["VIRIAL_CHECKPOINT_STEP"] = str(record.restore.step)
    env |= visible_devices(record.device_keys, devices)
    for name in record.user_env:
        env.pop(name, None)
    return tuple(sorted(env.items()))


def visible_devices(granted: Iterable[str], devices: Iterable[Device]) -> dict[str, str]:
    """The visibility variables of every vendor, naming the granted accelerators and no other.

    By UUID where one is known. Otherwise by index: runtimes count a vendor's devices along the bus (CUDA when it is
    told to), and so does this.
    """
    by_vendor: dict[str, list[Device]] = {vendor: [] for vendor in VISIBILITY}
    for device in devices:
        vendor = _VENDORS.get(device.vendor_id.removeprefix("0x").lower())
        if vendor is not None and device.kind == ACCELERATOR:
            by_vendor[vendor].append(device)
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    for vendor, there in by_vendor.items():
        there.sort(key=lambda device: (str(device.attribute("pciBusID") or ""), device.key))
        index = {device.key: position for position, device in enumerate(there)}
        named = [_name_for_runtime(vendor, there[index[key]], index[key]) for key in granted if key in index]
        env |= dict.fromkeys(VISIBILITY[vendor], ",".join(named))
    return env


def _name_for_runtime(vendor: str, device: Device, position: int) -> str:
    for attribute in ("index",) if vendor in _BY_INDEX else ("uuid", "index"):
        value = device.attribute(attribute)
        if value is not None:
            return str(value)
    return str(position)
