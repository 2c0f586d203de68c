"""Whether to replace the leader, decided from what one replica knows: pure. See docs/design/0003-election.md.

A wrong decision costs a pause and never a commit: the store lets one win of several, and refuses whoever was deposed.
So everything here keeps a healthy leader in place, and waits for a dead one no longer than it must.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from controld.core.ids import Epoch
from controld.store.port import Incumbent

MS_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class Timings:
    """Defaults are those of the design (store): pings 100 ms, takeover 400 ms, no ping on a proof older than 750 ms.

    `answer_ns`: how long a peer's answer is good for. `hold_back_ns`: after a takeover that failed, before the next.
    `stall_ns`: a loop that stood still for so long has not listened meanwhile. `doubt_ns`: how long one may take.
    """

    ping_interval_ns: int = 100 * MS_NS
    takeover_ns: int = 400 * MS_NS
    proof_max_ns: int = 750 * MS_NS
    ask_interval_ns: int = 50 * MS_NS
    answer_ns: int = 200 * MS_NS
    hold_back_ns: int = 100 * MS_NS
    stall_ns: int = 200 * MS_NS
    doubt_ns: int = 1_000 * MS_NS


class Verdict(StrEnum):
    """What a peer says of the incumbent."""

    AGREES = "AGREES"
    """It hears nothing of it either, or is it and cannot prove its leadership."""
    HEARS = "HEARS"
    LEADS = "LEADS"
    """It is the incumbent, and has proved so a moment ago."""
    OTHER = "OTHER"
    """It knows a later leadership."""
    BLIND = "BLIND"
    """It cannot tell."""


class Why(StrEnum):
    BLIND = "BLIND"
    HELD_BACK = "HELD_BACK"
    HEARD = "HEARD"
    SILENCE = "SILENCE"
    DENIED = "DENIED"
    VACANT = "VACANT"
    FORMER_LIFE = "FORMER_LIFE"
    INVITED = "INVITED"
    NO_EVIDENCE = "NO_EVIDENCE"
    AGREED = "AGREED"
    OTHER_STORE = "OTHER_STORE"
    """Its store is empty, and a peer knows a leader: they do not share one store."""


DENIALS = frozenset({Verdict.HEARS, Verdict.LEADS, Verdict.OTHER})
_NO_ANSWERS: Mapping[str, tuple[Verdict, int]] = {}


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a follower knows. Times are its own BOOTTIME in ns.

    `sees`: its copy is loaded and goes along with the store. `seen_ns`: when it saw the incumbent. `heard_ns`: when the
    last ping of the incumbent came in. `listening_ns`: since when its own loop has not stood still. `answers`: by
    peer, about this incumbent. `invited`: the token of a leader that asked this replica to take its place. `cut`: its
    stream of pings broke, and no ping has come since. `unused`: nobody has ever led in its store.
    """

    identity: str
    address: str
    sees: bool
    incumbent: Incumbent | None
    seen_ns: int
    listening_ns: int
    heard_ns: int | None = None
    answers: Mapping[str, tuple[Verdict, int]] = field(default_factory=lambda: _NO_ANSWERS)
    asked_ns: int | None = None
    invited: int | None = None
    held_back_ns: int = 0
    cut: bool = False
    unused: bool = False

    @property
    def token(self) -> int:
        """Of the incumbent; 0 while nobody leads."""
        return 0 if self.incumbent is None else self.incumbent.leadership.token

    @property
    def own(self) -> bool:
        """Whether the incumbent is this replica: in a former life, or by a takeover it had no answer to."""
        held = self.incumbent
        return held is not None and (held.leadership.identity, held.address) == (self.identity, self.address)

    def silent_since_ns(self) -> int:
        """No earlier than it could have heard anything."""
        return max(self.seen_ns, self.listening_ns, self.seen_ns if self.heard_ns is None else self.heard_ns)


@dataclass(frozen=True, slots=True)
class Wait:
    """`until_ns`: when the decision changes if nothing happens; None: it does not."""

    why: Why
    until_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """Every peer, whether it hears the leader of `token`."""

    token: int
    why: Why


@dataclass(frozen=True, slots=True)
class TakeOver:
    """In place of the leadership of `token`; 0: while nobody leads."""

    token: int
    why: Why


Action = Wait | Ask | TakeOver


