"""The election's decisions in a model of several replicas, where every step of a takeover may be interrupted.

Questions, answers, pings and takeovers take time, and may be lost; replicas are killed, restarted, stopped for a while,
cut off from each other, one way or both, and from the store. The store is the only thing that works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from controld.core.ids import Epoch
from controld.replica.election import (
    Action,
    Ask,
    Knowledge,
    TakeOver,
    Timings,
    Verdict,
    Wait,
    Why,
    counts,
    decide,
    judge,
    judge_leading,
    may_ping,
)
from controld.store.port import EVIDENCE_SECONDS, Incumbent, Leadership

MS = 1_000_000
STEP = 20 * MS
T = Timings()
EVIDENCE_NS = int(EVIDENCE_SECONDS * 1000) * MS
BARRIER_NS = 240 * MS
LONG = 3_600_000 * MS
DECIDE: Callable[[int, Knowledge, Timings], Action] = decide


@dataclass
class Node:
    known: Knowledge
    token: int | None = None  # of the leadership that it believes to have
    proved_ns: int = 0
    up: bool = True
    stopped_until_ns: int = 0
    store_cut: bool = False
    answers_lost: bool = False
    asking: set[int] = field(default_factory=set[int])
    truly_heard: dict[int, int] = field(default_factory=dict[int, int])  # token -> when a ping of it came in


class Model:
    """`takeovers`: (who, token before, why, at)."""

    def __init__(self, size: int) -> None:
        self.now_ns = 1_000_000 * MS
        self.incumbent: Incumbent | None = None
        self.token = 0
        self.barrier_ns = self.now_ns  # of the incumbent's last one that counted
        self.cut: set[tuple[int, int]] = set()
        self.wire: deque[tuple[int, Callable[[], None]]] = deque()
        self.nodes = [Node(self.fresh(i)) for i in range(size)]
        self.takeovers: list[tuple[int, int, Why, int]] = []
        self.agreed: list[tuple[int, int, int]] = []

    def fresh(self, i: int) -> Knowledge:
        now = self.now_ns
        return Knowledge(f"c{i}", f"h{i}:1", True, self.incumbent, seen_ns=now, listening_ns=now)

    # -- the world

    def send(self, a: int, b: int, what: Callable[[], None]) -> None:
        if (a, b) not in self.cut:
            self.wire.append((self.now_ns + STEP, what))

    def runs(self, i: int) -> bool:
        node = self.nodes[i]
        return node.up and node.stopped_until_ns <= self.now_ns

    def step(self) -> None:
        self.now_ns += STEP
        if self.incumbent and self.incumbent.alive and self.now_ns - self.barrier_ns > EVIDENCE_NS:
            self.incumbent = replace(self.incumbent, alive=False)
        for _ in range(len(self.wire)):
            at_ns, what = self.wire.popleft()
            if at_ns <= self.now_ns:
                what()
            else:
                self.wire.append((at_ns, what))
        for i, node in enumerate(self.nodes):
            if self.runs(i):
                if self.now_ns - node.stopped_until_ns < STEP:  # it has just gone on: the shell notices the stall
                    node.known = replace(node.known, listening_ns=self.now_ns)
                self.act(i, node)
        self.check()

    def act(self, i: int, node: Node) -> None:
        if not node.store_cut:
            self.look(node)
        if node.token is not None:
            self.lead(i, node)
        else:
            self.follow(i, node)

    def look(self, node: Node) -> None:
        """Its watch shows who leads."""
        known = node.known
        former = known.token
        node.known = replace(known, incumbent=self.incumbent, sees=True)
        if node.known.token != former:
            node.known = replace(node.known, seen_ns=self.now_ns, heard_ns=None, asked_ns=None, answers={})
            node.asking.clear()

    # -- leading and following

    def lead(self, i: int, node: Node) -> None:
        if self.now_ns - node.proved_ns >= BARRIER_NS and not node.store_cut:
            if node.token != self.token or self.incumbent is None:
                node.token, node.known = None, self.fresh(i)
                return
            if not node.answers_lost:
                node.proved_ns = self.now_ns
            self.barrier_ns = self.now_ns
            self.incumbent = replace(self.incumbent, alive=True)
        if may_ping(self.now_ns, node.proved_ns, T) and self.now_ns % (5 * STEP) == 0:
            token = node.token
            assert token is not None
            for j in range(len(self.nodes)):
                if j != i:
                    self.send(i, j, lambda j=j, token=token: self.ping(j, token))

    def ping(self, j: int, token: int) -> None:
        node = self.nodes[j]
        if self.runs(j) and node.token is None and counts(Epoch(1, token), node.known.incumbent):
            node.known = replace(node.known, heard_ns=self.now_ns)
            node.truly_heard[token] = self.now_ns

    def follow(self, i: int, node: Node) -> None:
        action = DECIDE(self.now_ns, node.known, T)
        if isinstance(action, Ask):
            node.known = replace(node.known, asked_ns=self.now_ns)
            for j in range(len(self.nodes)):
                if j != i:
                    self.send(i, j, lambda j=j, token=action.token: self.question(j, i, token))
        elif isinstance(action, TakeOver):
            node.known = replace(node.known, held_back_ns=self.now_ns + T.hold_back_ns)
            self.take_over(i, node, action)

    def question(self, j: int, i: int, token: int) -> None:
        node = self.nodes[j]
        if not self.runs(j):
            return
        if node.token is not None:
            verdict = judge_leading(self.now_ns, node.token, node.proved_ns, token, T)
        else:
            verdict = judge(self.now_ns, node.known, token, T)
        if verdict is Verdict.AGREES:
            self.agreed.append((j, token, self.now_ns))
            assert self.truly_silent(node, token)
        self.send(j, i, lambda: self.answer(i, j, token, verdict))

    def answer(self, i: int, j: int, token: int, verdict: Verdict) -> None:
        node = self.nodes[i]
        if self.runs(i) and node.token is None and node.known.token == token:
            answers = {**node.known.answers, f"h{j}:1": (verdict, self.now_ns)}
            node.known = replace(node.known, answers=answers)

    def take_over(self, i: int, node: Node, action: TakeOver) -> None:
        if node.store_cut:
            return
        held = 0 if self.incumbent is None else self.incumbent.leadership.token
        if held != action.token:
            return
        self.justified(i, node, action)
        self.takeovers.append((i, action.token, action.why, self.now_ns))
        self.token += 1
        self.incumbent = Incumbent(Leadership(f"c{i}", self.token, Epoch(1, self.token)), f"h{i}:1")
        self.barrier_ns = self.now_ns
        if not node.answers_lost:
            node.token, node.proved_ns = self.token, self.now_ns

    # -- what must hold

    def justified(self, i: int, node: Node, action: TakeOver) -> None:
        """A leadership ends only for what truly happened."""
        heard_ns = node.truly_heard.get(action.token, -LONG)
        match action.why:
            case Why.AGREED:
                assert self.now_ns - heard_ns >= T.takeover_ns
                assert any(
                    token == action.token and j != i and self.now_ns - at_ns <= T.answer_ns + 2 * STEP
                    for j, token, at_ns in self.agreed
                )
            case Why.NO_EVIDENCE:
                assert self.now_ns - self.barrier_ns > EVIDENCE_NS
            case Why.FORMER_LIFE:
                assert node.known.own
            case _:
                assert action.why is Why.VACANT

    def truly_silent(self, node: Node, token: int) -> bool:
        """Whether a replica has good reason to agree: it is that leader and can prove nothing, or was it in a former
        life; or the store has no evidence of it; or no ping has come for long enough."""
        if node.token is not None:
            return self.now_ns - node.proved_ns > T.proof_max_ns
        if node.known.own or (node.known.incumbent is not None and not node.known.incumbent.alive):
            return True
        return token == 0 or self.now_ns - node.truly_heard.get(token, -LONG) >= T.takeover_ns

    def check(self) -> None:
        """Of all that believe to lead, the store's incumbent alone can prove anything newer than its own takeover."""
        last_ns = self.takeovers[-1][3] if self.takeovers else 0
        for node in self.nodes:
            if node.token is not None and node.token != self.token:
                assert node.proved_ns <= last_ns


