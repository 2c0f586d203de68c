"""One group commit in the making: decisions on the head state, each key once, numbered events, answers.

What is decided is encoded once a key, by `settle`, after many decisions: thousands of ranks change one record. Where
that shows that something cannot be stored, or that it is too much for one transaction, the caller goes back to the
copy it made before and decides one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from controld.core import keys
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

    `stored` and `size_bytes` are as of the last `settle`. `closed`: the next decision did not fit.
    """

    operations_max: int
    bytes_max: int
    stored: dict[str, StoredChange] = field(default_factory=dict[str, StoredChange])
    changes: dict[str, Change] = field(default_factory=dict[str, Change])
    events: list[Event] = field(default_factory=list[Event])
    answers: list[tuple[_W, Outcome]] = field(default_factory=list[tuple[_W, Outcome]])
    size_bytes: int = 0
    closed: bool = False
    _unsettled: dict[str, None] = field(default_factory=dict[str, None])
    # The number of the newest event told here; None before the first.
    _told: int | None = None

    def copy(self) -> Batch[_W]:
        """As it is now, whatever is admitted later."""
        return replace(
            self,
            stored=dict(self.stored),
            changes=dict(self.changes),
            events=list(self.events),
            answers=list(self.answers),
            _unsettled=dict(self._unsettled),
        )

    def admit(self, who: _W, outcome: Outcome, head: State, now: Now) -> bool:
        """Take a decision into the batch and apply it to `head`; False when it must wait for the next batch.

        A decision with too many changes for any batch is taken when the batch is empty: the store has the last word.
        """
        if isinstance(outcome, Refused):
            self.answers.append((who, outcome))
            return True
        if self.changes and not self._has_room(outcome):
            return False
        changes = outcome.changes
        if outcome.events:
            events = self._number(outcome, head, now)
            self.events += events
            changes = (*changes, *(Change(keys.event(e.sequence), e) for e in events))
        for change in changes:
            key = change.key
            self.changes[key] = change
            self._unsettled[key] = None
        self.answers.append((who, outcome))
        head.apply(changes, 0)
        return True

    def _has_room(self, transition: Transition) -> bool:
        known = self.changes
        operations = len(known) + len(transition.events)
        if keys.CLUSTER not in known and (transition.events or self._told is not None):
            operations += 1  # it counts the events
        for change in transition.changes:
            earlier = known.get(change.key)
            if earlier is None:
                operations += 1
            elif earlier.record is None and change.record is not None:
                return False
        return operations <= self.operations_max

    def _number(self, transition: Transition, head: State, now: Now) -> list[Event]:
        """The transition's events, numbered on from those before, and stamped."""
        if self._told is None:
            given = (c.record for c in transition.changes if isinstance(c.record, Cluster))
            if (cluster := next(given, head.cluster)) is None:
                raise ValueError("the cluster record is missing: it is written before anything else")
            self._told = cluster.event_sequence
        numbered: list[Event] = []
        for event in transition.events:
            self._told += 1
            numbered.append(_numbered(event, self._told, now.unix_ns))
        return numbered

    def settle(self, head: State) -> bool:
        """Encode what was admitted, and move the cluster's counter of events on, here and in `head`.

        False: it is more than fits into one transaction. Raises RecordError: something in it cannot be stored.
        """
        if self._told is not None and head.cluster is not None and head.cluster.event_sequence != self._told:
            counted = Change(keys.CLUSTER, replace(head.cluster, event_sequence=self._told))
            self.changes[counted.key] = counted
            self._unsettled[counted.key] = None
            head.apply((counted,), 0)
        for key in self._unsettled:
            stored = codec.encode_change(self.changes[key])
            self.size_bytes += _size_bytes(stored) - _size_bytes(self.stored.get(key))
            self.stored[key] = stored
        self._unsettled.clear()
        return self.size_bytes <= self.bytes_max

    def keys_since(self, before: Batch[_W]) -> Iterable[str]:
        """The keys that were changed since `before` was copied."""
        return (key for key, change in self.changes.items() if before.changes.get(key) is not change)


def _numbered(event: Event, sequence: int, unix_ns: int) -> Event:
    # `dataclasses.replace` takes three times as long, once an event.
    return Event(
        kind=event.kind,
        job=event.job,
        node=event.node,
        generation=event.generation,
        reason=event.reason,
        numbers=event.numbers,
        details=event.details,
        cause_id=event.cause_id,
        sequence=sequence,
        create_time_unix_ns=unix_ns,
    )


def _size_bytes(stored: StoredChange | None) -> int:
    return 0 if stored is None else len(stored.key) + len(stored.value or b"")
