"""The environment of a rank."""

from __future__ import annotations

from dataclasses import replace

from noded.core.environment import rank_environment, visible_devices
from noded.core.messages import Device
from noded.core.slots import record_of
from tests.unit.noded_builders import GO, PREPARE, RESTORE

GPU_A = Device("pci-1", "accelerator", vendor_id="10de", attributes=(("index", 3), ("uuid", "GPU-a")))
GPU_B = Device("pci-2", "accelerator", vendor_id="nvidia", attributes=(("uuid", "GPU-b"),))
RADEON = Device("pci-3", "accelerator", vendor_id="0x1002", attributes=(("pciBusID", "0000:41:00.0"),))
RADEON_FIRST = Device("pci-9", "accelerator", vendor_id="1002", attributes=(("pciBusID", "0000:03:00.0"),))
ASCEND = Device("pci-4", "accelerator", vendor_id="19e5", attributes=(("index", 2), ("uuid", "u")))
NIC = Device("nic-1", "nic", vendor_id="10de")
DEVICES = (GPU_A, GPU_B, RADEON, RADEON_FIRST, ASCEND, NIC)
TORCHRUN = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS",
}  # fmt: skip
"""What torch 2.13's `torch.distributed.elastic.agent.server.local_elastic_agent` sets."""


def environment(prepare_changes: dict[str, object] | None = None) -> dict[str, str]:
    record = record_of(replace(PREPARE, **(prepare_changes or {})))  # type: ignore[arg-type]
    return dict(rank_environment(record, GO, DEVICES, node_name="n1", checkpoint_directory="/d/c1"))


def test_torchruns_whole_list_is_there() -> None:
    env = environment()
    assert env.keys() >= TORCHRUN
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("0", "2", "0", "1")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["TORCHELASTIC_USE_AGENT_STORE"]) == (
        "10.0.0.1",
        "29500",
        "False",
    )
    assert env["OMP_NUM_THREADS"] == "2"


def test_virials_own_variables() -> None:
    env = environment()
    own = {name: value for name, value in env.items() if name.startswith("VIRIAL_")}
    assert own == {
        "VIRIAL_JOB": "j",
        "VIRIAL_GENERATION": "1",
        "VIRIAL_EPOCH": "1.20",
        "VIRIAL_RANK": "0",
        "VIRIAL_NODE": "n1",
        "VIRIAL_DEVICES": "",
    }


def test_a_restore_names_directory_id_and_step() -> None:
    env = environment({"restore": RESTORE})
    assert (env["VIRIAL_CHECKPOINT_DIR"], env["VIRIAL_CHECKPOINT_ID"], env["VIRIAL_CHECKPOINT_STEP"]) == (
        "/d/c1",
        "c1",
        "7",
    )


def test_case_h14_names_that_the_user_set_are_left_out() -> None:
    env = environment({"task": replace(PREPARE.task, env=(("RANK", "5"), ("CUDA_VISIBLE_DEVICES", "7")))})
    assert "RANK" not in env
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert env["VIRIAL_RANK"] == "0"


def test_case_h10_without_a_request_every_vendors_devices_are_hidden() -> None:
    assert visible_devices((), DEVICES) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "",
        "ROCR_VISIBLE_DEVICES": "",
        "ASCEND_RT_VISIBLE_DEVICES": "",
        "ASCEND_VISIBLE_DEVICES": "",
    }


def test_only_granted_accelerators_are_shown_by_what_their_runtime_knows_them_by() -> None:
    granted = ("pci-2", "pci-1", "pci-3", "pci-4", "nic-1", "gone")
    assert visible_devices(granted, DEVICES) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a",
        "ROCR_VISIBLE_DEVICES": "1",
        "ASCEND_RT_VISIBLE_DEVICES": "2",
        "ASCEND_VISIBLE_DEVICES": "2",
    }
