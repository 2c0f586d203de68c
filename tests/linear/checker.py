"""Linearizability of one object's history, decided by search: pure.

Wing and Gong's search in the form of Lowe ("Testing for linearizability", 2017), with a cache of what was visited, as
Porcupine and Knossos have it; neither exists for Python. An operation of unknown outcome may take effect at any time
after its call, or never. Each key is an object of its own, so each is checked by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Generic, Protocol, TypeVar

Call = TypeVar("Call", bound=Hashable)
State = TypeVar("State", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)

STEPS_MAX: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class Operation(Generic[Call]):
    """Times are of one clock. `returned` None: no answer tells whether it took effect, and `reply` is void."""

    client: str
    call: Call
    invoked: int
    returned: int | None = None
    reply: Hashable = None


class Model(Protocol[Call, State]):
    """What the object does when it is used by one client alone."""

    def initial(self) -> State: ...

    def apply(self, state: State, call: Call) -> tuple[State, Hashable]:
        """The state afterwards, and the reply."""
        ...

    def pure(self, call: Call, reply: Hashable) -> bool:
        """Whether a call with this reply changes nothing, whatever the state: a read, a refusal."""
        ...

    def effects(self, call: Call) -> bool:
        """Whether the call can change anything."""
        ...

    def blur(self, call: Call, replies: frozenset[Hashable]) -> Call:
        """The same for all calls that nobody who got `replies` can tell apart: of those that were lost most never
        show, and one of them stands for all."""
        ...


@dataclass(frozen=True, slots=True)
class Violation(Generic[Call]):
    """No order of the operations explains the replies. As far as the best attempt came: `done` operations with known
    replies were in order, and then, from `state`, none of `stuck` could be next."""

    done: int
    of: int
    state: object
    stuck: tuple[Operation[Call], ...]

    def __str__(self) -> str:
        lines = [
            f"after {self.done} of {self.of} operations the state is {self.state!r}, and none of these can be next:"
        ]
        lines += [f"  {o.client}: {o.call!r} -> {o.reply!r}, [{o.invoked}, {o.returned}]" for o in self.stuck]
        return "\n".join(lines)


class UndecidedError(Exception):
    """The search took more steps than it may: too many operations at once, or too many unknown outcomes."""


def check_each(
    model: Model[Call, State], operations: Iterable[Operation[Call]], key: Callable[[Call], Key]
) -> dict[Key, Violation[Call]]:
    """The violations by key. Raises UndecidedError."""
    by_key: dict[Key, list[Operation[Call]]] = {}
    for operation in operations:
        by_key.setdefault(key(operation.call), []).append(operation)
    found = {k: check(model, each) for k, each in by_key.items()}
    return {k: violation for k, violation in found.items() if violation is not None}


def check(
    model: Model[Call, State], operations: Sequence[Operation[Call]], *, steps_max: int = STEPS_MAX
) -> Violation[Call] | None:
    """None: some order explains every reply. Raises UndecidedError."""
    return _Search(model, operations, steps_max).run()


@dataclass(slots=True)
class _Taken(Generic[State]):
    """One step of the attempt: `number` of the operation, the state before it, where the search stood."""

    number: int
    before: State
    entry: int
    spare: int
    pure: bool


class _Search(Generic[Call, State]):
    """Operations are numbered: those that returned in order of their calls, then those that did not.

    `_next` and `_previous` are a list of the calls and returns of the former that are not taken yet, in order of time:
    entry 2n is the call of operation n, 2n + 1 its return, and the last entry the end of the list on both sides. What
    is before the first return may be next; an operation without a return is tried when nothing else will do.
    """

    def __init__(self, model: Model[Call, State], operations: Sequence[Operation[Call]], steps_max: int) -> None:
        self._model = model
        known = sorted((o for o in operations if o.returned is not None), key=lambda o: o.invoked)
        replies = frozenset(o.reply for o in known)
        self._spares = [
            replace(o, call=model.blur(o.call, replies))
            for o in sorted(operations, key=lambda o: o.invoked)
            if o.returned is None and model.effects(o.call)
        ]
        self._known = known
        self._operations = [*known, *self._spares]
        times = [t for o in known for t in (o.invoked, o.returned or 0)]
        # At the same time calls come first: what cannot be told apart counts as concurrent.
        order = sorted(range(len(times)), key=lambda entry: (times[entry], entry % 2))
        self._times = times
        self._end = len(times)
        ring = [self._end, *order, self._end]
        self._next = [0] * (self._end + 1)
        self._previous = [0] * (self._end + 1)
        for left, right in pairwise(ring):
            self._next[left], self._previous[right] = right, left
        # Of spares that ask for the same the one that was called first is taken first: any other would do no more.
        latest: dict[Call, int] = {}
        self._twins: dict[int, int] = {}
        for number, spare in enumerate(self._spares, start=len(known)):
            if spare.call in latest:
                self._twins[number] = latest[spare.call]
            latest[spare.call] = number
        self._state = model.initial()
        self._taken: list[_Taken[State]] = []
        self._mask = 0
        self._seen: set[tuple[int, State]] = set()
        self._steps_left = steps_max
        self._done, self._best = 0, -1
        self._violation: Violation[Call] = Violation(0, len(known), self._state, ())

    def run(self) -> Violation[Call] | None:
        entry, spare = self._next[self._end], 0
        while entry != self._end:
            if entry % 2 == 0:
                if self._take(entry // 2, entry, 0):
                    entry, spare = self._next[self._end], 0
                else:
                    entry = self._next[entry]
            elif spare < len(self._spares) and self._spares[spare].invoked <= self._times[entry]:
                if self._take(len(self._known) + spare, entry, spare + 1):
                    entry, spare = self._next[self._end], 0
                else:
                    spare += 1
            else:
                self._note(entry)
                back = self._back()
                if back is None:
                    return self._violation
                entry, spare = back
        return None

    def _take(self, number: int, entry: int, spare: int) -> bool:
        """Let the operation be the next, where that explains its reply and was not tried before."""
        if self._mask >> number & 1 or self._has_twin(number):
            return False
        self._steps_left -= 1
        if self._steps_left < 0:
            raise UndecidedError(f"undecided; the best attempt: {self._violation}")
        operation = self._operations[number]
        state, reply = self._model.apply(self._state, operation.call)
        known = operation.returned is not None
        if known and reply != operation.reply:
            return False
        if not known and state == self._state:
            return False  # it need not take effect at all
        visited = (self._mask | 1 << number, state)
        if visited in self._seen:
            return False
        self._seen.add(visited)
        # What changes nothing and fits now would fit no better later: there is nothing to come back to.
        pure = known and self._model.pure(operation.call, operation.reply)
        self._taken.append(_Taken(number, self._state, entry, spare, pure))
        self._mask, self._state = visited
        if known:
            self._done += 1
            self._cut(2 * number)
            self._cut(2 * number + 1)
        return True

    def _has_twin(self, number: int) -> bool:
        """Whether the same was called before it, and is not taken yet."""
        twin = self._twins.get(number)
        return twin is not None and not self._mask >> twin & 1

    def _back(self) -> tuple[int, int] | None:
        """Undo the last step that had alternatives; where the search goes on then. None: there is none left."""
        while self._taken:
            last = self._taken.pop()
            self._mask &= ~(1 << last.number)
            self._state = last.before
            if last.number < len(self._known):
                self._done -= 1
                self._restore(2 * last.number + 1)
                self._restore(2 * last.number)
            if not last.pure:
                return (last.entry, last.spare) if last.entry % 2 else (self._next[last.entry], 0)
        return None

    def _cut(self, entry: int) -> None:
        left, right = self._previous[entry], self._next[entry]
        self._next[left], self._previous[right] = right, left

    def _restore(self, entry: int) -> None:
        left, right = self._previous[entry], self._next[entry]
        self._next[left], self._previous[right] = entry, entry

    def _note(self, entry: int) -> None:
        """Keep the attempt that came farthest, for whoever has to understand the violation."""
        if self._done <= self._best:
            return
        self._best = self._done
        stuck: list[Operation[Call]] = []
        one = self._next[self._end]
        while one != entry:
            stuck.append(self._operations[one // 2])
            one = self._next[one]
        self._violation = Violation(self._done, len(self._known), self._state, tuple(stuck))
