"""What waits for one agent."""

from __future__ import annotations

import pytest

from controld.core.agent import BeatAck, Order, Release, SlotState, SlotStatus, TaskReply, Welcome
from controld.core.ids import Epoch, JobId, SlotId, Token
from controld.replica.errors import SessionClosedError
from controld.replica.outbox import Outbox, OutboxFullError
from virialpb.reasons import Reason

CLOSED = SessionClosedError(Reason.STALE, "over")


def release(n: int) -> Release:
    return Release(SlotId(f"j.1.{n}"), Token(JobId("j"), 1, Epoch(1, 5)))


def box(*, orders_max: int = 3, replies_max: int = 3, fallen: tuple[Order, ...] = ()) -> Outbox:
    return Outbox(orders_max=orders_max, replies_max=replies_max, stands=lambda order: order not in fallen)


async def drain(outbox: Outbox) -> list[Order]:
    return [await outbox.take() for _ in range(len(outbox))]


async def test_answers_go_before_acknowledgements_and_these_before_orders() -> None:
    outbox = box()
    for order in (release(1), BeatAck(4), Welcome(1000, "c"), TaskReply(1, SlotId("j.1.0")), release(2)):
        outbox.put(order)
    kinds = [type(o).__name__ for o in await drain(outbox)]
    assert kinds == ["Welcome", "TaskReply", "BeatAck", "Release", "Release"]


async def test_the_newest_acknowledgement_says_all() -> None:
    outbox = box()
    for seq in (4, 9, 7):
        outbox.put(BeatAck(seq))
    assert await drain(outbox) == [BeatAck(9)]


async def test_an_equal_order_waits_once_and_surplus_ones_are_turned_away() -> None:
    outbox = box()
    for _ in range(3):
        for n in range(5):
            outbox.put(release(n))
    assert outbox.turned_away == 6
    assert await drain(outbox) == [release(0), release(1), release(2)]


async def test_an_order_that_fell_while_it_waited_is_not_sent() -> None:
    outbox = box(fallen=(release(0), release(1)))
    for n in range(3):
        outbox.put(release(n))
    assert await outbox.take() == release(2)
    assert len(outbox) == 0


def test_answers_are_bounded_too() -> None:
    outbox = box()
    for n in range(3):
        outbox.put(TaskReply(n, SlotId("j.1.0")))
    with pytest.raises(OutboxFullError):
        outbox.put(TaskReply(3, SlotId("j.1.0")))


async def test_closing_keeps_answers_and_drops_the_rest() -> None:
    outbox = box()
    for order in (release(1), BeatAck(4), TaskReply(1, SlotId("j.1.0"))):
        outbox.put(order)
    outbox.close(CLOSED)
    outbox.put(release(2))
    assert await outbox.take() == TaskReply(1, SlotId("j.1.0"))
    with pytest.raises(SessionClosedError):
        await outbox.take()


def test_orders_can_be_told_apart_by_hash() -> None:
    """The queue is a dict of them: each kind must be hashable, whatever it carries."""
    status = SlotStatus(SlotId("j.1.0"), Token(JobId("j"), 1, Epoch(1, 5)), SlotState.READY)
    assert len({status, release(0), release(0), BeatAck(1)}) == 3
