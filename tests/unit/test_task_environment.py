"""What a task was started with: Virial's variables, torchrun's, or none at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from virial.task import TaskEnvironmentError
from virial.task._environment import CheckpointToRestore, Environment, parse_environment

MANAGED = {
    "VIRIAL_SOCK": "/run/virial/t/1.sock",
    "VIRIAL_JOB": "train",
    "VIRIAL_GENERATION": "2",
    "VIRIAL_EPOCH": "1.7",
    "VIRIAL_RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}


def test_a_task_of_virial() -> None:
    restore = {"VIRIAL_CHECKPOINT_DIR": "/c/7", "VIRIAL_CHECKPOINT_ID": "c7", "VIRIAL_CHECKPOINT_STEP": "40"}
    expected = Environment(
        socket="/run/virial/t/1.sock",
        job="train",
        generation=2,
        epoch="1.7",
        rank=1,
        world_size=3,
        master_addr="10.0.0.1",
        master_port=29400,
        restore=CheckpointToRestore("c7", "/c/7", 40),
    )
    assert parse_environment({**MANAGED, **restore}) == expected


def test_an_empty_checkpoint_directory_starts_from_zero() -> None:
    empty = {"VIRIAL_CHECKPOINT_DIR": "", "VIRIAL_CHECKPOINT_ID": "", "VIRIAL_CHECKPOINT_STEP": ""}
    assert parse_environment(MANAGED).restore is None
    assert parse_environment({**MANAGED, **empty}).restore is None


def test_by_hand_with_and_without_torchruns_variables() -> None:
    alone = Environment("", "", 0, "", 0, 1, "127.0.0.1", 0, None)
    assert parse_environment({}) == alone
    assert parse_environment({"RANK": "2", "WORLD_SIZE": "3"}).rank == 2


def test_shards_are_named_by_virials_rank_whatever_the_user_set_in_rank() -> None:
    assert parse_environment({**MANAGED, "RANK": "0"}).rank == 1


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({**MANAGED, "VIRIAL_RANK": "one"}, "VIRIAL_RANK is 'one', not a whole number"),
        ({**MANAGED, "VIRIAL_RANK": "-1"}, "VIRIAL_RANK is '-1'"),
        ({**MANAGED, "VIRIAL_RANK": "٣"}, "VIRIAL_RANK is '٣'"),
        ({**MANAGED, "VIRIAL_RANK": "3"}, "rank 3 does not fit WORLD_SIZE 3"),
        ({**MANAGED, "VIRIAL_RANK": ""}, "RANK is not set, but VIRIAL_SOCK is"),
        ({**MANAGED, "WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
        ({**MANAGED, "VIRIAL_CHECKPOINT_DIR": "/c/7"}, "VIRIAL_CHECKPOINT_STEP is not set"),
        ({"RANK": "1"}, "rank 1 does not fit WORLD_SIZE 1"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
    ],
)
def test_a_malformed_variable_is_named(environ: dict[str, str], says: str) -> None:
    with pytest.raises(TaskEnvironmentError, match=says):
        parse_environment(environ)


def test_importing_virial_task_loads_the_standard_library_only() -> None:
    code = "import sys, virial.task; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Others' .pth files may load more at start; what an empty program loads is not ours.
    empty = subprocess.run(
        [sys.executable, "-c", code.replace(", virial.task", "")], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split()) - set(empty.stdout.split()) - sys.stdlib_module_names
    assert loaded == {"virial", "virialpb"}
