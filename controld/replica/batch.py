"""One group commit in the making: decisions on the head state, each key once, numbered events, answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from controld.core.commands import Now
from controld.core.model import Cluster, Event
from controld.core.outcome import Outcome, Refused, Transition
from controld.core.state import Change, State
from controld.store import codec
from controld.store.port import StoredChange

_W = TypeVar("_W")


@dataclass(slots=True)
class Batch(Generic[_W]):
    """What one store transaction will hold. `answers` pairs who asked with what was decided, in order.

    A key that was deleted in this batch is never put again in it: the store would see a put of a key that
    is there and keep its create revision, which is the epoch of leases.
    """

    operations_max: int
    bytes_max: int
    stored: dict[str, StoredChange] = field(default_factory=dict[str, StoredChange])
    changes: dict[str, Change] = field(default_factory=dict[str, Change])
    events: list[Event] = field(default_factory=list[Event])
    answers: list[tuple[_W, Outcome]] = field(default_factory=list[tuple[_W, Outcome]])
    size_bytes: int = 0

    def admit(self, who: _W, outcome: Outcome, head: State, now: Now) -> bool:
        """Take a decision into the batch and apply it to `head`; False when it must wait for the next batch.

        A decision too big for any batch is taken when the batch is empty: the store has the last word.
        """
        if isinstance(outcome, Refused):
            self.answers.append((who, outcome))
            return True
        changes, events = number_events(outcome, head, now)
        stored = tuple(codec.encode_change(c) for c in changes)
        if self.stored and not self._fits(stored):
            return False
        for change in changes:
            self.changes[change.key] = change
        self.size_bytes += self._growth_bytes(stored)
        self.stored.update((s.key, s) for s in stored)
        self.events.extend(events)
        self.answers.append((who, outcome))
        head.apply(changes, 0)
        return True

    def _fits(self, stored: Sequence[StoredChange]) -> bool:
        new = [s for s in stored if s.key not in self.stored]
        put_again = any(
            s.value is not None and s.key in self.stored and self.stored[s.key].value is None for s in stored
        )
        return (
            not put_again
            and len(self.stored) + len(new) <= self.operations_max
            and self.size_bytes + self._growth_bytes(stored) <= self.bytes_max
        )

    def _growth_bytes(self, stored: Sequence[StoredChange]) -> int:
        """A record that is changed again takes the place of what it was: a gang's ranks all write the same one."""
        return sum(_size_bytes(s) - _size_bytes(self.stored.get(s.key)) for s in stored)


def _size_bytes(stored: StoredChange | None) -> int:
    return 0 if stored is None else len(stored.key) + len(stored.value or b"")


def number_events(transition: Transition, head: State, now: Now) -> tuple[tuple[Change, ...], tuple[Event, ...]]:
    """The transition's changes with its events numbered, stamped and stored, and the cluster's counter moved on."""
    if not transition.events:
        return transition.changes, ()
    changes = {c.key: c for c in transition.changes}
    cluster = next((c.record for c in transition.changes if isinstance(c.record, Cluster)), head.cluster)
    if cluster is None:
        raise ValueError("the cluster record is missing: it is written before anything else")
    events = tuple(
        replace(e, sequence=cluster.event_sequence + i, create_time_unix_ns=now.unix_ns)
        for i, e in enumerate(transition.events, start=1)
    )
    counted = Change.put(replace(cluster, event_sequence=cluster.event_sequence + len(events)))
    changes[counted.key] = counted
    for event in events:
        change = Change.put(event)
        changes[change.key] = change
    return tuple(changes.values()), events
