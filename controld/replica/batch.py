"""One group commit in the making: decisions on the head state, each key once, numbered events, answers.

What is decided is encoded once a key, by `settle`, after many decisions: thousands of ranks change one record. The
events it tells, and the requests it answers, are one record each: most commands do both, and a key for each of them
was most of what a commit cost. Where encoding shows that something cannot be stored, or that it is too much for one
transaction, the caller goes back to the copy it made before and decides one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from controld.core import keys
from controld.core.commands import Now
from controld.core.model import Cluster, Event, EventPack, Request, RequestPack
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
    requests: list[Request] = field(default_factory=list[Request])
    answers: list[tuple[_W, Outcome]] = field(default_factory=list[tuple[_W, Outcome]])
    size_bytes: int = 0
    closed: bool = False
    _unsettled: dict[str, None] = field(default_factory=dict[str, None])
    # How many were told, and answered, before this batch; None where none was here.
    _told_before: int | None = None
    _answered_before: int | None = None
    # How many of the cluster's record and the two packs are among the changes.
    _counted: int = 0

    def copy(self) -> Batch[_W]:
        """As it is now, whatever is admitted later."""
        return replace(
            self,
            stored=dict(self.stored),
            changes=dict(self.changes),
            events=list(self.events),
            requests=list(self.requests),
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
        if (self.changes or self.events or self.requests) and not self._has_room(outcome):
            return False
        self._count_on(outcome, head)
        changes: list[Change] = []
        for change in outcome.changes:
            if isinstance(change.record, Request):
                self.requests.append(change.record)
                head.foresee(change.record)
                continue
            changes.append(change)
            self.changes[change.key] = change
            self._unsettled[change.key] = None
        for event in outcome.events:
            assert self._told_before is not None
            self.events.append(_numbered(event, self._told_before + len(self.events) + 1, now.unix_ns))
        self.answers.append((who, outcome))
        head.apply(changes, 0)
        return True

    def _has_room(self, transition: Transition) -> bool:
        known = self.changes
        operations = len(known) + 3 - self._counted  # for the cluster's record and the two packs
        for change in transition.changes:
            earlier = known.get(change.key)
            if earlier is None:
                operations += not isinstance(change.record, Request)
            elif earlier.record is None and change.record is not None:
                return False
        return operations <= self.operations_max

    def _count_on(self, transition: Transition, head: State) -> None:
        """Find out where the numbers of events and requests go on, before the first of either."""
        if self._told_before is not None or not (
            transition.events or any(isinstance(c.record, Request) for c in transition.changes)
        ):
            return
        given = (c.record for c in transition.changes if isinstance(c.record, Cluster))
        if (cluster := next(given, head.cluster)) is None:
            raise ValueError("the cluster record is missing: it is written before anything else")
        self._told_before, self._answered_before = cluster.event_sequence, cluster.request_sequence

    def settle(self, head: State) -> bool:
        """Make up the packs, move the cluster's counters on, and encode what was admitted since the last time.

        False: it is more than fits into one transaction. Raises RecordError: something in it cannot be stored.
        """
        self._pack(head)
        for key in self._unsettled:
            stored = codec.encode_change(self.changes[key])
            self.size_bytes += _size_bytes(stored) - _size_bytes(self.stored.get(key))
            self.stored[key] = stored
        self._unsettled.clear()
        return self.size_bytes <= self.bytes_max

    def _pack(self, head: State) -> None:
        if self._told_before is None or self._answered_before is None or head.cluster is None:
            return
        told, answered = self._told_before + len(self.events), self._answered_before + len(self.requests)
        if (head.cluster.event_sequence, head.cluster.request_sequence) == (told, answered):
            return
        packed = [Change(keys.CLUSTER, replace(head.cluster, event_sequence=told, request_sequence=answered))]
        if self.events and head.cluster.event_sequence != told:
            packed.append(Change.put(EventPack(self._told_before + 1, tuple(self.events))))
        if self.requests and head.cluster.request_sequence != answered:
            packed.append(Change.put(RequestPack(self._answered_before + 1, tuple(self.requests))))
        for change in packed:
            self._counted += change.key not in self.changes
            self.changes[change.key] = change
            self._unsettled[change.key] = None
        head.apply(packed, 0)

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
