"""The election's decisions, each row of docs/design/0003-election.md on a made-up state."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
    in_doubt,
    judge,
    judge_leading,
    may_ping,
)
from controld.store.port import Incumbent, Leadership

MS = 1_000_000
T = Timings()
NOW = 100_000 * MS
LEADER = Incumbent(Leadership("c1", 7, Epoch(1, 7)), "h1:1")


def knowledge(**changes: object) -> Knowledge:
    """A follower that has heard the leader 10 ms ago."""
    heard = Knowledge("c2", "h2:1", True, LEADER, seen_ns=NOW - 60_000 * MS, listening_ns=NOW - 70_000 * MS)
    return replace(heard, **{"heard_ns": NOW - 10 * MS, **changes})  # pyright: ignore[reportArgumentType]


SILENT = knowledge(heard_ns=NOW - 450 * MS)  # due 50 ms ago


def asked(**answers: tuple[Verdict, int]) -> Knowledge:
    """Silent, and asked 20 ms ago; answers came so many ms ago."""
    came = {peer: (verdict, NOW - age_ms * MS) for peer, (verdict, age_ms) in answers.items()}
    return replace(SILENT, asked_ns=NOW - 20 * MS, answers=came)


UNUSED = knowledge(incumbent=None, unused=True, heard_ns=None)
OWN = Incumbent(Leadership("c2", 7, Epoch(1, 7)), "h2:1")
AGREES, HEARS, LEADS, OTHER, BLIND = Verdict


@pytest.mark.parametrize(
    ("known", "action"),
    [
        pytest.param(knowledge(sees=False, incumbent=None), Wait(Why.BLIND), id="a copy that is not loaded"),
        pytest.param(knowledge(incumbent=None), TakeOver(0, Why.VACANT), id="nobody leads"),
        pytest.param(knowledge(incumbent=OWN), TakeOver(7, Why.FORMER_LIFE), id="itself, restarted"),
        pytest.param(
            knowledge(incumbent=replace(OWN, address="h9:1")),
            Wait(Why.HEARD, NOW + 390 * MS),
            id="one of its name elsewhere",
        ),
        pytest.param(knowledge(invited=7), TakeOver(7, Why.INVITED), id="invited by the leader"),
        pytest.param(knowledge(invited=6), Wait(Why.HEARD, NOW + 390 * MS), id="invited by a former leader"),
        pytest.param(
            knowledge(incumbent=replace(LEADER, alive=False)), TakeOver(7, Why.NO_EVIDENCE), id="the store says so"
        ),
        pytest.param(knowledge(), Wait(Why.HEARD, NOW + 390 * MS), id="heard"),
        pytest.param(
            knowledge(heard_ns=None, seen_ns=NOW - 100 * MS), Wait(Why.HEARD, NOW + 300 * MS), id="seen a moment ago"
        ),
        pytest.param(
            knowledge(heard_ns=NOW - 9_000 * MS, listening_ns=NOW - 50 * MS),
            Wait(Why.HEARD, NOW + 350 * MS),
            id="its own loop stood still",
        ),
        pytest.param(SILENT, Ask(7, Why.SILENCE), id="silent"),
        pytest.param(replace(SILENT, heard_ns=NOW - 400 * MS), Ask(7, Why.SILENCE), id="silent since exactly now"),
        pytest.param(asked(), Wait(Why.SILENCE, NOW + 30 * MS), id="asked, no answer yet"),
        pytest.param(replace(asked(), asked_ns=NOW - 50 * MS), Ask(7, Why.SILENCE), id="asked a while ago"),
        pytest.param(
            replace(SILENT, asked_ns=NOW - 60 * MS + 1), Ask(7, Why.SILENCE), id="asked in an earlier silence"
        ),
        pytest.param(asked(b=(AGREES, 5)), TakeOver(7, Why.AGREED), id="one agrees"),
        pytest.param(asked(b=(AGREES, 5), c=(BLIND, 5)), TakeOver(7, Why.AGREED), id="one agrees, one is blind"),
        pytest.param(asked(b=(BLIND, 5)), Wait(Why.SILENCE, NOW + 30 * MS), id="one is blind"),
        pytest.param(asked(b=(HEARS, 5)), Wait(Why.DENIED, NOW + 30 * MS), id="another hears it"),
        pytest.param(asked(b=(AGREES, 5), c=(HEARS, 5)), Wait(Why.DENIED, NOW + 30 * MS), id="one agrees, one hears"),
        pytest.param(asked(b=(AGREES, 5), c=(LEADS, 5)), Wait(Why.DENIED, NOW + 30 * MS), id="the leader answers"),
        pytest.param(asked(b=(OTHER, 5)), Wait(Why.DENIED, NOW + 30 * MS), id="another leads by now"),
        pytest.param(
            replace(asked(b=(AGREES, 60)), asked_ns=NOW - 20 * MS),
            Wait(Why.SILENCE, NOW + 30 * MS),
            id="an answer from before the silence was due",
        ),
        pytest.param(
            replace(asked(b=(AGREES, 250)), heard_ns=NOW - 900 * MS),
            Wait(Why.SILENCE, NOW + 30 * MS),
            id="an answer of long ago",
        ),
        pytest.param(
            replace(asked(b=(AGREES, 5)), held_back_ns=NOW + 1), Wait(Why.HELD_BACK, NOW + 1), id="failed a moment ago"
        ),
        pytest.param(UNUSED, Ask(0, Why.VACANT), id="an empty store: the peers first"),
        pytest.param(replace(UNUSED, asked_ns=NOW - 150 * MS), Wait(Why.VACANT, NOW + 50 * MS), id="they have time"),
        pytest.param(replace(UNUSED, asked_ns=NOW - 200 * MS), TakeOver(0, Why.VACANT), id="nobody objects"),
        pytest.param(
            replace(UNUSED, asked_ns=NOW - 200 * MS, answers={"b": (AGREES, NOW), "c": (BLIND, NOW)}),
            TakeOver(0, Why.VACANT),
            id="they know nobody either",
        ),
        pytest.param(
            replace(UNUSED, asked_ns=NOW - 200 * MS, answers={"b": (OTHER, NOW - 9_000 * MS)}),
            Wait(Why.OTHER_STORE, NOW + 800 * MS),
            id="one knew a leader, and is silent since",
        ),
        pytest.param(
            replace(UNUSED, asked_ns=NOW - 1_000 * MS, answers={"b": (OTHER, NOW)}),
            Ask(0, Why.OTHER_STORE),
            id="one knows a leader: asked again",
        ),
    ],
)
def test_decide(known: Knowledge, action: Action) -> None:
    assert decide(NOW, known, T) == action


@pytest.mark.parametrize(
    ("known", "token", "verdict"),
    [
        pytest.param(knowledge(), 7, HEARS, id="hears it"),
        pytest.param(SILENT, 7, AGREES, id="does not hear it either"),
        pytest.param(replace(SILENT, heard_ns=NOW - 399 * MS), 7, HEARS, id="not yet"),
        pytest.param(replace(SILENT, listening_ns=NOW - 10 * MS), 7, BLIND, id="has not listened"),
        pytest.param(knowledge(heard_ns=None, seen_ns=NOW - 10 * MS), 7, BLIND, id="has just started"),
        pytest.param(SILENT, 6, OTHER, id="a later one leads"),
        pytest.param(SILENT, 8, BLIND, id="is behind"),
        pytest.param(replace(SILENT, sees=False), 7, BLIND, id="is blind"),
        pytest.param(knowledge(incumbent=replace(LEADER, alive=False)), 7, AGREES, id="the store says so"),
        pytest.param(knowledge(incumbent=OWN), 7, AGREES, id="it was the leader, and was restarted"),
        pytest.param(knowledge(incumbent=None), 0, AGREES, id="nobody leads"),
        pytest.param(knowledge(incumbent=None), 7, BLIND, id="has not seen it"),
    ],
)
def test_judge(known: Knowledge, token: int, verdict: Verdict) -> None:
    assert judge(NOW, known, token, T) is verdict


@pytest.mark.parametrize(
    ("own_token", "proof_age_ms", "token", "verdict"),
    [(7, 750, 7, LEADS), (7, 751, 7, AGREES), (8, 0, 7, OTHER), (6, 0, 7, BLIND)],
)
def test_a_leader_speaks_for_itself_only_with_a_fresh_proof(
    own_token: int, proof_age_ms: int, token: int, verdict: Verdict
) -> None:
    assert judge_leading(NOW, own_token, NOW - proof_age_ms * MS, token, T) is verdict


def test_pings_stop_with_an_old_proof() -> None:
    assert may_ping(NOW, NOW - 750 * MS, T)
    assert not may_ping(NOW, NOW - 751 * MS, T)


def test_only_pings_of_the_incumbent_count() -> None:
    assert counts(Epoch(1, 7), LEADER)
    assert not counts(Epoch(1, 6), LEADER)
    assert not counts(Epoch(1, 8), LEADER)
    assert not counts(Epoch(1, 7), None)


@pytest.mark.parametrize(
    ("known", "doubt"),
    [
        pytest.param(knowledge(), False, id="heard"),
        pytest.param(knowledge(heard_ns=NOW - 199 * MS), False, id="one ping missed"),
        pytest.param(knowledge(heard_ns=NOW - 200 * MS), True, id="two pings missed"),
        pytest.param(knowledge(cut=True), True, id="the stream broke"),
        pytest.param(SILENT, True, id="an election is due"),
        pytest.param(knowledge(heard_ns=NOW - 1_500 * MS), False, id="a silence that ended no leadership"),
        pytest.param(knowledge(heard_ns=None, seen_ns=NOW - 10 * MS), False, id="has just taken over"),
        pytest.param(knowledge(incumbent=None), True, id="nobody leads"),
        pytest.param(knowledge(incumbent=OWN), True, id="itself, soon"),
    ],
)
def test_in_doubt(known: Knowledge, doubt: bool) -> None:
    assert in_doubt(NOW, known, T) is doubt