FAULTS = ("kill", "restart", "stop", "cut", "cut one way", "heal", "store", "answers", "wait", "wait long")
EVENTS = st.lists(
    st.tuples(st.sampled_from(FAULTS), st.integers(0, 4), st.integers(0, 4), st.integers(1, 20)), max_size=20
)


def play(model: Model, event: tuple[str, int, int, int]) -> None:
    kind, a, b, steps = event
    size = len(model.nodes)
    i, j = a % size, b % size
    node = model.nodes[i]
    match kind:
        case "kill":
            node.up = False
        case "restart":
            model.nodes[i] = Node(model.fresh(i))
        case "stop":
            node.stopped_until_ns = model.now_ns + 10 * steps * STEP
        case "cut":
            model.cut |= {(i, j), (j, i)} if i != j else set()
        case "cut one way":
            model.cut.add((i, j))
        case "heal":
            model.cut.clear()
        case "store":
            node.store_cut = not node.store_cut
        case "answers":
            node.answers_lost = not node.answers_lost
        case _:
            steps *= 10 if kind == "wait long" else 1
    for _ in range(steps):
        model.step()


def mend(model: Model) -> None:
    model.cut.clear()
    for i, node in enumerate(model.nodes):
        if not node.up:
            model.nodes[i] = Node(model.fresh(i))
        node.store_cut = node.answers_lost = False
        node.stopped_until_ns = min(node.stopped_until_ns, model.now_ns)


