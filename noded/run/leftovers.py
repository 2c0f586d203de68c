"""What an earlier guardian of this data directory left: its slots are read from status.json, its processes killed.

A guardian that dies takes its tasks with it (PDEATHSIG), so this normally only proves that. In weak mode, or after a
task left its session, something may still be there. Nothing is granted again on devices of a slot that is not gone.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from noded.run import procs
from noded.run.cgroup import Cgroup
from noded.run.fields import BadMessage, as_object
from noded.run.protocol import SlotState, SlotStatus, status_from_json

if TYPE_CHECKING:
    from pathlib import Path

    from noded.run.runner import Site

WAIT_SECONDS: Final = 3.0
"""How long the start of a guardian waits for SIGKILL to work; what is still there then is STUCK and watched on."""
LOOK_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class Leftover:
    status: SlotStatus
    site: Site
    same_boot: bool
    guardian: str = ""
    """`procs.identity()` of the guardian that had it; empty where an older one wrote the file."""

    def owner(self) -> int | None:
        """The pid of its guardian, where that lives still: then this directory is a copy, and the slot is not ours."""
        return procs.living(self.guardian) if self.same_boot else None

    def kill(self) -> bool:
        """Kills what is there. True when nothing was: the slot is proven gone."""
        if not self.same_boot:
            return True
        cgroup = Cgroup(self.site.places, self.status.slot)
        alive = [pid for pid in self._pids() if pid is not None]
        alive += procs.take_snapshot().strays(f"{self.site.mark}/{self.status.slot}", None)
        for pid in alive:
            procs.kill(pid)
        cgroup.kill()
        if alive or not cgroup.empty():
            return False
        cgroup.remove()
        return True

    def _pids(self) -> list[int | None]:
        """The task, if it is still the process that was started; with its namespace's init, its parent then."""
        pid, init_pid = self.status.pid, self.status.init_pid
        process = None if pid is None else procs.read_process(pid)
        if process is None or process.zombie or process.start_ticks != self.status.start_ticks:
            return []
        return [pid, init_pid if process.ppid == init_pid else None]


def read_leftovers(data_dir: Path, site: Site, boot_id: str) -> tuple[list[Leftover], list[str]]:
    """(slots that were not released, complaints about files that could not be read)."""
    found: list[Leftover] = []
    complaints: list[str] = []
    for path in sorted(data_dir.glob("tasks/*/status.json")):
        try:
            record = as_object(json.loads(path.read_bytes()), "status")
            status = status_from_json(record)
        except (OSError, ValueError, BadMessage) as error:
            complaints.append(f"{path}: {error}")
            continue
        if status.state is not SlotState.RELEASED:
            found.append(Leftover(status, site, record.get("boot_id") == boot_id, str(record.get("guardian", ""))))
    return found, complaints


def clear(leftovers: list[Leftover]) -> dict[str, bool]:
    """Kills and waits; slot -> proven gone."""
    gone = {leftover.status.slot: False for leftover in leftovers}
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        for leftover in leftovers:
            gone[leftover.status.slot] = gone[leftover.status.slot] or leftover.kill()
        if all(gone.values()) or time.monotonic() >= deadline:
            return gone
        time.sleep(LOOK_SECONDS)
