"""What the parts of one leadership share. Made by the leader once it has won, and gone with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from controld.core.ids import Epoch
from controld.core.state import State
from controld.health.view import View
from controld.replica.barrier import Barrier
from controld.replica.clock import Clock
from controld.replica.crew import Crew
from controld.replica.observe import Log, Observer
from controld.replica.settings import LeaderSettings
from controld.replica.writer import Writer
from controld.store.port import StoreError


@dataclass(frozen=True, slots=True)
class Office:
    """`wake` asks for a tick soon; `lose` ends the leadership."""

    clock: Clock
    settings: LeaderSettings
    log: Log
    observer: Observer
    view: View
    epoch: Epoch
    writer: Writer
    barrier: Barrier
    crew: Crew
    wake: Callable[[], None]
    lose: Callable[[StoreError], None]

    @property
    def state(self) -> State:
        """The committed state, read only."""
        return self.writer.committed
