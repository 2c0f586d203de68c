"""The lease clock: until when this node may run what it was granted.

A deadline is the SEND time of the last renewal that was acknowledged + fence_after * (1 - rho) - K. The controller
counts from its RECEIPT of the same renewal, full fence_after and a grace on top. Send <= receipt, so the agent stops
first whatever the delay was; rho (1 %) covers clocks of different rates, K (1 s) the time it takes to kill.
CLOCK_BOOTTIME throughout, integers only.
"""

from __future__ import annotations

from typing import Final

from virialpb.lease import lease_length_ns

BEATS_REMEMBERED_MAX: Final = 1024
"""An ack that is later than so many beats is worth nothing: no fence_after is that long in renewals it could save."""


class LeaseClock:
    """Send times of beats, and which of them were acknowledged.

    Invariant: `renewed_ns` never falls within one incarnation, and is the send time of a beat that was really sent
    while the guardian answered.
    """

    def __init__(self) -> None:
        self._sent: dict[int, int] = {}
        self._last_seq = 0
        self.renewed_ns: int | None = None

    def sent(self, seq: int, now_ns: int, *, renews: bool) -> None:
        """A beat goes out now. `renews` False: the guardian does not answer, so it asks for nothing."""
        self._last_seq = seq
        if renews:
            self._sent[seq] = now_ns
            if len(self._sent) > BEATS_REMEMBERED_MAX:
                del self._sent[next(iter(self._sent))]

    def acknowledged(self, seq: int) -> bool:
        """Whether this ack moved the clock. An ack of a beat that was never sent moves nothing."""
        if seq > self._last_seq:
            return False
        covered = [sent for sent in self._sent if sent <= seq]
        if not covered:
            return False
        self.renewed_ns = self._sent[covered[-1]]
        for sent in covered:
            del self._sent[sent]
        return True

    def deadline_ns(self, fence_after_ms: int) -> int | None:
        """None before the first acknowledged renewal of this incarnation."""
        return None if self.renewed_ns is None else self.renewed_ns + lease_length_ns(fence_after_ms)

    def reset(self) -> None:
        """A new incarnation: what was acknowledged to the old one does not count."""
        self._sent.clear()
        self.renewed_ns = None
