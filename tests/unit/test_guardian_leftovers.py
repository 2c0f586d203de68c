"""Which states of an earlier guardian count, and which prove that nothing is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from noded.run.cgroup import Places
from noded.run.leftovers import clear, read_leftovers
from noded.run.protocol import Fencing, SlotState, SlotStatus, Token, status_to_json
from noded.run.runner import Site

SITE = Site(Fencing.WEAK, Places(), Path("/nowhere"), "no-such-mark", allow_root=False, open_files=1024)
STATUS = SlotStatus("j.1.0", Token("j", 1, (0, 5)), 0, SlotState.RUNNING, 9, ("gpu",), 2**22 + 1, 2**22 + 2, 7)


def write(data_dir: Path, slot: str, record: dict[str, Any] | str) -> None:
    path = data_dir / "tasks" / slot / "status.json"
    path.parent.mkdir(parents=True)
    path.write_text(record if isinstance(record, str) else json.dumps(record))


def test_released_slots_do_not_count_and_torn_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, "j.1.0", {**status_to_json(STATUS), "boot_id": "b"})
    write(tmp_path, "k.1.0", {**status_to_json(STATUS), "slot": "k.1.0", "state": "RELEASED", "boot_id": "b"})
    write(tmp_path, "torn.1.0", '{"slot": "torn')
    write(tmp_path, "odd.1.0", {"slot": "odd.1.0"})
    (tmp_path / "tasks" / "empty.1.0").mkdir()
    found, complaints = read_leftovers(tmp_path, SITE, "b")
    assert [(leftover.status, leftover.same_boot) for leftover in found] == [(STATUS, True)]
    assert [Path(complaint.partition(": ")[0]).parent.name for complaint in complaints] == ["odd.1.0", "torn.1.0"]


def test_a_reboot_proves_everything_gone(tmp_path: Path) -> None:
    # pid 1 is alive: only the boot id says that this is another one.
    record = {**status_to_json(STATUS), "pid": 1, "init_pid": 1, "start_ticks": 0, "boot_id": "an earlier boot"}
    write(tmp_path, "j.1.0", record)
    found, _ = read_leftovers(tmp_path, SITE, "this boot")
    assert clear(found) == {"j.1.0": True}


def test_a_reused_pid_is_not_the_task(tmp_path: Path) -> None:
    record = {**status_to_json(STATUS), "pid": 1, "init_pid": 1, "start_ticks": 987654321, "boot_id": "b"}
    write(tmp_path, "j.1.0", record)
    found, _ = read_leftovers(tmp_path, SITE, "b")
    assert clear(found) == {"j.1.0": True}
