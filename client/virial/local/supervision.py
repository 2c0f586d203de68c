"""Which dead parts of a local cluster to start again, and when: at once, then ever later while it keeps ending."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from virial.errors import VirialError
from virial.local.cluster import LocalCluster

# Up so long, a part counts as having started well.
SETTLED_S: Final = 10.0
DELAY_MAX_S: Final = 30.0


@dataclass(slots=True)
class _Record:
    started_s: float
    fast_ends: int = 0
    due_s: float | None = None
    given_up: bool = False


class Supervision:
    """Call `step` often, with a clock that only goes forward."""

    def __init__(self, cluster: LocalCluster, now_s: float) -> None:
        self._cluster = cluster
        self._records = {part.name: _Record(now_s) for part in cluster.all_parts()}

    def step(self, now_s: float) -> list[str]:
        """One sentence for each part that was started again, or cannot be."""
        said: list[str] = []
        for part in self._cluster.all_parts():
            record = self._records.setdefault(part.name, _Record(now_s))
            part.note_state()
            if part.alive or part.process is None or record.given_up:
                continue
            if record.due_s is None:
                record.fast_ends = 0 if now_s - record.started_s >= SETTLED_S else record.fast_ends + 1
                record.due_s = now_s + (min(DELAY_MAX_S, 0.5 * 2**record.fast_ends) if record.fast_ends > 1 else 0.0)
            if now_s < record.due_s:
                continue
            record.due_s, record.started_s = None, now_s
            try:
                part.spawn()
            except VirialError as error:
                record.given_up = True
                said.append(str(error))
            else:
                said.append(f"{part.name} had ended and was started again; its log is {part.log}")
        return said
