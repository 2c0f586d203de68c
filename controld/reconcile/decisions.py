"""What one pass of the control loop wants done."""

from __future__ import annotations

from dataclasses import dataclass, field

from controld.core.agent import Order, OrderTo
from controld.core.commands import Command, Now
from controld.core.ids import JobId, NodeUid, SlotId
from controld.core.model import Member
from controld.core.state import State
from controld.health.view import View
from controld.matching.port import Pending
from controld.reconcile.limits import Limits
from virialpb.ids import Epoch


@dataclass(frozen=True, slots=True)
class Decisions:
    commands: tuple[Command, ...]
    orders: tuple[OrderTo, ...]
    pending: tuple[Pending, ...]
    # An agent carries a token of a later commit than this leader knows: it is not the leader any more.
    newer_seen: bool = False
    # BOOTTIME at which silence alone will next mean something: a pass then sees it without delay.
    look_again_ns: int | None = None
    # (job, error) of jobs that a rule could not deal with: a defect, which must not stop the others.
    broken: tuple[tuple[JobId, str], ...] = ()


@dataclass(slots=True)
class Pass:
    """One pass under way: its inputs, and what was decided so far."""

    state: State
    view: View
    now: Now
    leader_epoch: Epoch
    limits: Limits
    commands: list[Command] = field(default_factory=list[Command])
    orders: list[OrderTo] = field(default_factory=list[OrderTo])
    pending: list[Pending] = field(default_factory=list[Pending])
    newer_seen: bool = False
    look_again_ns: int | None = None
    broken: list[tuple[JobId, str]] = field(default_factory=list[tuple[JobId, str]])
    # Of generations that agents have slots of: epoch, and members by slot, as of now.
    seats: dict[tuple[JobId, int], tuple[Epoch, dict[SlotId, Member]]] = field(
        default_factory=dict[tuple[JobId, int], tuple[Epoch, dict[SlotId, Member]]]
    )

    def order(self, node: NodeUid, about: str, order: Order) -> None:
        """Give an order, unless the same kind about the same thing was given within `resend_ns`.

        Orders are level-triggered: one that is lost is given again for as long as what agents report calls for it.
        """
        session = self.view.sessions.get(node)
        if session is None or not session.connected:
            return
        key = f"{type(order).__name__}:{about}"
        last_ns = session.sent_ns.get(key)
        if last_ns is not None and self.now.boottime_ns - last_ns < self.limits.resend_ns:
            return
        session.sent_ns[key] = self.now.boottime_ns
        self.orders.append(OrderTo(node, order))

    def decisions(self) -> Decisions:
        return Decisions(
            tuple(self.commands),
            tuple(self.orders),
            tuple(self.pending),
            self.newer_seen,
            self.look_again_ns,
            tuple(self.broken),
        )
