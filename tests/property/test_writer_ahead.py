"""Whatever is decided ahead, taken back, refused by the store or lost: the head, what is told, and what is stored are
one whenever nothing is under way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.core import events, keys
from controld.core.commands import Now
from controld.core.draft import Draft
from controld.core.ids import Incarnation, NodeUid
from controld.core.model import Cluster, JoinToken, Liveness, Node, Request
from controld.core.outcome import Outcome, Refused, Reply, Transition
from controld.core.state import Change, State
from controld.replica.errors import RefusedError
from controld.replica.observe import UNOBSERVED, silent
from controld.replica.states import restore
from controld.replica.writer import Decision, Source, Writer
from controld.store import codec
from controld.store.memory import MemoryDisk, MemoryStore
from controld.store.port import (
    Leadership,
    OutcomeUnknownError,
    StorageFullError,
    StoreClosedError,
    StoredChange,
    StoreError,
)
from tests.support_replica import LoopClock, quick, run
from virialpb.reasons import Reason

ROUNDS = 40


class Unreliable(MemoryStore):
    """Now and then there is no space, or an answer is lost: before the commit, or after it."""

    def __init__(self, disk: MemoryDisk, rng: random.Random) -> None:
        super().__init__(disk)
        self._rng = rng

    async def commit(self, leadership: Leadership, seq: int, changes: Sequence[StoredChange]) -> int:
        await self._pause()
        luck = self._rng.random()
        if luck < 0.06:
            raise StorageFullError("no space")
        if luck < 0.10:
            raise OutcomeUnknownError("lost on the way")
        revision = await super().commit(leadership, seq, changes)
        if luck < 0.14:
            raise OutcomeUnknownError("lost on the way back")
        return revision

    async def barrier(self, leadership: Leadership) -> None:
        await self._pause()
        if self._rng.random() < 0.1:
            raise OutcomeUnknownError("lost")
        await super().barrier(leadership)

    async def _pause(self) -> None:
        for _ in range(self._rng.randint(0, 4)):
            await asyncio.sleep(0)


def decision(rng: random.Random, number: int) -> Decision:
    """Few keys and few names, so that what is decided meets what is under way; some of it is too large, or broken."""
    request_id, kind = f"r{rng.randint(0, 60)}", rng.choice(("refuse", "break", *"tttttnnnnncp"))
    token, uid, name = f"{rng.randint(0, 12):064x}", NodeUid(f"u{rng.randint(0, 4)}"), f"n{rng.randint(0, 4)}"
    size, told, drop = rng.choice((1, 1, 1, 200, 900, 3_000)), rng.randint(0, 2), rng.random() < 0.4
    address = rng.choice(("h",) * 20 + ("\ud800",))  # which no codec takes

    def decide(state: State, at: Now) -> Outcome:
        if request_id in state.requests:
            return Transition(reply=Reply("again"))
        if kind == "break":
            raise ValueError("a rule that is broken")
        if kind == "refuse":
            return Refused(Reason.NOT_FOUND, "it")
        draft = Draft(state)
        if kind == "t" and drop and token in state.join_tokens:
            draft.delete(keys.join_token(token))
        elif kind == "t":
            draft.put(JoinToken(token, "n" * size, number))
        elif kind == "n":
            namesake = state.node_named(name)
            if namesake is not None:
                draft.delete(keys.node(namesake.uid))
            if not drop:
                draft.put(Node(uid, name, Incarnation(uid, "b", "g"), Liveness.LIVE, address, "pidns", number, 1))
        elif kind == "c":
            draft.put(replace(draft.cluster(), job_counter=number))
        else:
            for key in [*list(state.request_packs)[:1], *list(state.event_packs)[:1]]:
                draft.delete(key)
        draft.put(Request(request_id, f"f{number}", "it", at.unix_ns))
        for _ in range(told):
            draft.tell(events.event("token.created", node=name))
        return draft.done(Reply(request_id))

    return decide


def apart(one: State, other: State) -> list[str]:
    """Where they differ, in what is kept beside the tables too."""
    return [f.name for f in fields(State) if getattr(one, f.name) != getattr(other, f.name)]


async def one_life(seed: int) -> None:
    rng = random.Random(seed)
    disk = MemoryDisk()
    store = Unreliable(disk, random.Random(seed + 1))
    await store.open()
    leadership = await store.campaign("c1")
    await MemoryStore.commit(store, leadership, 1, [codec.encode_change(Change.put(Cluster("c")))])
    lost: list[StoreError] = []

    def on_lost(error: StoreError) -> None:
        lost.append(error)
        writer.close(error)

    writer = Writer(
        store=store,
        leadership=leadership,
        committed=restore(await store.load()),
        clock=LoopClock(),
        settings=quick(
            batch_bytes_max=rng.choice((500, 2_500, 1 << 20)),
            batch_operations_max=rng.choice((6, 12, 128)),
            batch_commands_max=rng.choice((8, 1_024)),
            slice_commands=rng.choice((2, 8, 128)),
            ahead_commands_min=rng.choice((1, 3)),
        ),
        observer=UNOBSERVED,
        log=silent,
        on_commit=lambda _: None,
        on_lost=on_lost,
    )
    writer._seq = 2
    running = asyncio.ensure_future(writer.run())
    asked: list[tuple[int, asyncio.Future[Reply]]] = []

    async def quiet(*, held: bool) -> None:
        if not held:
            await asyncio.wait([asyncio.ensure_future(writer._idle.wait()), *(future for _, future in asked)])
            await writer._idle.wait()
        if not lost:
            assert apart(writer._head, writer.committed) == []
            assert apart(restore(await store.load()), writer.committed) == []

    while len(asked) < 10 * ROUNDS and not lost:
        for _ in range(rng.randint(0, 25)):
            number = len(asked)
            future = writer.offer_decision("it", decision(rng, number), rng.choice(list(Source)))
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            asked.append((number, future))
            if rng.random() < 0.05:
                future.cancel()
        for _ in range(rng.randint(0, 6)):
            await asyncio.sleep(0)
        if not lost and rng.random() < 0.1:
            await writer.hold()
            await quiet(held=True)
            writer.release()
        if not lost and rng.random() < 0.2:
            await quiet(held=False)
    await quiet(held=False)
    writer.close(StoreClosedError("over"))
    await running
    there = {request.fingerprint for request in restore(await store.load()).requests.values()}
    for number, future in asked:
        error = None if future.cancelled() else future.exception()
        assert error is None or isinstance(error, (StoreError, RefusedError)), error
        if isinstance(error, (StorageFullError, RefusedError)):
            assert f"f{number}" not in there, "nothing of it was written"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 32))
def test_head_and_store_are_one_whenever_nothing_is_under_way(seed: int) -> None:
    run(lambda: one_life(seed))


def brought_back_in_steps(self: State, key: str, origin: State, over: Sequence[Change] = ()) -> None:
    real_reset(self, key, origin)
    for change in over:
        self.apply((change,), 0)


def nothing_under_way(self: State, key: str, origin: State, over: Sequence[Change] = ()) -> None:
    real_reset(self, key, origin)


real_reset = State.reset


def two_lives() -> None:
    """In both a node's name is taken over, and what was decided on top of that is taken back."""
    for seed in (17, 54):
        run(lambda s=seed: one_life(s))


@pytest.mark.parametrize("defect", [brought_back_in_steps, nothing_under_way])
def test_it_is_seen_to_fail(defect: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is how it was: a node lost its name on the head, and a second one of that name was let in."""
    monkeypatch.setattr(State, "reset", defect)
    with pytest.raises(AssertionError):
        two_lives()