def leaderships_end_for_a_reason(size: int, events: list[tuple[str, int, int, int]]) -> None:
    """And begin again once all is mended."""
    model = Model(size)
    for event in events:
        play(model, event)
    mend(model)
    for _ in range(250):  # five seconds
        model.step()
    leading = [node.token for node in model.nodes if node.token is not None]
    assert leading == [model.token]
    before = len(model.takeovers)
    for _ in range(250):
        model.step()
    assert len(model.takeovers) == before, "a leader that works is left alone"


def one_follower_alone_deposes_nobody(lone: int, events: list[tuple[str, int, int, int]]) -> None:
    """Whatever befalls that one follower and its links, while the leader and the other are well."""
    model = Model(3)
    for _ in range(20):
        model.step()
    (leader,) = [i for i, node in enumerate(model.nodes) if node.token is not None]
    one = [i for i in range(3) if i != leader][lone]
    before = len(model.takeovers)
    for kind, a, _, steps in events:
        other = [i for i in range(3) if i != one][a % 2]
        if kind in ("kill", "restart", "stop", "store", "answers", "wait", "wait long"):
            play(model, (kind, one, 0, steps))
        elif kind == "heal":
            play(model, (kind, 0, 0, steps))
        else:
            pair = (one, other) if steps % 2 else (other, one)
            play(model, (kind, *pair, steps))
    assert len(model.takeovers) == before


@settings(max_examples=200)
@given(size=st.sampled_from([2, 3, 5]), events=EVENTS)
def test_leaderships_end_for_a_reason_and_begin_again(size: int, events: list[tuple[str, int, int, int]]) -> None:
    leaderships_end_for_a_reason(size, events)


@settings(max_examples=200)
@given(lone=st.integers(0, 1), events=EVENTS)
def test_one_follower_alone_never_deposes_a_healthy_leader(lone: int, events: list[tuple[str, int, int, int]]) -> None:
    one_follower_alone_deposes_nobody(lone, events)


def silence_is_enough(now_ns: int, known: Knowledge, timings: Timings) -> Action:
    action = decide(now_ns, known, timings)
    return TakeOver(action.token, Why.AGREED) if isinstance(action, Ask) else action


def a_denial_is_no_answer(now_ns: int, known: Knowledge, timings: Timings) -> Action:
    agreeing = {peer: (Verdict.AGREES, at_ns) for peer, (_, at_ns) in known.answers.items()}
    return decide(now_ns, replace(known, answers=agreeing), timings)


def waits_for_ever(now_ns: int, known: Knowledge, timings: Timings) -> Action:
    action = decide(now_ns, known, timings)
    alone = isinstance(action, TakeOver) and action.why in (Why.NO_EVIDENCE, Why.FORMER_LIFE)
    return Wait(Why.SILENCE) if alone else action


@pytest.mark.parametrize("defect", [silence_is_enough, a_denial_is_no_answer, waits_for_ever])
def test_the_model_catches(defect: Callable[..., Action], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decision replaced by a worse one: some sequence of faults shows it."""
    monkeypatch.setattr("tests.property.test_election.DECIDE", defect)

    @settings(max_examples=400, phases=[Phase.generate], database=None, derandomize=True)
    @given(size=st.sampled_from([2, 3, 5]), lone=st.integers(0, 1), events=EVENTS)
    def play_both(size: int, lone: int, events: list[tuple[str, int, int, int]]) -> None:
        one_follower_alone_deposes_nobody(lone, events)
        leaderships_end_for_a_reason(size, events)

    with pytest.raises(AssertionError):
        play_both()
