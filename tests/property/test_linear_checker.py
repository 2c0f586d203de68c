"""The checker of histories against every order there is, and against objects that keep their word and that do not."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.linear.checker import Operation, check
from tests.linear.models import NOT_FOUND, OK, HoldCall, Holds, Place, ReadHold, Release

K = "k"
Operations = list[Operation[HoldCall]]


def explained(history: Sequence[Operation[HoldCall]]) -> bool:
    """By trying every order of every choice of the operations that may have taken effect."""
    known = [o for o in history if o.returned is not None]
    unknown = [o for o in history if o.returned is None]
    chosen = (c for size in range(len(unknown) + 1) for c in combinations(unknown, size))
    return any(_valid(order) for some in chosen for order in permutations([*known, *some]))


def _valid(order: Sequence[Operation[HoldCall]]) -> bool:
    model, state = Holds(), Holds().initial()
    for index, operation in enumerate(order):
        if any(later.returned is not None and later.returned < operation.invoked for later in order[index + 1 :]):
            return False
        state, reply = model.apply(state, operation.call)
        if operation.returned is not None and reply != operation.reply:
            return False
    return True


REASONS = st.sampled_from(["a", "b"])


@st.composite
def operations(draw: st.DrawFn) -> Operation[HoldCall]:
    invoked = draw(st.integers(0, 12))
    returned = draw(st.none() | st.integers(0, 6).map(lambda length: invoked + length))
    match draw(st.sampled_from(["place", "release", "read"])):
        case "place":
            return Operation("c", Place(K, draw(REASONS)), invoked, returned, OK)
        case "release":
            return Operation("c", Release(K), invoked, returned, draw(st.sampled_from([OK, NOT_FOUND])))
        case _:
            return Operation("c", ReadHold(K), invoked, returned, draw(st.none() | REASONS))


@settings(max_examples=300, deadline=None)
@given(st.lists(operations(), max_size=6))
def test_it_says_what_trying_every_order_says(history: Operations) -> None:
    assert (check(Holds(), history) is None) == explained(history)


def played(rng: random.Random, count: int, clients: int) -> Operations:
    """What clients see of an object that keeps its word; each call takes effect at a moment between call and return."""
    history: Operations = []
    model, state = Holds(), Holds().initial()
    free = [0] * clients
    moment = 0
    for number in range(count):
        client = rng.randrange(clients)
        moment = max(moment, free[client]) + rng.randrange(1, 6)
        call = rng.choice([Place(K, f"r{number}"), Release(K), ReadHold(K), ReadHold(K)])
        state, reply = model.apply(state, call)
        invoked = rng.randrange(free[client], moment)
        returned = moment + rng.randrange(1, 40)
        lost = not isinstance(call, ReadHold) and rng.random() < 0.1
        history.append(Operation(f"c{client}", call, invoked, None if lost else returned, reply))
        free[client] = returned + 1
    return history


@settings(max_examples=100, deadline=None)
@given(st.integers(), st.integers(1, 5))
def test_what_an_object_did_that_keeps_its_word_is_never_blamed(seed: int, clients: int) -> None:
    assert check(Holds(), played(random.Random(seed), 150, clients)) is None


def broken(history: Operations) -> Iterator[tuple[str, Operations]]:
    """The same history, and then what clients see, one after another, of an object with one defect."""
    begin = max(o.returned or o.invoked for o in history) + 1
    reason = next(o.call.reason for o in history if isinstance(o.call, Place) and o.returned is not None)

    def then(*calls: tuple[HoldCall, Hashable]) -> Operations:
        more = [Operation("d", call, begin + 2 * n, begin + 2 * n + 1, reply) for n, (call, reply) in enumerate(calls)]
        return [*history, *more]

    last: tuple[HoldCall, Hashable] = (Place(K, "z"), OK)
    yield "a stale read", then(last, (ReadHold(K), reason))
    yield "applied twice", then(last, (ReadHold(K), "z"), (ReadHold(K), reason))
    yield "reordered", then(last, (Place(K, "y"), OK), (ReadHold(K), "z"))
    yield "a release that did nothing", then(last, (Release(K), OK), (ReadHold(K), "z"))
    if not any(isinstance(o.call, Release) and o.returned is None for o in history):  # which could explain these
        yield "a lost write", then(last, (ReadHold(K), None))
        yield "a refusal of what stands", then(last, (Release(K), NOT_FOUND))


@settings(max_examples=60, deadline=None)
@given(st.integers())
def test_one_defect_among_many_operations_is_caught(seed: int) -> None:
    first: Operation[HoldCall] = Operation("c0", Place(K, "first"), 0, 1, OK)
    rest = [
        replace(o, invoked=o.invoked + 2, returned=None if o.returned is None else o.returned + 2)
        for o in played(random.Random(seed), 100, 4)
    ]
    for name, history in broken([first, *rest]):
        assert check(Holds(), history) is not None, name


def test_thousands_of_operations_of_eight_clients_are_decided() -> None:
    histories = [played(random.Random(seed), 500, 8) for seed in range(8)]
    assert all(sum(o.returned is None for o in history) > 10 for history in histories)
    assert [check(Holds(), history) for history in histories] == [None] * len(histories)