def decide(now_ns: int, known: Knowledge, timings: Timings) -> Action:
    if not known.sees:
        return Wait(Why.BLIND)
    if now_ns < known.held_back_ns:
        return Wait(Why.HELD_BACK, known.held_back_ns)
    alone = _alone(known)
    if alone is Why.VACANT and known.unused:
        return _begin(now_ns, known, timings)
    if alone is not None:
        return TakeOver(known.token, alone)
    due_ns = known.silent_since_ns() + timings.takeover_ns
    if now_ns < due_ns:
        return Wait(Why.HEARD, due_ns)
    # An answer from before the silence was due was about a leader that was heard.
    verdicts = {v for v, at_ns in known.answers.values() if at_ns >= due_ns and now_ns - at_ns < timings.answer_ns}
    denied = bool(verdicts & DENIALS)
    if Verdict.AGREES in verdicts and not denied:
        return TakeOver(known.token, Why.AGREED)
    why = Why.DENIED if denied else Why.SILENCE
    if known.asked_ns is None or known.asked_ns < due_ns or now_ns - known.asked_ns >= timings.ask_interval_ns:
        return Ask(known.token, why)
    return Wait(why, known.asked_ns + timings.ask_interval_ns)


def _begin(now_ns: int, known: Knowledge, timings: Timings) -> Action:
    """To lead in an empty store begins a cluster, and one whose settings name another store than its peers' would begin
    a second one beside theirs: so the peers are asked first, and who once said that another leads must take it back.
    """
    if known.asked_ns is None:
        return Ask(0, Why.VACANT)
    if {verdict for verdict, _ in known.answers.values()} & DENIALS:
        again_ns = known.asked_ns + timings.doubt_ns
        return Ask(0, Why.OTHER_STORE) if now_ns >= again_ns else Wait(Why.OTHER_STORE, again_ns)
    due_ns = known.asked_ns + timings.answer_ns
    return TakeOver(0, Why.VACANT) if now_ns >= due_ns else Wait(Why.VACANT, due_ns)


def _alone(known: Knowledge) -> Why | None:
    """Why no other replica need be asked."""
    if known.incumbent is None:
        return Why.VACANT
    if known.own:
        return Why.FORMER_LIFE
    if known.invited == known.token:
        return Why.INVITED
    return None if known.incumbent.alive else Why.NO_EVIDENCE


def judge(now_ns: int, known: Knowledge, token: int, timings: Timings) -> Verdict:
    """A follower's answer to whether the leader of `token` is gone."""
    if not known.sees or known.token < token:
        return Verdict.BLIND
    if known.token > token:
        return Verdict.OTHER
    if _alone(known) is not None or now_ns - known.silent_since_ns() >= timings.takeover_ns:
        return Verdict.AGREES
    heard = known.heard_ns is not None and now_ns - known.heard_ns < timings.takeover_ns
    return Verdict.HEARS if heard else Verdict.BLIND  # it has not listened for long enough


def judge_leading(now_ns: int, own_token: int, proved_ns: int, token: int, timings: Timings) -> Verdict:
    """The answer of a replica that leads, as far as it knows."""
    if own_token != token:
        return Verdict.OTHER if own_token > token else Verdict.BLIND
    return Verdict.LEADS if may_ping(now_ns, proved_ns, timings) else Verdict.AGREES


def in_doubt(now_ns: int, known: Knowledge, timings: Timings) -> bool:
    """Whether another may lead any moment, so that it is better to wait for that than to name the incumbent.

    A silence that lasts and ends no leadership is a bad link of this replica's own, and no doubt any more.
    """
    if known.incumbent is None or known.own:
        return True
    silent_ns = now_ns - known.silent_since_ns()
    return (known.cut or silent_ns >= timings.takeover_ns // 2) and silent_ns < timings.takeover_ns + timings.doubt_ns


def may_ping(now_ns: int, proved_ns: int, timings: Timings) -> bool:
    """Whether a leader that last proved itself at `proved_ns` may tell its followers that it leads."""
    return now_ns - proved_ns <= timings.proof_max_ns


def counts(epoch: Epoch, incumbent: Incumbent | None) -> bool:
    """Whether a ping is one of the incumbent's: a deposed leader goes on for a while, and it must not be heard."""
    return incumbent is not None and epoch == incumbent.leadership.epoch
